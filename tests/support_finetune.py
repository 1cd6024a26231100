"""Helpers of the tests of fine-tuning: small models, prepared sets, stand-ins for the jobs before, a run on its own.

`python support_finetune.py FOLDER KIND` runs a job of KIND as the tests do, and is killed within its third checkpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import ClassVar

from paperlm.data.shards import write_manifest
from paperlm.files import sha256_of
from paperlm.jobs.base import Inputs, Job, Machine
from paperlm.jobs.reward_model import RewardModel
from paperlm.jobs.rloo import RLOO
from paperlm.jobs.sft import SFT


class Pretrained(Job):
    """In place of a pre-training run."""

    kind: ClassVar[str] = "pretrain"
    name: str = "pre_ln"

    def slug(self):
        return f"pretrain-{self.name}"


CPU = Machine(device="cpu", progress=False)
COMMON = {
    "batch": 4,
    "epochs": 2.0,
    "peak_lr": 1e-2,
    "warmup": 0.1,
    "schedule": "cosine",
    "numerics": "fp32",
    "seed": 1,
}


def sft(**changes):
    settings = {
        "of": Pretrained(),
        "dataset": "bundled:commonsense_4k",
        "examples": 30,
        "validation_examples": 6,
        "template": "llm_adapters",
        "block": 96,
        "loss_on": "sequence",
        **COMMON,
    }
    return SFT.model_validate(settings | changes)


def reward_model(**changes):
    settings = {
        "of": sft(),
        "dataset": "bundled:hh_rlhf_600",
        "examples": 40,
        "validation_examples": 12,
        "prompt_length": 24,
        "answer_length": 12,
        **COMMON,
    }
    return RewardModel.model_validate(settings | changes)


def rloo(**changes):
    settings = {
        "of": sft(),
        "reward": reward_model(),
        "baseline": sft(),
        "dataset": "bundled:hh_rlhf_600",
        "prompts": 8,
        "validation_prompts": 6,
        "prompt_length": 24,
        "answer_length": 6,
        "samples": 3,
        "beta": 0.05,
        **COMMON,
    }
    return RLOO.model_validate(settings | changes)


def instruction_items(count, start=0):
    words = ["red", "green", "blue", "black", "white"]
    return [
        {"instruction": f"Name colour {i}.", "input": "" if i % 3 else "a list", "output": words[i % 5]}
        for i in range(start, start + count)
    ]


def preference_items(count, start=0):
    return [
        {"prompt": f"Say {i}.", "chosen": "good " * (1 + i % 3), "rejected": "bad " * (1 + i % 2)}
        for i in range(start, start + count)
    ]


def write_set(folder: Path, **splits) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    entries = {}
    for name, items in splits.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(item) + "\n" for item in items))
        entries[name] = {"file": path.name, "rows": len(items), "sha256": sha256_of(path)}
    return write_manifest(folder, {"data_id": folder.name, "splits": entries})


def write_model(folder: Path, seed=0, layers=2, **config) -> Path:
    import torch

    from paperlm.models.folder import save_model, transformers_tokenizer
    from paperlm.models.llama import PaperLlamaConfig, PaperLlamaForCausalLM

    torch.manual_seed(seed)
    shape = {"vocab_size": 1024, "hidden_size": 16, "intermediate_size": 40, "num_attention_heads": 2}
    model = PaperLlamaForCausalLM(PaperLlamaConfig(**(shape | {"num_hidden_layers": layers} | config)))
    save_model(folder, model, transformers_tokenizer("bpe1024", 128))
    return folder


def inputs(folder: Path, data: Path, **models: Path) -> Inputs:
    (folder / "work").mkdir(parents=True, exist_ok=True)
    (folder / "model").mkdir(exist_ok=True)
    return Inputs(data=(data,), models=models, work=folder / "work", model=folder / "model")


def killed(folder: Path, kind: str, data: Path, environment: dict, **models: Path) -> Inputs:
    """What a job has after its process was killed; `folder` is its own."""
    import signal
    import subprocess

    (folder / "data").symlink_to(data.parent)
    (folder / "parents").mkdir()
    for name, model in models.items():
        (folder / "parents" / name).symlink_to(model)
    ended = subprocess.run([sys.executable, __file__, str(folder), kind], env=environment, timeout=300)
    assert ended.returncode == -signal.SIGKILL
    return inputs(folder, data, **models)


def weights(folder: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


if __name__ == "__main__":
    import os
    import signal

    from paperlm.finetune import common
    from paperlm.jobs import run_job

    base, kind = Path(sys.argv[1]), sys.argv[2]
    real, calls = common.write_sealed, []

    def kill_within_the_third(path, what, value):
        calls.append(path)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        real(path, what, value)

    common.write_sealed = kill_within_the_third
    parents = {path.name: path for path in (base / "parents").iterdir()}
    given = inputs(base, base / "data" / "manifest.json", **parents)
    every = {"sft": 2, "reward_model": 3, "rloo": 1}[kind]
    job = {"sft": sft, "reward_model": reward_model, "rloo": rloo}[kind]()
    run_job(job, given, Machine(device="cpu", progress=False, checkpoint_updates=every))
