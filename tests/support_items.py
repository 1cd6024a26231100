"""Helpers of the tests on sets of items: bundled lines read without the package, the folder of the full sets."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from paperlm.data.items import prepare_any
from paperlm.data.registry import HERE
from paperlm.data.settings import data_settings
from paperlm.evaluate.tasks import TASKS

FULL_SETS = os.environ.get("PAPERLM_LOCAL_DATA", "")
needs_full_sets = pytest.mark.skipif(
    not (Path(FULL_SETS) / "eval/boolq").is_dir() or not FULL_SETS,
    reason="PAPERLM_LOCAL_DATA names no folder with the full sets (registry entries `local:`)",
)


def bundled(name):
    """Items of data/bundled/<name>.jsonl.gz."""
    data = gzip.decompress((HERE / f"bundled/{name}.jsonl.gz").read_bytes())
    return [json.loads(line) for line in data.splitlines()]


def prepared(folder, source="bundled", tasks=tuple(TASKS), few_shot=True):
    """Task -> manifest of its prepared items, below `folder`."""
    found = {}
    for name in tasks:
        task = TASKS[name]
        splits = {task.split: None, task.few_shot_split: None} if few_shot else {task.split: None}
        settings = data_settings({"dataset": f"{source}:{task.datasets[source]}", "splits": splits})
        found[name] = prepare_any(settings, folder / settings.data_id, FULL_SETS)
    return found
