"""Triton kernels of the project, importable on their own. Empty so far: no kernel has been measured and released."""
