"""What only a card can show of the kernels for models in few bits: the papers' full sizes, bfloat16, CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from paperlm_kernels.kv_attention import QuantizedKV
from paperlm_kernels.rmsnorm_quantize import MODES, rmsnorm_quantize
from paperlm_kernels.ternary_linear import pack_ternary, sparse_columns_linear, ternary_linear, unpack_ternary

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = "cuda"
SIZES = [(N, K) for d, f in ((1536, 4096), (2048, 5460), (3200, 8640), (4096, 11008))
         for N, K in ((3 * d, d), (d, d), (2 * f, d), (d, f))]  # fmt: skip
"Matrices of a block of 700M, 1.3B, 3B and 7B: (rows, columns)."
TOKENS = (1, 2, 3, 15, 16, 17, 256, 4096)


def problem(tokens, rows, columns):
    g = torch.Generator(DEVICE).manual_seed(0)
    codes = torch.randint(-128, 128, (tokens, columns), generator=g, device=DEVICE, dtype=torch.int8)
    scale = torch.rand(tokens, generator=g, device=DEVICE) + 0.5
    t = torch.randint(-1, 2, (rows, columns), generator=g, device=DEVICE, dtype=torch.int8)
    return codes, scale, t, torch.rand(rows, generator=g, device=DEVICE) + 0.5


@pytest.mark.parametrize("rows,columns", SIZES)
def test_every_matrix_and_number_of_tokens_gives_the_references_bits(rows, columns):
    for tokens in TOKENS:
        codes, scale, t, alpha = problem(tokens, rows, columns)
        packed, rowsum = pack_ternary(t), codes.sum(1, dtype=torch.int32)
        for dtype in (torch.bfloat16, torch.float32):
            mine, again, right = (
                ternary_linear(codes, scale, rowsum, packed, alpha, out_dtype=dtype, backend=backend)
                for backend in ("triton", "triton", "reference")
            )
            assert torch.equal(mine, right) and torch.equal(mine, again), tokens


@pytest.mark.parametrize("width", [1536, 3200, 4096, 5460, 11008])
@pytest.mark.parametrize("mode", MODES)
def test_codes_of_bfloat16_rows_are_the_references_but_next_to_a_tie(mode, width):
    g = torch.Generator(DEVICE).manual_seed(0)
    x, up = (torch.randn(512, width, generator=g, device=DEVICE).bfloat16() for _ in range(2))
    gain = torch.ones(width, device=DEVICE, dtype=torch.bfloat16)
    for options in ({}, {"keep": 0.5}, {"residual": up}, {"up": up, "compact": True}):
        mine, right = (rmsnorm_quantize(x, gain, mode, backend=b, **options) for b in ("triton", "reference"))
        differ = mine.codes != right.codes
        assert differ.double().mean() < 1e-3
        assert ((mine.codes.int() - right.codes.int()).abs() <= (4 if mode == "fp4_e2m1" else 1))[
            differ & (mine.codes != 0) & (right.codes != 0)
        ].all()
        torch.testing.assert_close(mine.scale, right.scale, rtol=1e-5, atol=0)
        if "keep" in options:
            assert ((mine.codes != 0).sum(1) <= width // 2).all()


@pytest.mark.parametrize("head_dim", [64, 100, 128])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("bits", [3, 4])
def test_decoding_at_every_length_is_the_references_attention(head_dim, batch, bits):
    g = torch.Generator(DEVICE).manual_seed(0)
    for length in (1, 2, 127, 128, 2049, 8192):
        k, v = (torch.randn(batch, length, 2, head_dim, generator=g, device=DEVICE).bfloat16() for _ in range(2))
        q = torch.randn(batch, 4, head_dim, generator=g, device=DEVICE)
        cache = QuantizedKV.empty(batch, 2, head_dim, length + 1, bits=bits, device=DEVICE)
        cache.append(k, v, backend="triton")
        other = QuantizedKV.empty(batch, 2, head_dim, length + 1, bits=bits, device=DEVICE)
        other.append(k, v, backend="reference")
        assert torch.equal(cache.k_data[:, :, 1:], other.k_data[:, :, 1:])
        assert torch.equal(cache.v_steps, other.v_steps)
        mine, right = (cache.decode(q, backend=backend) for backend in ("triton", "reference"))
        assert (mine - right).norm() < 1e-3 * right.norm()  # the reference's products may be in TF32


def test_weights_are_unpacked_within_a_cuda_graph():
    _, _, t, _ = problem(1, 256, 384)
    packed, graph = pack_ternary(t), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        unpacked = unpack_ternary(packed)
    graph.replay()
    assert torch.equal(unpacked, t)


def test_a_step_of_decoding_is_captured_and_replayed_in_a_cuda_graph():
    _, _, t, alpha = problem(1, 4096, 4096)
    packed, columns = pack_ternary(t), pack_ternary(t.T)
    x = torch.randn(1, 4096, device=DEVICE).bfloat16()
    gain = torch.ones(4096, device=DEVICE, dtype=torch.bfloat16)
    cache = QuantizedKV.empty(1, 32, 128, 64, device=DEVICE)

    def step():
        q = rmsnorm_quantize(x, gain, keep=0.5, compact=True)
        y = ternary_linear(q.codes, q.scale, q.rowsum, packed, alpha)
        z = sparse_columns_linear(q.codes, q.scale, q.rowsum, columns, alpha, q.places, q.counts)
        heads = y.view(1, 1, 32, 128)
        cache.append(heads, heads)
        return y, z, cache.decode(y.view(1, 32, 128))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, z, out = step()
    x.copy_(torch.randn(1, 4096, device=DEVICE))
    cache.lengths.zero_()
    graph.replay()
    captured = [part.clone() for part in (y, z, out)]
    cache.lengths.zero_()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
    assert torch.equal(captured[0], captured[1])
