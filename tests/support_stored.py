"""Small models of transformers, and a store that the package does not have, for the tests of stored weights."""

from __future__ import annotations

import zlib

import torch
import transformers
from paperlm_kernels.stored import PackedStore, WeightStore
from support_models import fresh
from torch import Tensor

TABLES = 4 * 2**12 + 4 * 256 + 256
"Bytes of the tables of a codebook: 4,096 entries to decode with, codes of 256 pairs, indices of 256 exponents."


class ZippedStore(WeightStore):
    """All bytes through zlib: what somebody else's store looks like."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.write(tensor)

    def read(self) -> Tensor:
        plain = bytearray(zlib.decompress(self.data))
        return torch.frombuffer(plain, dtype=self.dtype).view(self.shape) if plain else torch.empty(self.shape)

    def write(self, tensor: Tensor) -> None:
        values = self._check(tensor).reshape(-1).view(torch.uint8).numpy().tobytes()
        self.data = zlib.compress(values, 1)

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def apply(self, fn) -> None:
        self._same_dtype(fn)


class CodedStore(PackedStore):
    """Packed though it is so small that `pack` would keep it as it is."""

    def __init__(self, tensor: Tensor, **options) -> None:
        super().__init__(tensor, raw="never", **options)


STORES = [CodedStore, ZippedStore]


IDS = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    # no biases
    "llama": (transformers.LlamaForCausalLM, IDS | {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32,
    }),
    # Conv1D with biases; the head is the embedding
    "gpt2": (transformers.GPT2LMHeadModel, IDS | {
        "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }),
    # linear layers, some with biases
    "gpt_neo": (transformers.GPTNeoForCausalLM, IDS | {
        "max_position_embeddings": 32, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 8,
        "attention_types": [[["global", "local"], 1]],
    }),
    # encoder and decoder, with tables of relative positions and a down projection that asks for its weight's dtype
    "t5": (transformers.T5ForConditionalGeneration, {
        "vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
        "decoder_start_token_id": 0, "pad_token_id": 0,
    }),
}  # fmt: skip
"Name -> class and settings."


def build(name: str, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **changes):
    """A model with fresh weights in training mode."""
    cls, settings = MODELS[name]
    return fresh(cls, seed, **settings | changes).to(dtype).train()


def batch(step: int, rows: int = 3, length: int = 12) -> dict[str, Tensor]:
    """Ids and labels, which follow from the step."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(3, 96, (rows, length), generator=generator)
    return {"input_ids": ids, "labels": ids}
