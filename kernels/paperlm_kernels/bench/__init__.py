"""`python -m paperlm_kernels.bench`: measure operations and their peers, as rows of JSON; `ops` says how to add one."""
