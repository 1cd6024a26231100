"""Helpers of the probe and hub model tests: a stand-in for pre-training, small model folders, toy registry entries."""

from __future__ import annotations

import hashlib
from typing import ClassVar

import transformers
from support_models import fresh

from paperlm.data import registry as registry_module
from paperlm.data.registry import ModelEntry, Registry, registry
from paperlm.data.settings import TokenData
from paperlm.jobs.base import Inputs, Job
from paperlm.models.folder import save_model, transformers_tokenizer

STEPS = 100
TOKENS = {"dataset": "bundled:c4_sample", "tokenizer": "bpe1024", "vocab_size": 1024, "seq_len": 32}
TOKENS |= {"example": "split", "train_examples": 20, "validation_tokens": 800}
SHAPE = {"vocab_size": 1024, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4}
SHAPE |= {"num_hidden_layers": 3, "max_position_embeddings": 64}


class Pretrained(Job):
    """What probes ask of a pre-training: its tokens and its states."""

    kind: ClassVar[str] = "pretrain"
    seed: int = 0

    def token_data(self) -> TokenData:
        return TokenData(**TOKENS)

    def snapshots(self) -> range:
        return range(STEPS)

    def slug(self) -> str:
        return f"toy-s{self.seed}"


class FineTuned(Job):
    kind: ClassVar[str] = "sft"
    of: Pretrained

    def slug(self) -> str:
        return f"sft-{self.of.slug()}"


def new_model(cls=transformers.LlamaForCausalLM, seed=0, **options):
    return fresh(cls, seed, **SHAPE | options)


def save(folder, model):
    """A model with the bundled tokenizer of 1,024 ids."""
    save_model(folder, model, transformers_tokenizer("bpe1024", 64))
    return folder


def register(monkeypatch, **entries):
    """Add models to the registry; what an entry leaves out is `toy`."""
    about = dict.fromkeys(("summary", "revision", "licence", "citation"), "toy")
    models = {name: ModelEntry(**about | entry) for name, entry in entries.items()}
    known = registry()
    toy = Registry(datasets=known.datasets, tokenizers=known.tokenizers, models=known.models | models)
    monkeypatch.setattr(registry_module, "registry", lambda: toy)


def file_entry(path, below):
    data = path.read_bytes()
    return {"path": str(path.relative_to(below)), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def inputs(tmp_path, model=None, data=()):
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    return Inputs(data=tuple(data), models={"of": model} if model else {}, work=work)
