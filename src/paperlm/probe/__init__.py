"""Measurements inside a trained model, block by block: pure functions on transformers models of any family."""
