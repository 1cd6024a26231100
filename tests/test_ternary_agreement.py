"""The quantizers that a model is trained with and those of the kernels, written apart, give the same bits."""

from __future__ import annotations

import pytest
import torch
from paperlm_kernels.kv_attention import quantize_heads
from paperlm_kernels.rmsnorm_quantize import MODES, rmsnorm_quantize
from paperlm_kernels.ternary_linear import quantize_weight
from support_ternary import everywhere, normal

from paperlm.quantizers import build_quantizer
from paperlm.quantizers.topk import largest_entries


def rows(seed=0):
    """Gaussian rows, a gated product with many zeros, large and tiny rows, equal numbers, zeros."""
    x = normal(8, 600, seed=seed)
    x[2] = normal(600, seed=1) * normal(600, seed=2).relu() ** 2
    x[3] *= 1e4
    x[4] *= 1e-7
    x[5] = 0.25
    x[6] = 0.0
    return x


@everywhere
@pytest.mark.parametrize(
    "options", [{"name": name} for name in MODES] + [{"name": "int4_absmean", "multiple": 2}], ids=str
)
@pytest.mark.parametrize("keep", [None, 0.5])
def test_activations_have_the_same_codes_and_steps(spot, options, keep):
    x = rows()
    masked = x if keep is None else torch.where(largest_entries(x, 300), x, 0.0)
    codes, step = build_quantizer(options, "activations", "here").quantize(masked)
    name, multiple = options["name"], options.get("multiple", 1)
    out = rmsnorm_quantize(x.to(spot.device), None, name, multiple=multiple, keep=keep, backend=spot.backend)
    if "absmean" in name and spot.backend == "triton":
        # the sum behind the mean is in another order, so its last bit may differ, and a code next to a tie
        torch.testing.assert_close(out.scale.cpu(), step[:, 0], rtol=1e-6, atol=0)
        assert (out.codes[:, :600].cpu() != codes).double().mean() < 1e-3
    else:
        assert torch.equal(out.codes[:, :600].cpu(), codes) and torch.equal(out.scale.cpu(), step[:, 0])


def test_weights_have_the_same_codes_and_scale():
    for weight in (normal(300, 700), 1e-3 * normal(64, 64, seed=1), torch.zeros(4, 4)):
        codes, step = build_quantizer("ternary_absmean", "weights", "here").quantize(weight)
        mine, alpha = quantize_weight(weight)
        assert torch.equal(mine, codes) and alpha.item() == step.item()


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("mapping", ["symmetric", "minmax"])
def test_heads_have_the_same_values_before_steps_are_stored_in_16_bits(bits, mapping):
    quantizer = build_quantizer({"name": f"kv_{mapping}", "bits": bits}, "heads", "here")
    codes, step = quantizer.codes_and_step(rows())
    mine, mine_step = quantize_heads(rows(), bits, mapping)
    unsigned = codes + (2 ** (bits - 1) if mapping == "symmetric" else 0)
    assert torch.equal(mine.float(), unsigned) and torch.equal(mine_step, step[:, 0])


def test_a_weight_beside_half_of_the_mean_has_the_same_code():
    """Times the mean's reciprocal in float32 it is half, a tie, or more, as it is where it is divided by the mean."""
    means = torch.arange(2, 8000, 2, dtype=torch.float32)
    above = torch.nextafter(means / 2, means)
    differ = (above / means).round() != (above * means.reciprocal()).round()
    assert differ.sum() > 100
    for mean, x in zip(means[differ][:200], above[differ][:200], strict=True):
        w = torch.stack([x, mean - x, 1.5 * mean, 1.5 * mean]).reshape(2, 2)
        codes, alpha = build_quantizer({"name": "ternary_absmean"}, "weights", "here").quantize(w)
        mine, its_alpha = quantize_weight(w)
        assert torch.equal(mine.float(), codes.float()) and alpha == its_alpha == mean
