"""Helpers of the tests of models from elsewhere."""

from __future__ import annotations

from paperlm.jobs.base import Inputs, Machine
from paperlm.jobs.hub_model import HubModel, run

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def saved(tmp_path, manifest, name="local:toy"):
    """Result and folder of the job on files that the data rule prepared."""
    target = tmp_path / "made"
    target.mkdir(exist_ok=True)
    found = run(HubModel(name=name), Inputs(data=(manifest,), work=tmp_path, model=target), Machine(device="cpu"))
    return found, target
