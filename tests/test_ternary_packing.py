"""Ternary weights in two bits: the layout byte by byte, its round trip at each width of the paper, what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paperlm_kernels.ternary_linear import (
    PackedTernary,
    fused_alpha,
    pack_ternary,
    pack_weights,
    quantize_weight,
    ternary_linear,
    unpack_ternary,
)
from support_ternary import activations, ternary

# every K of 700M, 1.3B, 3B and 7B, and some at the edges of the padding
WIDTHS = (1536, 4096, 2048, 5460, 3200, 8640, 11008, 1, 127, 128, 129)


@pytest.mark.parametrize("width", WIDTHS)
def test_packing_round_trips_at_every_width_and_pads_with_the_weight_zero(width):
    t = ternary(130, width)
    packed = pack_ternary(t)
    assert packed.data.shape == (256, -(-width // 128) * 32) and packed.data.dtype == torch.uint8
    assert torch.equal(unpack_ternary(packed), t)
    assert torch.equal(unpack_ternary(packed, slice(100, 999)), t[100:])
    again = PackedTernary.load(packed.data, packed.metadata)
    assert torch.equal(again.data, packed.data) and again.in_features == width


def test_byte_j_of_a_chunk_holds_the_codes_of_k_j_plus_32_64_and_96_from_the_low_bits_up():
    t = ternary(3, 300).numpy()
    data = pack_ternary(torch.from_numpy(t)).data.numpy()
    full = np.zeros((3, 384), dtype=int)
    full[:, :300] = t
    for row in range(3):
        for byte in range(96):
            m, j = divmod(byte, 32)
            codes = [full[row, 128 * m + 32 * s + j] + 1 for s in range(4)]
            assert data[row, byte] == codes[0] + 4 * codes[1] + 16 * codes[2] + 64 * codes[3]


def test_four_bytes_as_one_word_shifted_and_masked_are_the_codes_of_four_neighbours():
    t = ternary(2, 256)
    words = pack_ternary(t).data[:2].numpy().view("<u4")  # (2, 16)
    codes = (t + 1).numpy().astype(np.uint8)
    for m in range(2):
        for word in range(8):
            for s in range(4):
                four = ((words[:, 8 * m + word] >> (2 * s)) & 0x03030303).view(np.uint8).reshape(2, 4)
                at = 128 * m + 32 * s + 4 * word
                assert np.array_equal(four, codes[:, at : at + 4])


@pytest.mark.parametrize("width", WIDTHS)
def test_the_product_is_that_of_64_bit_integers_for_the_whole_range_of_int8(width):
    t, (codes, scale) = ternary(130, width), activations(5, width)
    right = codes.numpy().astype(np.int64) @ t.numpy().astype(np.int64).T
    alpha = torch.linspace(0.25, 2, 130)
    rowsum = codes.sum(1, dtype=torch.int32)
    ones = torch.ones
    acc = ternary_linear(codes, ones(5), rowsum, pack_ternary(t), ones(130), out_dtype=torch.float64)
    assert np.array_equal(acc.numpy(), right)
    y = ternary_linear(codes, scale, rowsum, pack_ternary(t), alpha)
    exact = torch.from_numpy(right).double() * scale.double()[:, None] * alpha.double()
    assert y.dtype == torch.bfloat16
    assert ((y.double() - exact).abs() <= 2**-8 * (1 + 1e-5) * exact.abs()).all()  # half a unit of bfloat16
    padded = torch.nn.functional.pad(codes, (0, -width % 128))
    assert torch.equal(ternary_linear(padded, scale, None, pack_ternary(t), alpha), y)


def test_extreme_codes_of_the_widest_matrix_stay_exact():
    codes = torch.full((1, 11008), -128, dtype=torch.int8)
    t = torch.ones(2, 11008, dtype=torch.int8)
    t[1] = -1
    y = ternary_linear(codes, torch.ones(1), None, pack_ternary(t), torch.ones(()), out_dtype=torch.float32)
    assert y.tolist() == [[-128.0 * 11008, 128.0 * 11008]]


def test_leading_axes_are_kept_and_one_scale_serves_all_rows():
    t, (codes, scale) = ternary(6, 40), activations(6, 40)
    flat = ternary_linear(codes, scale, None, pack_ternary(t), torch.full((6,), 0.5))
    y = ternary_linear(codes.view(2, 3, 40), scale.view(2, 3), None, pack_ternary(t), torch.tensor(0.5))
    assert y.shape == (2, 3, 6) and torch.equal(y.view(6, 6), flat)


def test_fused_matrices_keep_their_own_scales():
    g = torch.Generator().manual_seed(1)
    weights = [spread * torch.randn(rows, 200, generator=g) for spread, rows in ((0.1, 64), (1.0, 32), (7.0, 32))]
    codes, scale = activations(4, 200)
    packed, alpha = pack_weights(weights)
    together = ternary_linear(codes, scale, None, packed, alpha)
    apart = []
    for weight in weights:
        t, own = quantize_weight(weight)
        apart.append(ternary_linear(codes, scale, None, pack_ternary(t), own))
        assert abs(own.item() / weight.double().abs().mean().item() - 1) < 1e-6
    assert torch.equal(together, torch.cat(apart, 1))
    assert alpha.unique().numel() == 3


def test_a_weight_is_rounded_to_the_nearest_multiple_of_its_mean_and_clipped():
    g = torch.Generator().manual_seed(2)
    weight = torch.randn(300, 500, generator=g)
    t, alpha = quantize_weight(weight)
    ratio = weight.double() / weight.double().abs().mean()
    right = ratio.round().clamp(-1, 1)
    near_a_tie = ((ratio.abs() - 0.5).abs() < 1e-6) | ((ratio.abs() - 1.5).abs() < 1e-6)
    assert ((t == right) | near_a_tie).all() and near_a_tie.double().mean() < 1e-4
    assert alpha.dtype == torch.float32 and alpha.ndim == 0
    # half a mean is a tie, and goes to the even side: zero
    assert quantize_weight(torch.tensor([[0.5, -0.5, 1.0, 2.0]]))[0].tolist() == [[0, 0, 1, 1]]
    for nearly_nothing in (torch.zeros(2, 3), torch.full((2, 3), 1e-6)):  # a mean of 1e-5 at least
        t, alpha = quantize_weight(nearly_nothing)
        assert not t.any() and alpha == torch.tensor(1e-5)


def test_packed_weights_of_another_layout_shape_or_content_are_refused():
    t = ternary(130, 300)
    packed = pack_ternary(t)
    load = PackedTernary.load
    for change, words in (
        ({"layout": "planar-256"}, "layout 'planar-256', version 1; these kernels read 'planar-128'"),
        ({"layout_version": "2"}, "version 2"),
        ({"out_features": "300", "in_features": "130"}, "for a matrix of 300 x 130"),
        ({"in_features": "385"}, "keeps as"),
        ({"in_features": "299"}, "padding beyond 130 x 299 is not zero"),
        ({"out_features": "129"}, "padding beyond 129 x 300 is not zero"),
    ):
        with pytest.raises(ValueError, match=words):
            load(packed.data, {**packed.metadata, **change})
    with pytest.raises(ValueError, match="without layout_version"):
        load(packed.data, {k: v for k, v in packed.metadata.items() if k != "layout_version"})
    with pytest.raises(TypeError, match="uint8, not torch"):
        load(packed.data.view(torch.int8), packed.metadata)
    broken = packed.data.clone()
    broken[7, 5] |= 0b11
    with pytest.raises(ValueError, match="the code 3"):
        load(broken, packed.metadata)


def test_packed_weights_that_do_not_lie_row_behind_row_are_refused_and_loading_lays_them_so():
    wide = pack_ternary(ternary(128, 256))
    with pytest.raises(ValueError, match=r"give data\.contiguous"):
        PackedTernary(wide.data[:, :32], 128, 128)
    turned = wide.data.T.contiguous().T
    loaded = PackedTernary.load(turned, wide.metadata)
    assert torch.equal(loaded.data, wide.data) and loaded.data.is_contiguous() and not turned.is_contiguous()


@pytest.mark.parametrize("codes", [torch.tensor([[0, 2]]), torch.tensor([[0.5, 1.0]]), torch.tensor([[float("nan")]])])
def test_a_weight_that_is_not_ternary_is_not_packed(codes):
    with pytest.raises(ValueError, match="quantize_weight"):
        pack_ternary(codes)


def test_tensors_that_do_not_belong_together_are_refused_by_name():
    t, (codes, scale) = ternary(6, 40), activations(4, 40)
    packed, alpha, rowsum = pack_ternary(t), torch.ones(6), codes.sum(1, dtype=torch.int32)
    for arguments, error, words in (
        ((codes.float(), scale, rowsum, packed, alpha), TypeError, "quantize the activations"),
        ((codes[:, :39], scale, rowsum, packed, alpha), ValueError, "last axis is 40, or 128"),
        ((codes, scale[:3], rowsum, packed, alpha), ValueError, "act_scale of shape"),
        ((codes, scale.bfloat16(), rowsum, packed, alpha), TypeError, "act_scale of torch.bfloat16"),
        ((codes, scale, rowsum.long(), packed, alpha), TypeError, "rowsum of torch.int64"),
        ((codes, scale, rowsum, packed.data, alpha), TypeError, "pack_ternary"),
        ((codes, scale, rowsum, packed, None), ValueError, "no alpha"),
        ((codes, scale, rowsum, packed, alpha[:3]), ValueError, "fused_alpha"),
        ((codes, scale, rowsum, packed, alpha.bfloat16()), TypeError, "alpha.float"),
    ):
        with pytest.raises(error, match=words):
            ternary_linear(*arguments)
    with pytest.raises(ValueError, match="one input and so the same width"):
        pack_weights([torch.ones(2, 3), torch.ones(2, 4)])
    with pytest.raises(ValueError, match="2 scales for 3 matrices"):
        fused_alpha([1.0, 2.0], [3, 4, 5])


def test_a_shard_of_a_weight_is_refused_because_its_mean_is_another():
    class Shard(torch.nn.Parameter):
        def full_tensor(self):
            return self

    with pytest.raises(ValueError, match="gather it first"):
        quantize_weight(Shard(torch.ones(4, 4)))
