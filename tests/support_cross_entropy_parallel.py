"""What one rank does in the vocabulary-parallel tests: importable, as spawned processes need it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from paperlm_kernels import linear_cross_entropy
from paperlm_kernels.cross_entropy import vocab_slice
from paperlm_kernels.cross_entropy.function import DEBUG
from support_cross_entropy import Place, problem, scalar

# Vocabulary, data, keywords. 301 is odd, 3 leaves a rank of four empty, 1024 cuts at whole groups of 128.
CASES = {
    "plain": (301, {}, {}),
    "everything": (301, {"ignore": "some"}, {"softcap": 3.0, "logit_scale": 0.5, "z_loss": 0.01, "shift": 1}),
    "sum without bias": (301, {"bias": False}, {"reduction": "sum"}),
    "all ignored": (301, {"ignore": "all"}, {"reduction": "sum"}),
    "more ranks than ids": (3, {}, {}),
    "more ranks than ids, sorted": (3, {}, {"vocab_order": "mean_logit", "filter_eps": 1e-9}),
    "filtered": (1024, {}, {"filter_eps": 0.05}),
}


def case_problem(place: Place, case: str):
    """The whole problem of a case, and the keywords; every rank makes the same."""
    vocab, data, keywords = CASES[case]
    p = problem(place, (1, 160), 24, vocab, **data)
    if case == "filtered":
        p.target.copy_(p.target % 5)
    return p, {"filter_eps": None, **keywords}


def results(p, vocab_range=None, **keywords):
    """Loss, log-sum-exp and gradients, on the CPU; with a range, of the slice."""
    rows = slice(*vocab_range) if vocab_range else slice(None)
    weight, bias = (t if t is None else t.detach()[rows].clone().requires_grad_() for t in (p.weight, p.bias))
    loss, lse = linear_cross_entropy(
        p.hidden, weight, p.target, bias=bias, return_lse=True, vocab_range=vocab_range, **keywords
    )
    leaves = [t for t in (p.hidden, weight, bias) if t is not None]
    gradients = torch.autograd.grad(scalar(loss, lse), leaves)
    return [t.detach().cpu() for t in (loss, lse, *gradients)]


def message_of(call) -> str:
    """The error that a call raises."""
    try:
        call()
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def rank_main(rank: int, world: int, place: Place, folder: str) -> None:
    """Results of all cases on one rank of `world`, written to `folder`."""
    torch.set_num_threads(1)
    if place.device == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group("nccl" if place.device == "cuda" else "gloo", store=store, rank=rank, world_size=world)
    group = dist.group.WORLD
    common = {"process_group": group, "backend": place.backend}
    found = {}
    for case in CASES:
        p, keywords = case_problem(place, case)
        owned = vocab_slice(rank, world, p.weight.shape[0])
        found[case] = (owned, results(p, owned, **keywords, **common))

    p, _ = case_problem(place, "plain")
    owned = vocab_slice(rank, world, 301)
    mine = p.weight[slice(*owned)]

    def error(**keywords) -> str:
        return message_of(lambda: linear_cross_entropy(p.hidden, mine, p.target, **{**common, **keywords}))

    found["errors"] = {
        "no range": error(),
        "wrong range": error(vocab_range=(0, 301)),
        "dense": error(vocab_range=owned, backend="eager"),
    }
    os.environ[DEBUG] = "1"
    p.target[0, 0] = 301
    found["errors"]["id"] = error(vocab_range=owned)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh(place.device, (world,))
    sharded = distribute_tensor(p.weight.detach(), mesh, [Shard(0)])
    found["errors"]["dtensor"] = message_of(lambda: linear_cross_entropy(p.hidden, sharded, p.target))
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()
