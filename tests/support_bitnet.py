"""Small decoders with BitNet's options, and their block written out a second time in float64."""

from __future__ import annotations

import torch
from support_model import FFN, SHAPE, randomize, tokens  # noqa: F401 - tokens are for those who import from here

from paperlm.models.llama import PaperLlamaConfig, PaperLlamaForCausalLM
from paperlm.quantizers.presets import PRESETS

QUANTIZED = [name for name, preset in PRESETS.items() if preset["quantization"]]


def bitnet_config(preset="a48_int4", n_layers=2, **options):
    return PaperLlamaConfig(**SHAPE, **(PRESETS[preset] | {"num_hidden_layers": n_layers} | options))


def bitnet(preset="a48_int4", n_layers=2, dtype=torch.float32, **options):
    """A decoder with random weights, in evaluation mode."""
    model = randomize(PaperLlamaForCausalLM(bitnet_config(preset, n_layers, **options)))
    return model.to(dtype)
