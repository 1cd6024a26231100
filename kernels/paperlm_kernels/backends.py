"""Where an operation without a backend of its own choice runs, and what is said if it cannot run there."""

from __future__ import annotations

import difflib
import functools
import os
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec

import torch
from torch import Tensor

BACKENDS = ("auto", "triton", "reference")
HAS_TRITON = find_spec("triton") is not None
"Looked up once: torch.compile cannot trace the look-up."


@functools.cache
def _capable(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def chosen_backend(backend: str, tensor: Tensor, dtype: torch.dtype) -> str:
    """ "triton" or "reference"; "auto" is Triton on NVIDIA GPUs of compute capability 8.0 or newer that have it.

    dtype: of what comes out. Raises ValueError for an unknown name, and for "triton" where it cannot run.
    """
    if backend not in BACKENDS:
        near = difflib.get_close_matches(str(backend), BACKENDS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise ValueError(f"unknown backend {backend!r}{hint} known: {', '.join(BACKENDS)}")
    if backend == "reference":
        return backend
    if tensor.is_cuda:
        why = None if _capable(tensor.device) else "this is no NVIDIA GPU of compute capability 8.0 or newer"
    elif backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
        why = None
    else:
        why = "the tensors are on the CPU, where TRITON_INTERPRET=1 would interpret it"
    if why is None and not tensor.is_cuda and dtype == torch.bfloat16:
        why = "its interpreter rounds to bfloat16 wrongly; interpret it in float16 or float32"
    if why is None and not HAS_TRITON:
        why = "the package triton is not installed"
    if why is None:
        return "triton"
    if backend == "triton":
        raise ValueError(f"backend 'triton' cannot run: {why}; use backend='reference'")
    return "reference"


def without_autocast(device_type: str) -> AbstractContextManager:
    """Autocast off, on devices that have it."""
    # torch.amp.is_autocast_available would say it, but breaks the graph of torch.compile up to 2.11
    return torch.autocast(device_type, enabled=False) if device_type in ("cpu", "cuda") else nullcontext()
