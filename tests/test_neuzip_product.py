"""Products with packed weights: one rounding from float64, in the kernel and by unpacking."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from paperlm_kernels.neuzip import pack, raise_decode_errors
from paperlm_kernels.neuzip.errors import StreamError
from paperlm_kernels.neuzip.header import Section
from paperlm_kernels.neuzip.product import linear
from support_neuzip import compiled_or_interpreted, gaussian


def weights(rows, columns, outliers=True, seed=0):
    t = gaussian(rows * columns, seed).view(rows, columns)
    if outliers:  # what is patched; first and last places, and neighbours, among them
        t.view(-1)[[0, 1, 17, columns - 1, columns, -1]] *= 2.0**20
        t.view(-1)[5::1009] = 0.0
    return t


def near(got, x, w):
    """One rounding to bfloat16 of a sum in float32, of which each term may err by a few last bits."""
    exact = x.double().cpu() @ w.double().cpu().T
    sizes = x.double().cpu().abs() @ w.double().cpu().abs().T
    return ((got.double().cpu() - exact).abs() <= exact.abs() * 2**-8 + sizes * 2**-20).all()


@compiled_or_interpreted
@pytest.mark.parametrize("tokens,rows,columns", [(1, 7, 1024), (2, 33, 520), (3, 5, 2056), (8, 9, 1040), (16, 6, 1032)])
def test_the_fused_product_is_within_a_rounding_of_float64(spot, tokens, rows, columns):
    w, x = weights(rows, columns), gaussian(tokens * columns, 1, 1.0).view(tokens, columns)
    packed = pack(w.to(spot.device), profile="fix4", raw="never")
    assert packed.header.patches >= 6
    got = linear(x.to(spot.device), packed, backend=spot.backend)
    assert got.shape == (tokens, rows) and near(got, x, w)
    assert torch.equal(got, linear(x.to(spot.device), packed, backend=spot.backend))


@compiled_or_interpreted
def test_rows_that_share_blocks_of_patches_get_their_own_alone(spot):
    w = torch.zeros(24, 1024).bfloat16()
    w[:] = 0.02  # most have this exponent
    w[3, 7], w[4, 0], w[15, 1023], w[16, 0] = 2.0**30, -(2.0**31), 2.0**29, 3.0 * 2**28
    x = torch.zeros(1, 1024).bfloat16()
    x[0, 0], x[0, 7], x[0, 1023] = 1.0, 2.0, 4.0
    packed = pack(w.to(spot.device), profile="fix4", raw="never")
    assert packed.header.patches == 4 and near(linear(x.to(spot.device), packed, backend=spot.backend), x, w)


@compiled_or_interpreted
@pytest.mark.parametrize("profile", ["default", "dense", "fast"])
@pytest.mark.parametrize(
    "tokens,rows,columns", [(1, 9, 2048), (2, 3, 5120), (3, 17, 1024), (3, 7, 3072), (4, 2, 16384)]
)
def test_the_product_with_prefix_codes_is_within_a_rounding_of_float64(spot, profile, tokens, rows, columns):
    w, x = weights(rows, columns), gaussian(tokens * columns, 1, 1.0).view(tokens, columns)
    w[-1, -3:] *= 2.0**30
    packed = pack(w.to(spot.device), profile=profile, raw="never")
    assert packed.header.patches >= 6
    got = linear(x.to(spot.device), packed, backend=spot.backend)
    assert got.shape == (tokens, rows) and near(got, x, w)
    assert torch.equal(got, linear(x.to(spot.device), packed, backend=spot.backend))
    raise_decode_errors(spot.device)


@compiled_or_interpreted
@pytest.mark.parametrize("profile", ["default", "dense", "fast", "fix4"])
@pytest.mark.parametrize("tokens", [1, 3, 8, 16])
def test_where_no_sum_is_rounded_the_product_has_the_bits_of_the_matrix_that_was_packed(spot, profile, tokens):
    """Weights of 8 bits at three exponents, zeros and a patched one, times -1 to 2: each sum of 1,024 has less than 24
    bits, so that its order does not matter, and a bit that was decoded wrongly is not within a tolerance."""
    seeded = torch.Generator().manual_seed(tokens)
    integers = (
        torch.randint(128, 256, (18, 1024), generator=seeded)
        * torch.tensor([-1, 1])[torch.randint(0, 2, (18, 1024), generator=seeded)]
    )
    w = (integers * 2.0 ** torch.randint(-9, -6, (18, 1024), generator=seeded)).bfloat16()
    w[::5, ::77], w[3, 5], w[17, 1023] = 0.0, 2.0**7, -(2.0**8)
    x = torch.randint(-1, 3, (tokens, 1024), generator=seeded).bfloat16()
    packed = pack(w.to(spot.device), profile=profile, raw="never")
    assert packed.header.patches > 0 or profile != "fix4"
    exact = x.double() @ w.double().T
    assert (exact * 2**9 == (exact * 2**9).round()).all() and exact.abs().max() < 2**14
    assert torch.equal(linear(x.to(spot.device), packed, backend=spot.backend).cpu(), exact.bfloat16())


@compiled_or_interpreted
def test_more_patches_than_are_added_at_once_belong_to_their_rows_and_tokens(spot):
    w, x = weights(5, 3072, outliers=False), gaussian(5 * 3072, 1, 1.0).view(5, 3072)
    w[1, 1000:1090] *= 2.0**40
    w[2] = 0.0
    w[4, ::50] *= 2.0**-60
    packed = pack(w.to(spot.device), raw="never")
    assert packed.header.patches > 3 * 32
    assert near(linear(x.to(spot.device), packed, backend=spot.backend), x, w)


@compiled_or_interpreted
def test_a_damaged_stream_is_noticed_by_the_product(spot):
    packed = pack(weights(8, 2048).to(spot.device), raw="never")
    packed.sections[Section.PAYLOAD][:64] ^= 0x5A5A5A5A
    linear(gaussian(2048).to(spot.device), packed, backend=spot.backend)
    with pytest.raises(StreamError):
        raise_decode_errors(spot.device)


@compiled_or_interpreted
@pytest.mark.parametrize("profile", ["default", "fix4"])
@pytest.mark.parametrize("mant_bits,block_norm", [(3, None), (0, 512)])
def test_a_matrix_in_fewer_bits_is_multiplied_by_what_it_unpacks_to(spot, profile, mant_bits, block_norm):
    packed = pack(
        weights(9, 1024).to(spot.device), profile=profile, mant_bits=mant_bits, block_norm=block_norm, raw="never"
    )
    x = gaussian(2 * 1024, 1, 1.0).view(2, 1024).to(spot.device)
    assert torch.equal(linear(x, packed, backend=spot.backend), F.linear(x, packed.unpack()))


def test_everything_else_is_unpacked_and_multiplied_as_pytorch_does():
    w, x, bias = weights(40, 64), gaussian(5 * 3 * 64, 1).view(5, 3, 64), gaussian(40, 2)
    for options in ({}, {"profile": "fix4"}, {"profile": "fix4", "mant_bits": 3}, {"profile": "fast"}):
        packed = pack(w, raw="never", **options)
        assert torch.equal(linear(x, packed, bias), F.linear(x, packed.unpack(), bias))


def test_operands_that_do_not_belong_together_are_refused():
    packed = pack(weights(8, 16))
    for x in (gaussian(15), gaussian(16).float(), gaussian(8)):
        with pytest.raises(ValueError, match="on the same device"):
            linear(x, packed)


def test_an_input_that_wants_a_gradient_is_refused_and_one_that_does_not_is_multiplied():
    packed, x = pack(gaussian(64 * 64).view(64, 64)), torch.ones(2, 64, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"give x\.detach\(\)"):
        linear(x, packed)
    with torch.no_grad():
        assert torch.equal(linear(x, packed), x @ packed.unpack().T)
