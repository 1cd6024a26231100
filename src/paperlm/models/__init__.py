"""The decoder. `register()` makes transformers' Auto classes know it; sizes live in sizes.py."""
