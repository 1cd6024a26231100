"""How tests say what a field of a job is for, and values and fields that several kinds of job share.

`Seen` names parts of an outcome (`Workshop.outcome` in test_job_fields.py):

    slug                            the job's readable name
    data, labels, metrics.<name>, series.<name>      of its record
    weights, weights at 0           of the model that it leaves: the last ones, and those before the first update
    trl.<name>, rows, start, every  what trl gets: an argument, its data set, first weights; updates between evaluations
    requests, answers               what lm-eval asks the model, and what it says
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from support_small_jobs import A48, small


@dataclass(frozen=True)
class Seen:
    """Changed to `to`, each part of the outcome in `where` becomes another, and those in `stays` remain to the bit."""

    to: Any
    where: str
    "names of parts, separated by commas; `name=value`: becomes this value"
    stays: str = ""
    also: dict[str, Any] = field(default_factory=dict)
    "fields that have to change with it"
    given: dict[str, Any] = field(default_factory=dict)
    "fields that both jobs have, in place of those in BASE"


@dataclass(frozen=True)
class Elsewhere:
    """No effect that these tests can have."""

    why: str


ONE_VALUE = Elsewhere("has one value only")

T5 = {"tokenizer": "t5", "vocab_size": 32_000}
TASK_OF_IMAGES = {"dataset": "bundled:digits_of_12", "classes": 12}
OTHER_MODEL = small("pretrain", seed=8)
A8 = "a8_trunk"
TERNARY = small("pretrain", quantization=A8, sub_norm=True, hidden_act="relu2")
BITNET = {"quantization": A8, "sub_norm": True, "hidden_act": "relu2", "numerics": "pure_bf16"}
TASK = {"task": "arc_easy", "source": "bundled", "items": 3, "few_shot": 1, "max_length": 23}
OF_DESCENT = {"adam_betas": None, "adam_eps": None, "weight_decay": 0.0, "grad_clip": 0.0}
DESCENT = OF_DESCENT | {"optimizer": "sgd", "numerics": "pure_bf16", "loss_group": 6}
WIDE = {"hidden_size": 192, "intermediate_size": 208}
"Enough weights a matrix that they are coded."
TWO_PHASES = {"schedule": "two_phase", "second_peak_lr": 0.02}
FROM_ELSEWHERE = {"of": small("hub_model"), "text": "local:text_a", "text_tokens": 11}


def probe(series: str) -> dict[str, Seen]:
    """Fields of a kind that looks into a model on text, whose numbers are this series."""
    return {
        "of": Seen(OTHER_MODEL, series),
        "at": Seen("init", series, stays="data"),
        "text": Seen("local:text_b", f"{series},data", given=FROM_ELSEWHERE),
        "text_tokens": Seen(12, series, stays="data", given=FROM_ELSEWHERE),
    }


def of_inputs(series: str) -> dict[str, Seen | Elsewhere]:
    """The same of a kind that looks at what enters the projections."""
    no_decoder = Elsewhere("a model from elsewhere that is no decoder of this project is refused")
    other = small("pretrain", seed=8, **A48)
    return probe(series) | {"of": Seen(other, series), "text": no_decoder, "text_tokens": no_decoder}


TRIED = {"quantizers": {"four": "int4_absmean"}}
TRL = {
    "train_split": Seen("more", "rows"),
    "batch": Seen(6, "trl.max_steps"),
    "epochs": Seen(3.0, "trl.max_steps", stays="start"),
    "peak_lr": Seen(0.01, "trl.learning_rate=0.01"),
    "warmup": Seen(0.5, "trl.warmup_steps"),
    "schedule": (
        Seen("linear", "trl.lr_scheduler_type=linear"),
        Seen("constant", "trl.lr_scheduler_type=constant_with_warmup"),
    ),
    "numerics": (
        Seen("fp32_master", "trl.bf16=True", stays="start"),
        Seen("pure_bf16", "start", stays="trl.bf16"),
    ),
    "seed": Seen(9, "trl.seed=9"),
    "max_updates": Seen(2, "trl.max_steps=2"),
    "adam_betas": Seen((0.6, 0.97), "trl.adam_beta1=0.6,trl.adam_beta2=0.97"),
    "adam_eps": Seen(1e-4, "trl.adam_epsilon=0.0001"),
    "weight_decay": Seen(0.02, "trl.weight_decay=0.02"),
    "grad_clip": Seen(0.4, "trl.max_grad_norm=0.4"),
}
"Fields of paperlm.finetune.settings.Training that mean the same in each kind."

CAPPED = Elsewhere("tests/test_memory_cap.py: a cap is of a GPU's memory")
STORED = {
    "store": Seen(
        "plain", "metrics.weight_bytes", given={"mant_bits": 7, "block_norm": None}, stays="metrics.losses_hash"
    ),
    "mant_bits": Seen(3, "metrics.losses_hash,metrics.bits_per_weight", stays="metrics.tokens"),
    "block_norm": Seen(32, "metrics.losses_hash,metrics.bits_per_weight", stays="metrics.tokens"),
    "norm_semantics": Seen("authors_v1", "metrics.losses_hash", stays="metrics.tokens"),
    "policy": Seen("all", "metrics.stored_weights,metrics.losses_hash", stays="metrics.tokens"),
}
"Of two kinds that store a model's weights and measure its losses."
