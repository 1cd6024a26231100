"""`python -m paperlm_kernels.bench`: measure the kernels and their peers, as rows of JSON."""
