"""A small run in two phases, and the branch that goes on with it."""

from __future__ import annotations

from typing import Any

from support import smoke_run

from paperlm.jobs.continue_pretrain import ContinuePretrain
from paperlm.jobs.pretrain import Pretrain

STEPS, AT = 12, 8
A8 = {"quantization": "a8_trunk", "sub_norm": True, "hidden_act": "relu2", "tie_word_embeddings": True}


def trunk(**changes: Any) -> Pretrain:
    """A run in two phases whose second begins before the branch leaves."""
    phases = {
        "schedule": "two_phase", "optimizer": "adamw", "second_peak_lr": 1e-3, "weight_decay": 0.1,
        "second_weight_decay": 0.0, "decay_norms": False, "grad_clip": 2.0, "final_lr_fraction": 0.02,
    }  # fmt: skip
    return smoke_run(**{"steps": STEPS, "eval_every": 3, "curve": "every_update"} | phases | changes)


def branch(of: Pretrain | None = None, at: int = AT, quantization: Any = None) -> ContinuePretrain:
    return ContinuePretrain(of=of or trunk(), at=at, quantization=quantization)
