"""The product of FIX4 on tensor cores, on a card; test_neuzip_gemv_triton.py has NumPy in place of its PTX."""

from __future__ import annotations

import pytest
import torch
from paperlm_kernels.neuzip import pack, product
from paperlm_kernels.neuzip.product import linear
from support_neuzip import gaussian
from test_neuzip_product import near, weights

needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_card
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 8, 9, 15, 16])
@pytest.mark.parametrize(
    "rows,columns", [(16, 512), (32, 1024), (5, 128), (17, 640), (40, 1152), (257, 2048), (100, 4224), (8200, 384)]
)
def test_every_weight_meets_its_value_of_every_token(tokens, rows, columns):
    w, x = weights(rows, columns), gaussian(tokens * columns, 1, 1.0).view(tokens, columns)
    packed = pack(w.cuda(), profile="fix4", raw="never")
    got = linear(x.cuda(), packed)
    assert got.shape == (tokens, rows) and near(got, x, w)
    assert torch.equal(got, linear(x.cuda(), packed))


@needs_card
def test_a_single_one_picks_out_a_column_bit_for_bit():
    w = weights(48, 1024)
    packed = pack(w.cuda(), profile="fix4", raw="never")
    for start in range(0, 1024, 16):  # a token for each column
        x = torch.eye(1024)[start : start + 16].bfloat16()
        assert torch.equal(linear(x.cuda(), packed).cpu(), w[:, start : start + 16].T)


@needs_card
def test_more_patches_than_are_added_at_once_belong_to_their_places():
    w, x = weights(50, 2048, outliers=False), gaussian(8 * 2048, 1, 1.0).view(8, 2048)
    w[1, 1000:1090] *= 2.0**40
    w[2] = 0.0
    w[33, ::50] *= 2.0**-60
    w[49, -1] *= 2.0**50
    packed = pack(w.cuda(), profile="fix4", raw="never")
    assert packed.header.patches > 2000
    for tokens in (1, 8):
        assert near(linear(x[:tokens].cuda(), packed), x[:tokens], w)


@needs_card
@pytest.mark.parametrize("power", [-126, -120, 100, 113])
def test_the_smallest_and_the_largest_exponents_are_multiplied(power):
    w = (gaussian(64 * 256, 0, 1.0).double().clamp(-1.9, 1.9) * 2.0**power).bfloat16().view(64, 256)
    x = gaussian(4 * 256, 1, 2.0**-20 if power > 0 else 2.0**20).view(4, 256)
    packed = pack(w.cuda(), profile="fix4", raw="never")
    assert near(linear(x.cuda(), packed), x, w)


@needs_card
@pytest.mark.parametrize("name", ["_gemv", "_fix4"])
def test_a_bad_token_spoils_its_own_results_alone(monkeypatch, name):
    monkeypatch.setattr(product, "_gemv", getattr(product, name))
    w, x = weights(64, 1024), gaussian(8 * 1024, 1, 1.0).view(8, 1024)
    packed = pack(w.cuda(), profile="fix4", raw="never")
    good = linear(x.cuda(), packed)
    spoiled = x.clone()
    spoiled[3, 5], spoiled[6, 900] = float("nan"), float("inf")
    got = linear(spoiled.cuda(), packed)
    whole = [0, 1, 2, 4, 5, 7]
    assert near(good, x, w) and torch.equal(got[whole], good[whole])
    assert got[3].isnan().all() and not got[6].isfinite().any()


@needs_card
def test_the_same_bits_come_with_other_tokens_beside():
    w, x = weights(200, 1536), gaussian(16 * 1536, 1, 1.0).view(16, 1536)
    packed = pack(w.cuda(), profile="fix4", raw="never")
    every = linear(x.cuda(), packed)
    for n in range(1, 16):
        assert torch.equal(linear(x[:n].cuda(), packed), every[:n])
        assert torch.equal(linear(x[n:].cuda(), packed), every[n:])
