"""Helpers of the tests of fine-tuning: small models, prepared sets, stand-ins for the jobs before, and a run on its own.

`python support_finetune.py FOLDER KIND` runs a job of KIND as the tests do, in a process that can be killed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import ClassVar

from paperlm.jobs.base import Inputs, Job, Machine
from paperlm.jobs.sft import SFT


class Pretrained(Job):
    """In place of a pre-training run."""

    kind: ClassVar[str] = "pretrain"
    name: str = "pre_ln"

    def slug(self):
        return f"pretrain-{self.name}"


CPU = Machine(device="cpu", progress=False)
COMMON = {"batch": 4, "epochs": 2.0, "peak_lr": 1e-2, "warmup": 0.1, "schedule": "cosine", "numerics": "fp32", "seed": 1}


def sft(**changes):
    settings = {
        "of": Pretrained(),
        "dataset": "bundled:c4_sample",
        "examples": 30,
        "validation_examples": 6,
        "template": "llm_adapters",
        "block": 96,
        "loss_on": "sequence",
        **COMMON,
    }
    return SFT.model_validate(settings | changes)


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
    for name, items in splits.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps({"splits": {name: {"file": f"{name}.jsonl"} for name in splits}}))
    return manifest


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


def weights(folder: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


if __name__ == "__main__":
    from paperlm.jobs import run_job

    base = Path(sys.argv[1])
    given = inputs(base, base / "data" / "manifest.json", of=base / "parent")
    run_job(sft(), given, Machine(device="cpu", progress=False, checkpoint_updates=2))
