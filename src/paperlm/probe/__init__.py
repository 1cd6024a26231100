"""Measurements on the inside of models."""
