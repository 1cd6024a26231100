"""Small decoders with BitNet's options, and folders of them."""

from __future__ import annotations

import torch
from support_model import SHAPE, randomize

from paperlm.models.folder import save_model, transformers_tokenizer
from paperlm.models.llama import PaperLlamaConfig, PaperLlamaForCausalLM
from paperlm.models.packed import pack
from paperlm.quantizers.presets import PRESETS

QUANTIZED = [name for name, preset in PRESETS.items() if preset["quantization"]]


def bitnet_config(preset="a48_int4", n_layers=2, **options):
    return PaperLlamaConfig(**(SHAPE | PRESETS[preset] | {"num_hidden_layers": n_layers} | options))


def bitnet(preset="a48_int4", n_layers=2, dtype=torch.float32, **options):
    """A decoder with random weights, in evaluation mode."""
    model = randomize(PaperLlamaForCausalLM(bitnet_config(preset, n_layers, **options)))
    return model.to(dtype)


def bitnet_folder(folder, preset="a48_int4", packed=False, **options):
    """A model folder as jobs leave it, of 1,024 ids, with latent or packed weights."""
    torch.manual_seed(0)
    shape = {"vocab_size": 1024, "max_position_embeddings": 128, "initializer_range": 0.2, "tie_word_embeddings": True}
    model = PaperLlamaForCausalLM(bitnet_config(preset, **(shape | options)))
    save_model(folder, pack(model) if packed else model, transformers_tokenizer("bpe1024", 64))
    return folder
