"""What is run and why: paper files, scale files, runs. Imports neither torch nor transformers."""
