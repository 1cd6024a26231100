"""The product of FIX4 on tensor cores without a card: its PTX step by step, and the kernel around it in Triton's
interpreter, where NumPy does what the PTX is written to do."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from paperlm_kernels.neuzip import kernel_gemv, pack
from paperlm_kernels.neuzip.header import Section
from support_neuzip import gaussian
from support_ptx import mma, run_ptx, words_at
from test_neuzip_product import near, weights

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="the interpreter runs it")


def test_its_ptx_decodes_eight_weights_as_the_format_says():
    rng, lowest = np.random.default_rng(0), 113
    codes = rng.integers(0, 2**32, 5000, dtype=np.uint32)
    codes[:2500] |= np.uint32(0x11111111)  # of no patched weight
    codes[0], codes[1], codes[2] = 0, 0xFFFFFFFF, 0x10000001
    items = rng.integers(0, 256, (5000, 8), dtype=np.uint8)
    low, high = (np.ascontiguousarray(items[:, i : i + 4]).view(np.uint32)[:, 0] for i in (0, 4))
    base = np.full(5000, (lowest - 1) * 0x00800080, np.uint32)
    found = run_ptx(kernel_gemv.DECODE.value, [codes, low, high, base], 4)
    for j in range(8):
        code, item = codes >> np.uint32(4 * j) & 15, items[:, j].astype(np.uint32)
        right = (item & 0x80) << 8 | (code + lowest - 1) << 7 | item & 0x7F
        assert (found[j % 4] >> np.uint32(16 * (j // 4)) & 0xFFFF == np.where(code == 0, 0, right)).all(), j


@pytest.fixture
def in_numpy(monkeypatch):
    """The kernel's four pieces of PTX, by their meaning."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def data(*tensors):
        return [one.handle.data for one in tensors]

    def tensors(arrays, dtype):
        kind = tl.block_type(dtype, [len(arrays[0])])
        return tuple(tl.tensor(TensorHandle(array, dtype), kind) for array in arrays)

    def four_pairs(*given):
        inputs = [one.view(np.uint32) for one in data(*given)]
        return tensors([one.view(np.int32) for one in run_ptx(kernel_gemv.DECODE.value, inputs, 4)], tl.int32)

    def added_product(*given):
        found = data(*given)
        return tensors(mma(found[:4], found[4:8], found[8:]), tl.float32)

    def four_words(address):
        return tensors(words_at(*data(address), np.ones(address.shape[0], bool)), tl.int32)

    def four_words_of_some(address, there):
        return tensors(words_at(*data(address, there)), tl.int32)

    for piece in (four_pairs, added_product, four_words, four_words_of_some):
        monkeypatch.setattr(kernel_gemv, piece.__name__, piece)


def product(x, packed, warps):
    """As `paperlm_kernels.neuzip.product._gemv` launches it."""
    s, (rows, columns), tokens = packed.sections, packed.shape, len(x)
    y = torch.empty(tokens, rows, dtype=torch.bfloat16)
    kernel_gemv.fix4_gemv_kernel[(-(-rows // 16),)](
        x.view(torch.int32), s[Section.PAYLOAD], s[Section.PLANE], s[Section.PATCH], s[Section.PATCH_DIR],
        y.view(torch.int16), tokens, rows, columns, packed.lowest, W=warps, NT=1 if tokens <= 8 else 2,
        EVEN=columns % (128 * warps) == 0, BLOCK=packed.header.geometry.block, PDL=False,
    )  # fmt: skip
    return y


@interpreted
@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "warps"),
    [(1, 16, 512, 2), (3, 5, 128, 2), (8, 17, 640, 2), (9, 33, 1152, 4), (16, 40, 1024, 4)],
)
def test_every_weight_meets_its_value_of_every_token(in_numpy, tokens, rows, columns, warps):
    w, x = weights(rows, columns), gaussian(tokens * columns, 1, 1.0).view(tokens, columns)
    packed = pack(w, profile="fix4", raw="never")
    assert packed.header.patches >= 6 and packed.lowest > 0
    assert near(product(x, packed, warps), x, w)


@interpreted
def test_a_single_one_picks_out_a_column_bit_for_bit(in_numpy):
    w = weights(20, 256)
    packed = pack(w, profile="fix4", raw="never")
    for start in (0, 112, 240):
        x = torch.eye(256)[start : start + 16].bfloat16()
        assert torch.equal(product(x, packed, 2), w[:, start : start + 16].T)


@interpreted
def test_more_patches_than_are_added_at_once_belong_to_their_places(in_numpy):
    w, x = weights(18, 512, outliers=False), gaussian(8 * 512, 1, 1.0).view(8, 512)
    w[1, 300:390] *= 2.0**40
    w[2, ::3] = 0.0
    w[17, -1] *= 2.0**50
    packed = pack(w, profile="fix4", raw="never")
    assert packed.header.patches > 200 and packed.lowest > 0
    assert near(product(x, packed, 2), x, w)
