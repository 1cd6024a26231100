"""One process, or one of many under torchrun: the same calls either way."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from paperlm.jobs.base import Machine


@dataclass(frozen=True)
class World:
    """Who this process is."""

    rank: int
    size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        """True for the process that writes files and shows progress."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait for every process."""
        if self.size > 1:
            dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        """`value` of every process, in rank order, on every process."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


def start_world(device: str = "auto") -> World:
    """Join torchrun's process group if there is one. `device`: auto, cpu or cuda. Raises JobError as
    `Machine.torch_device` does."""
    device = Machine(device=device).torch_device().type
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    chosen = torch.device("cuda", local_rank) if device == "cuda" else torch.device("cpu")
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return World(0, 1, chosen)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    return World(dist.get_rank(), dist.get_world_size(), chosen)
