"""The product by Hopper's copy engine compiles without a GPU: every form of tiles, on the matrix units, nothing spilled."""

from __future__ import annotations

import os
import re

import pytest

triton = pytest.importorskip("triton")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)

from paperlm_kernels.ternary_linear import hopper  # noqa: E402

if not hopper.has_stream():
    pytest.skip("this Triton has no Gluon for Hopper", allow_module_level=True)

from paperlm_kernels.ternary_linear import stream  # noqa: E402
from support_compile import SHARED, compile_for, spilled  # noqa: E402
from test_ternary_compile import SIZES  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

POINTERS = {
    "weight": "*u8", "scale": "*fp32", "rowsum": "*i32", "alpha": "*fp32", "y": "*bf16", "work": "*i32",
    "arrived": "*i32",
}  # fmt: skip


def all_forms():
    """What is compiled once of the tiles for these matrices and up to 4096 tokens on a card of 132 multiprocessors."""
    found = {hopper.stream_tiles_of(M, N, -(-K // 128) * 32, 132)
             for M in (5, 16, 17, 32, 33, 64, 65, 128, 256, 512, 4096) for N, K in SIZES}  # fmt: skip
    return sorted({(hopper.constants_of(t, gated)[1], t.warps) for t in found for gated in (False, True)}, key=str)
