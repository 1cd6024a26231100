"""Small models of transformers with random weights, their batches and gradients, and what one rank of FSDP does."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from paperlm_kernels import use_fused_loss
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 163
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
LLAMA = {"intermediate_size": 48, "num_key_value_heads": 2}
SCALED = {"initializer_range": 0.3}
# The transforms of the logits matter in these models: logits as large as the cap, scales far from 1, biases not 0.
MODELS = {
    "llama": LLAMA,
    "llama, tied": {**LLAMA, "tie_word_embeddings": True},
    "gemma2": {**LLAMA, **SCALED, "head_dim": 8, "final_logit_softcapping": 3.0},
    "qwen2": LLAMA,
    "phi3": LLAMA,
    "cohere": {**LLAMA, **SCALED, "logit_scale": 0.0625},
    "granite": {**LLAMA, **SCALED, "logits_scaling": 8.0},
    "hyperclovax": {**LLAMA, "logits_scaling": 0.25},
    "phi": {"intermediate_size": 48},
    "gpt2": {},
}


def model_of(name, **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.split(",")[0], **{**SIZES, **MODELS.get(name, LLAMA), **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    head = model.get_output_embeddings()
    if head.bias is not None:
        nn.init.normal_(head.bias)
    return model.train()


def batch_of(padded=True):
    """Two sequences, the second padded on the right; its padding and part of the first are not learned."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (2, 23), generator=g)
    mask = torch.ones_like(ids)
    labels = ids.clone()
    if padded:
        ids[1, 17:], mask[1, 17:], labels[1, 17:] = 0, 0, -100
        labels[0, :4] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def loss_and_gradients(model, **call):
    model.zero_grad()
    torch.manual_seed(2)
    output = model(**call)
    output.loss.backward()
    return output, {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}


def rank_main(rank: int, world: int, case: str, folder: str) -> None:
    """Loss and whole gradients of a fused model on one rank, or the error.

    With tensor parallelism of the head every rank has the same batch; with FSDP each has a sequence of its own.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    mesh = dist.init_device_mesh("cpu", (world,))
    model = use_fused_loss(model_of("llama, tied" if case == "tied" else "llama"))
    head, batch = model.lm_head, batch_of(padded=False)
    if case == "tensor parallel":
        head.weight = nn.Parameter(distribute_tensor(head.weight.detach(), mesh, [Shard(0)]))
    else:
        batch = {k: v[rank : rank + 1] for k, v in batch.items()}
        units = {"by itself": [head], "tied": [[model.model.embed_tokens, head]]}.get(case, [])
        if case == "inside another module":
            model.part = nn.Sequential(head)
            model.get_output_embeddings = lambda: model.part[0]
            del model.lm_head
            units = [model.part]
        for module in [*model.model.layers, *units, model]:
            fully_shard(module, mesh=mesh)
    try:
        output, gradients = loss_and_gradients(model, **batch)
        gradients = {k: g.full_tensor() if hasattr(g, "full_tensor") else g for k, g in gradients.items()}
        found = {"loss": output.loss.detach(), "gradients": gradients}
    except TypeError as error:
        found = {"error": str(error)}
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()
