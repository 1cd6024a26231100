"""The engine with another task than language models: phases of a schedule, and a branch that continues a trunk."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from paperlm.errors import Interrupted
from paperlm.jobs.base import Job, Machine
from paperlm.train import checkpoint
from paperlm.train.distributed import World
from paperlm.train.engine import Batch, Engine, Progress

ALONE = World(0, 1, torch.device("cpu"))
QUIET = Machine(device="cpu", progress=False)
UPDATES, SECOND_PHASE = 30, 20


class Line(Job):
    """A line through points: the smallest job that trains."""

    kind: ClassVar[str] = "line"
    leaves_model: ClassVar[bool] = True
    flips: bool = True
    "whether the second phase has its own rate and no decay"

    def slug(self) -> str:
        return f"line-{'flips' if self.flips else 'plain'}"


class Fit:
    """The task of a Line; `start` is a checkpoint of another Line, to be continued."""

    def __init__(self, job: Line, start: tuple[Path, Line] | None = None) -> None:
        torch.manual_seed(0)
        self.job, self.start = job, start
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, weight_decay=0.1)
        self.updates, self.evaluate_every, self.micro_batch, self.slots_per_update = UPDATES, 10, 4, 4
        self.loss_module = Squares(self.model)
        self.seen: list[tuple[int, float, float]] = []

    def trunk(self) -> Progress | None:
        if self.start is None:
            return None
        state = checkpoint.load(*self.start, self.model, self.optimizer)
        return Progress(state["update"], state["counted"])

    def begin(self, update: int) -> dict[str, float]:
        late = self.job.flips and update >= SECOND_PHASE
        rate, decay = (0.01, 0.0) if late else (0.1, 0.1)
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = rate, decay
        self.seen.append((update, rate, decay))
        return {"lr": rate, "decay": decay}

    def batch(self, update: int) -> Batch:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(update))
        return Batch([((x, x.sum(1, keepdim=True)), 0.25)], 4)

    def autocast(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def clip(self) -> None:
        pass

    def evaluate(self) -> dict[str, float]:
        return {"weight": float(self.model.weight.sum())}

    def save(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(self.model.weight.tolist()))


class Squares(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.model(x) - y).square().sum()


def trained(task: Fit, work: Path, **machine: object) -> Engine:
    engine = Engine(task, work, Machine(**{**vars(QUIET), **machine}), ALONE)
    engine.train()
    return engine


def test_phases_change_rate_and_decay_at_their_update_and_a_resumed_job_is_in_the_same_phase(tmp_path):
    whole = trained(Fit(Line()), tmp_path / "whole")
    assert whole.task.seen == [(u, 0.01, 0.0) if u >= SECOND_PHASE else (u, 0.1, 0.1) for u in range(UPDATES)]
    with pytest.raises(Interrupted):
        trained(Fit(Line()), tmp_path / "broken", stop_after=SECOND_PHASE + 2)
    resumed = trained(Fit(Line()), tmp_path / "broken")
    assert [entry[0] for entry in resumed.task.seen] == list(range(SECOND_PHASE + 2, UPDATES))
    assert torch.equal(resumed.task.model.weight, whole.task.model.weight)
    assert resumed.curve.training() == whole.curve.training()


def test_a_branch_continues_its_trunk_with_the_optimizers_state(tmp_path):
    """Up to the second phase both jobs are alike, so that a branch from there equals the whole run bit for bit."""
    whole = trained(Fit(Line()), tmp_path / "whole")
    with pytest.raises(Interrupted):
        trained(Fit(Line(flips=False)), tmp_path / "trunk", stop_after=SECOND_PHASE)
    branch = trained(Fit(Line(), (tmp_path / "trunk", Line(flips=False))), tmp_path / "branch")
    assert [entry[0] for entry in branch.task.seen] == list(range(SECOND_PHASE, UPDATES))
    assert torch.equal(branch.task.model.weight, whole.task.model.weight)
    fresh = Fit(Line())
    fresh.model.load_state_dict({"weight": torch.zeros(1, 3), "bias": torch.zeros(1)})
    assert not torch.equal(trained(fresh, tmp_path / "fresh").task.model.weight, whole.task.model.weight)


def test_a_killed_branch_goes_on_from_its_own_checkpoint_and_not_from_the_trunk(tmp_path):
    whole = trained(Fit(Line()), tmp_path / "whole")
    with pytest.raises(Interrupted):
        trained(Fit(Line(flips=False)), tmp_path / "trunk", stop_after=SECOND_PHASE)
    start = (tmp_path / "trunk", Line(flips=False))
    with pytest.raises(Interrupted):
        trained(Fit(Line(), start), tmp_path / "branch", stop_after=SECOND_PHASE + 5)
    resumed = trained(Fit(Line(), start), tmp_path / "branch")
    assert resumed.task.seen[0][0] == SECOND_PHASE + 5
    assert torch.equal(resumed.task.model.weight, whole.task.model.weight)


def test_a_snapshot_that_is_asked_for_later_is_made_from_a_checkpoint_before_it(tmp_path):
    with pytest.raises(Interrupted):
        trained(Fit(Line()), tmp_path, stop_after=25, checkpoint_updates=5)
    engine = Engine(Fit(Line()), tmp_path, QUIET, ALONE, keep=(22,))
    engine.train()
    assert engine.task.seen[0][0] == 20  # the checkpoint after 25 updates is too late
    assert (tmp_path / "snapshots/at-22/config.json").is_file()
