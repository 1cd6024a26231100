"""How fast this machine is at a small training step, so that what a job cost on another one can be carried over."""

from __future__ import annotations

import datetime
import statistics
import time
from pathlib import Path

from pydantic import Field, ValidationError

from paperlm.errors import RecordError
from paperlm.files import read_sealed, write_sealed
from paperlm.frozen import Frozen
from paperlm.record.environment import cpu_name
from paperlm.record.places import CALIBRATION

WHAT = "how fast a machine is"
WARMUP, STEPS = 3, 30
"Updates: a second or two on the machines of 2026, most of it the calls of small operations, as at the CPU scales."


class Calibration(Frozen):
    """A machine and its speed."""

    cpu: str
    date: str
    step_seconds: float = Field(gt=0)
    "of `step_seconds()`"


def stored(root: Path) -> Calibration | None:
    """What `calibrated` found on this model of CPU before; None if it has not run here, or on another one."""
    try:
        found = read_sealed(root / CALIBRATION, WHAT, Calibration.model_fields, RecordError, "it is measured anew")
        known = Calibration(**{key: found[key] for key in Calibration.model_fields})
    except (RecordError, ValidationError):
        return None
    return known if known.cpu == cpu_name() else None


def calibrated(root: Path) -> Calibration:
    """This machine's speed; measured once, which takes a few seconds, and kept in results/."""
    if (known := stored(root)) is not None:
        return known
    today = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    found = Calibration(cpu=cpu_name(), date=today, step_seconds=round(step_seconds(), 6))
    write_sealed(root / CALIBRATION, WHAT, found.model_dump())
    return found


def step_seconds() -> float:
    """Median seconds of an update of 12 blocks of width 64 on 4 x 128 tokens, float32, one thread: the shape of scale
    tiny, written with PyTorch's own blocks so that no change of this project's model changes it. Of processor time, so
    that other work on the machine does not count.

    Keep it as it is: the committed costs (docs/reference/<scale>/costs.json) were made beside it.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            block = torch.nn.TransformerEncoderLayer(64, 2, 176, dropout=0.0, batch_first=True, norm_first=True)
            body = torch.nn.TransformerEncoder(block, 12, enable_nested_tensor=False)
            embedding, head = torch.nn.Embedding(1024, 64), torch.nn.Linear(64, 1024, bias=False)
            model = torch.nn.Sequential(embedding, body, head)
            optimizer = torch.optim.Adam(model.parameters())
            ids = torch.randint(1024, (4, 128))
        seconds = []
        for _ in range(WARMUP + STEPS):
            started = time.process_time()
            torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.process_time() - started)
    finally:
        torch.set_num_threads(threads)
    return statistics.median(seconds[WARMUP:])
