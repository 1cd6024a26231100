"""Helpers of the tests on sets of items: bundled lines read without the package, the folder of the full sets."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from support_model import randomize

from paperlm.data.items import prepare_any
from paperlm.data.registry import HERE
from paperlm.data.settings import data_settings
from paperlm.data.shards import write_manifest
from paperlm.evaluate.tasks import TASKS
from paperlm.models.llama import PaperLlamaConfig, PaperLlamaForCausalLM

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


def rewrite(manifest, folder, change, split="test"):
    """A copy of prepared items with one split changed, checksums included."""
    shutil.copytree(manifest.parent, folder / "copy", dirs_exist_ok=True)
    path = folder / "copy" / f"{split}.jsonl"
    rows = change([json.loads(line) for line in path.read_bytes().splitlines()])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    content = json.loads(manifest.read_text(encoding="utf-8"))
    content["splits"][split] |= {"rows": len(rows), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    return write_manifest(folder / "copy", content)


def without(field):
    return lambda rows: [*rows[:6], {key: value for key, value in rows[6].items() if key != field}, *rows[7:]]


def small_model(vocab_size=1024):
    """Three blocks with random weights, in float64."""
    config = PaperLlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2
    )
    return randomize(PaperLlamaForCausalLM(config))
