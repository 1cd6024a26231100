"""What tasks share whose job has a schedule, numerics, clipping and a global batch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from paperlm.errors import DataError
from paperlm.jobs.base import Job
from paperlm.train.distributed import World
from paperlm.train.schedule import Scheduled, learning_rate


class ScheduledTask:
    """Part of a task (paperlm.train.engine.Task). `settings` have also numerics, grad_clip and global_batch."""

    job: Job
    settings: Scheduled
    "the job, or the one whose settings it goes on with"
    world: World
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    compiles = True

    def trunk(self) -> None:
        return None

    def begin(self, update: int) -> Mapping[str, float]:
        rate = learning_rate(update, self.settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return {"lr": rate}

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.settings.numerics == "fp32_master":
            return torch.autocast(self.world.device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def clip(self) -> None:
        if self.settings.grad_clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.grad_clip)

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """The array as a tensor on the task's device."""
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.world.device.type == "cuda":
            return tensor.pin_memory().to(self.world.device, non_blocking=True)
        return tensor

    def share(self) -> int:
        """Examples of an update that are this process's. Raises DataError if they do not split."""
        if self.settings.global_batch % self.world.size:
            raise DataError(
                f"global_batch {self.settings.global_batch} does not split over {self.world.size} processes"
            )
        return self.settings.global_batch // self.world.size


def start_dtype(model: torch.nn.Module, numerics: str) -> None:
    """Weights in the dtype they are trained in; buffers, computed once and cast where they are used, stay."""
    if numerics == "pure_bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
