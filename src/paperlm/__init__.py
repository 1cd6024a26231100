"""paperlm: regenerate the tables of papers on training language models, and check their claims."""

__version__ = "0.1.0"
