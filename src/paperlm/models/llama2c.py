"""Checkpoints of llama2.c as transformers' LLaMA: one file of float32 numbers behind seven whole numbers.

The format is that of the project's first version (github.com/karpathy/llama2.c, run.c): width, width of the
feed-forward, blocks, heads, heads of keys, rows of the vocabulary and positions, each an int32; then embedding, norms
before attention, query, key, value and output matrices, norms before the feed-forward, its gate, output and second
input matrices, each of all blocks together; the last norm, and tables of angles, which are not read. The head is the
embedding. Rotary pairs are neighbours there, and half a head apart in transformers.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from paperlm.errors import JobError

ARCHITECTURE = "Llama2cCheckpoint"
"What the registry calls such a file."
HEADER = struct.Struct("<7i")


def read_checkpoint(path: Path) -> Any:
    """The model in float32, in evaluation mode. Raises JobError for a file of another size than its header says, and
    for a head of its own."""
    import numpy as np
    import torch
    import transformers

    data = path.read_bytes()
    wide, inner, blocks, heads, keys, rows, positions = HEADER.unpack_from(data) if len(data) > HEADER.size else [0] * 7
    if min(wide, inner, blocks, heads, keys, rows, positions) < 1 or wide % heads or heads % keys:
        raise JobError(f"{path}: no checkpoint of llama2.c that is read here (its head the embedding); take another")
    head = wide // heads
    shapes = {
        "model.embed_tokens.weight": (rows, wide),
        "input_layernorm.weight": (blocks, wide),
        "self_attn.q_proj.weight": (blocks, heads * head, wide),
        "self_attn.k_proj.weight": (blocks, keys * head, wide),
        "self_attn.v_proj.weight": (blocks, keys * head, wide),
        "self_attn.o_proj.weight": (blocks, wide, wide),
        "post_attention_layernorm.weight": (blocks, wide),
        "mlp.gate_proj.weight": (blocks, inner, wide),
        "mlp.down_proj.weight": (blocks, wide, inner),
        "mlp.up_proj.weight": (blocks, inner, wide),
        "model.norm.weight": (wide,),
        "angles": (2, positions, head // 2),
    }
    numbers = sum(int(np.prod(shape)) for shape in shapes.values())
    if len(data) != HEADER.size + 4 * numbers:
        raise JobError(f"{path}: {len(data)} bytes, where its header means {HEADER.size + 4 * numbers}: damaged")
    values = torch.from_numpy(np.frombuffer(data, "<f4", offset=HEADER.size).copy())
    state, start = {}, 0
    for name, shape in shapes.items():
        part = values[start : start + int(np.prod(shape))].view(shape)
        start += part.numel()
        if name.startswith("model."):
            state[name] = part
        elif name != "angles":
            state |= {f"model.layers.{block}.{name}": _halves(name, own, head) for block, own in enumerate(part)}
    config = transformers.LlamaConfig(
        vocab_size=rows, hidden_size=wide, intermediate_size=inner, num_hidden_layers=blocks, num_attention_heads=heads,
        num_key_value_heads=keys, max_position_embeddings=positions, rms_norm_eps=1e-5, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, dtype="float32",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    missing, left = model.load_state_dict(state, strict=False)
    if left or set(missing) != {"lm_head.weight"}:
        raise JobError(f"{path}: weights do not fit transformers' LLaMA: {', '.join([*missing, *left][:4])}")
    model.tie_weights()
    return model.eval()


def _halves(name: str, weight: Any, head: int) -> Any:
    """Rows of queries and keys in the order in which transformers turns them."""
    if name not in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
        return weight
    rows, wide = weight.shape
    return weight.view(rows // head, head // 2, 2, wide).transpose(1, 2).reshape(rows, wide)
