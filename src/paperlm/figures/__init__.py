"""Figures, each with the CSV of its numbers."""
