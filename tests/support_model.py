"""Helpers of the model tests: small models of every normalization method with random weights, and their inputs."""

from __future__ import annotations

import copy

import pytest
import torch

from paperlm.models.folder import save_model, transformers_tokenizer
from paperlm.models.llama import PaperLlamaConfig, PaperLlamaForCausalLM
from paperlm.norms import norm_methods

WIDTH, FFN, HEADS, VOCAB, LAYERS, PAD = 24, 21, 4, 37, 3, 0
SHAPE = {"hidden_size": WIDTH, "intermediate_size": FFN, "num_attention_heads": HEADS, "vocab_size": VOCAB}
OPTIONS = {"mix_ln": {"post_layers": 2}}
MIX = {"name": "mix_ln"} | OPTIONS["mix_ln"]


def describe(name):
    """A norm of that name: its default preset, over Mix-LN if it needs a base."""
    needs_base = "base" in norm_methods()[name].__dataclass_fields__
    return {"name": name} | OPTIONS.get(name, {}) | ({"base": MIX} if needs_base else {})


METHODS = [describe(name) for name in norm_methods()]
SHARED = [{"name": "admin", "preset": "authors_scalar_0p015"}, {"name": "layer_scale", "preset": "authors_shared"}]
LEAK = {"name": "group_ln", "preset": "authors_sequence"}


def each(norms):
    return pytest.mark.parametrize("norm", norms, ids=[" ".join(str(v) for v in n.values()) for n in norms])


def randomize(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.double().named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(noise * (1.0 if "embed" in name else 0.25) if p.ndim == 2 else 1.0 + 0.3 * noise)
    return model.eval()


def config_of(norm, n_layers=LAYERS, **options):
    depth = {"num_hidden_layers": 12 if norm.get("preset") == "authors_shared" else n_layers}
    return PaperLlamaConfig(**(SHAPE | depth | {"norm": norm} | options))


def model_of(norm, n_layers=LAYERS, **options):
    return randomize(PaperLlamaForCausalLM(config_of(norm, n_layers, **options)))


def without_block(model, number):
    """A copy without the block of that number at training time; the others keep their number and wiring."""
    kept = {block.layer: block for block in model.model.layers if block.layer != number}
    config = copy.deepcopy(model.config)
    config.trained_layers = config.trained_layers or config.num_hidden_layers
    config.layer_numbers, config.num_hidden_layers = list(kept), len(kept)
    pruned = PaperLlamaForCausalLM(config).to(dtype=model.dtype).eval()
    for block, number in zip(pruned.model.layers, kept, strict=True):
        block.load_state_dict(kept[number].state_dict())
    rest = {name: weight for name, weight in model.state_dict().items() if ".layers." not in name}
    assert not pruned.load_state_dict(rest, strict=False).unexpected_keys
    return pruned


def tiny_folder(folder, norm=MIX):
    """A model folder as jobs leave it: 1,024 ids, 2 blocks, trained with 64 tokens, 128 positions."""
    torch.manual_seed(0)
    shape = {"hidden_size": WIDTH, "intermediate_size": FFN, "num_attention_heads": HEADS, "num_hidden_layers": 2}
    config = PaperLlamaConfig(vocab_size=1024, max_position_embeddings=128, norm=norm, initializer_range=0.2, **shape)
    save_model(folder, PaperLlamaForCausalLM(config), transformers_tokenizer("bpe1024", 64))
    return folder


def count(module):
    return sum(p.numel() for p in module.parameters())


def tokens(batch=3, length=11, seed=1):
    return torch.randint(2, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(found, expected, tolerance=1e-9):
    """Loaded weights are aligned differently in memory, which already changes the last bit of a product."""
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def padded(side, lengths=(11, 7, 1)):
    """Rows of those lengths, their mask, and where each row's tokens are."""
    ids, mask = torch.full((len(lengths), max(lengths)), PAD), torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    places = [slice(0, n) if side == "right" else slice(max(lengths) - n, max(lengths)) for n in lengths]
    for row, (place, n) in enumerate(zip(places, lengths, strict=True)):
        ids[row, place], mask[row, place] = tokens(1, n, seed=row)[0], 1
    return ids, mask, places
