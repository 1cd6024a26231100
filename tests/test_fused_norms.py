"""SubLN's norms in one pass with the quantizers behind them: the numbers and gradients of the two apart."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from paperlm_kernels.rmsnorm_quantize import rmsnorm_training_input
from support_bitnet import QUANTIZED, bitnet
from support_model import tokens
from support_ternary import everywhere, normal

from paperlm.models.layers import RMSNorm, inner_normed
from paperlm.models.quantized import QuantizedInput, fuse_norms
from paperlm.quantizers.scheme import input_quantizer

INPUTS = [{"name": "int8_absmax"}, {"name": "int8_absmax", "keep": 0.5}, {"name": "int4_absmean", "multiple": 2},
          {"name": "fp4_e2m1"}, {"name": "fp4_e1m2"}]  # fmt: skip


@everywhere
@pytest.mark.parametrize("described", INPUTS, ids=str)
def test_a_fused_norm_gives_the_codes_steps_and_gradients_of_norm_and_quantizer_apart(spot, described):
    apart = QuantizedInput(input_quantizer(described, "here"), 600, "o")
    start, gain = normal(3, 5, 600, device=spot.device), 1 + 0.1 * normal(600, seed=1, device=spot.device)
    incoming = normal(3, 5, 600, seed=2, device=spot.device)

    def both(function):
        x, g = start.clone().requires_grad_(), gain.clone().requires_grad_()
        found = function(x, g)
        return found, torch.autograd.grad(found[0], (x, g), incoming)

    (right, codes, step), gradients = both(lambda x, g: apart(F.rms_norm(x, (600,), g, 1e-5)))
    options = {name: value for name, value in described.items() if name != "name"}
    (mine, my_codes, my_step), my_gradients = both(
        lambda x, g: rmsnorm_training_input(x, g, described["name"], eps=1e-5, backend=spot.backend, **options)
    )
    assert my_codes.shape == codes.shape and my_step.shape == step.shape
    assert not my_codes.requires_grad and not my_step.requires_grad
    torch.testing.assert_close(my_step, step, rtol=1e-5, atol=0)
    same = my_codes == codes
    assert same.double().mean() > 0.999  # all but those next to a tie
    torch.testing.assert_close(mine[same], right[same], rtol=1e-5, atol=0)
    for ours, theirs in zip(my_gradients, gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def loss_and_gradients(model, ids):
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("preset", [name for name in ("a48_int4", "b158", "full_fp4") if name in QUANTIZED])
def test_a_model_with_fused_norms_trains_by_the_same_loss_and_gradients(preset):
    model, ids = bitnet(preset).train(), tokens()
    loss, gradients = loss_and_gradients(model, ids)
    assert fuse_norms(model) == 4  # two blocks, o and down
    seen = []
    down = model.model.layers[1].mlp.down_input
    hook = down.register_forward_hook(lambda module, given, out: seen.append((len(given), out[1])))
    fused, fused_gradients = loss_and_gradients(model, ids)
    hook.remove()
    torch.testing.assert_close(fused, loss, rtol=1e-6, atol=0)
    assert fused_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        error = (fused_gradients[name] - gradient).norm() / gradient.norm()
        assert error < 1e-5, name
    assert seen[0][0] == 3 and seen[0][1].dtype == torch.int8  # the norm's input, gain and eps went in
    fuse_norms(model, on=False)
    again, _ = loss_and_gradients(model, ids)
    assert torch.equal(again, loss)


def test_a_model_without_these_norms_keeps_its_bits():
    model, ids = bitnet("a48_int4", sub_norm=False), tokens()
    before = model(ids).logits
    assert fuse_norms(model) == 0 and torch.equal(model(ids).logits, before)


def test_a_norm_inside_a_block_gives_the_dtype_of_its_gain_whatever_autocast_hands_it():
    """In bfloat16 it would be rounded once more in front of a quantizer."""
    norm, x = RMSNorm(64, 1e-5), normal(3, 64).bfloat16()
    norm.weight.data.copy_(1 + 0.1 * normal(64, seed=1))
    with torch.autocast("cpu", torch.bfloat16):
        found = inner_normed(norm, x)
    right = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    assert found.dtype == torch.float32 and inner_normed(None, x) is x
    torch.testing.assert_close(found.double(), right, rtol=1e-6, atol=1e-7)
