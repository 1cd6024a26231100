"""A run is a value: every setting that can change its number, and a name made of them."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from paperlm.errors import SpecError
from paperlm.norms import ModelShape, NormMethod, build_method

BEHAVIOUR = 1
"""Raised when the same settings would now give another number; part of every run's name.

1: first version.
"""


Loss = Literal[
    "cross_entropy", "cce", "cce_kahan", "cce_kahan_full_c", "cce_kahan_full_e", "cce_exact", "cce_exact_kept"
]
"""How the training loss is computed; the names after the first are the variants of Cut Cross-Entropy."""


class Frozen(BaseModel):
    """Unknown keys are errors; values cannot be changed after construction."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DivergedRule(Frozen):
    """When a finished run counts as diverged: perplexity not finite, or at the unigram plateau.

    `above`: perplexity above a number (the papers' 1,360-1,440 lie above 1,000). `unigram_within`: perplexity above
    (1 - x) times that of the data's unigram distribution, which is where those published numbers come from.
    """

    above: float | None = Field(None, gt=0)
    unigram_within: float | None = Field(None, gt=0, lt=1)

    @model_validator(mode="after")
    def one_rule(self) -> DivergedRule:
        if (self.above is None) == (self.unigram_within is None):
            raise ValueError("give exactly one of above and unigram_within")
        return self

    def threshold(self, unigram_perplexity: float) -> float:
        """Perplexity from which a run counts as diverged."""
        return self.above if self.above is not None else (1 - self.unigram_within) * unigram_perplexity


class RunConfig(Frozen):
    """One pre-training run. Field names and values are part of the run's hash.

    A field with a default was added after the first records: at its default it is left out of the hash and of the
    record, so that the runs before it keep their names.
    """

    size: str
    "name of the model size in the paper; at small scales the shape below is not that size's"
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    n_heads: int = Field(gt=0)
    n_layers: int = Field(gt=0)
    vocab_size: int = Field(gt=2, le=65536)
    norm: dict[str, Any]
    rms_norm_eps: float = Field(gt=0)
    rope_theta: float = Field(gt=0)
    initializer_range: float = Field(gt=0)
    embed_init_std: float = Field(gt=0)
    zero_last_embedding_row: bool

    dataset: str = Field(pattern=r"^(bundled|local|hub):[\w./-]+$")
    tokenizer: str
    seq_len: int = Field(gt=1)
    example: Literal["truncate", "split", "packed"]
    "truncate: a document is one example, its rest is dropped (the normalization papers); split: its rest makes more "
    "examples; packed: all documents in a row, cut into full examples (Cut Cross-Entropy)"
    train_examples: int = Field(gt=0)
    "at most so many examples are prepared"
    validation_tokens: int = Field(gt=0)
    "the first documents that hold so many real tokens are the validation set"

    optimizer: Literal["adam"]
    adam_betas: tuple[float, float]
    adam_eps: float = Field(gt=0)
    weight_decay: float = Field(ge=0)
    grad_clip: float = Field(ge=0)
    "0 means none"
    peak_lr: float = Field(gt=0)
    warmup_fraction: float = Field(ge=0, lt=1)
    final_lr_fraction: float = Field(ge=0, le=1)
    steps: int = Field(gt=0)
    global_batch: int = Field(gt=0)
    "sequences per update"
    loss_group: int = Field(gt=0)
    "the loss is the mean over groups of so many sequences of the group's token mean (the authors' micro-batch)"
    numerics: Literal["pure_bf16", "fp32_master", "fp32"]
    seed: int = Field(ge=0)

    eval_every: int = Field(gt=0)
    published_eval_batches: int = Field(gt=0)
    "n of ppl_paper(n): the number of batches of the published run's evaluation, which divided by n + 1"
    diverged: DivergedRule

    loss: Loss = "cross_entropy"
    "cross_entropy: of materialised logits; the others are fused with the head (paperlm.models.losses)"
    curve: Literal["thinned", "every_update"] = "thinned"
    "training curve in the record: at most 160 averages; or every update, and ppl_sequences at every evaluation"

    @field_validator("norm")
    @classmethod
    def norm_exists(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Options are written out in full, so that a changed default makes a new run."""
        try:
            return build_method(value).describe()
        except SpecError as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def fits_together(self) -> RunConfig:
        if self.hidden_size % self.n_heads or (self.hidden_size // self.n_heads) % 2:
            raise ValueError(f"hidden_size {self.hidden_size} does not split into {self.n_heads} heads of even width")
        if self.global_batch % self.loss_group:
            raise ValueError(f"loss_group {self.loss_group} does not divide global_batch {self.global_batch}")
        try:
            self.method().check(self.shape())
        except SpecError as error:
            raise ValueError(str(error)) from None
        return self

    def method(self) -> NormMethod:
        """The normalization method of this run."""
        return build_method(self.norm)

    def shape(self) -> ModelShape:
        """What the method may look at."""
        return ModelShape(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            n_layers=self.n_layers,
            initializer_range=self.initializer_range,
            embed_init_std=self.embed_init_std,
        )

    @property
    def warmup_steps(self) -> int:
        """Updates of linear warm-up."""
        return round(self.warmup_fraction * self.steps)

    @model_serializer(mode="wrap")
    def without_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Every field but those at their default."""
        fields = type(self).model_fields
        return {
            key: value
            for key, value in serialize(self).items()
            if fields[key].is_required() or getattr(self, key) != fields[key].default
        }

    def canonical(self) -> dict[str, Any]:
        """Plain JSON values of every field but those at their default: what the hash is made of."""
        return json.loads(self.model_dump_json())

    @property
    def run_id(self) -> str:
        """Readable slug plus a hash of every field and of the data's checksums, e.g. llama_130m-mix_ln-s0-3fa91c02."""
        from paperlm.data.registry import data_fingerprint  # the registry's own classes derive from Frozen

        loss = "" if self.loss == "cross_entropy" else f"-{self.loss}"
        slug = f"llama_{self.size}-{method_slug(self.norm)}{loss}-s{self.seed}".lower()
        data = data_fingerprint(self.dataset, self.tokenizer)
        return f"{slug}-{digest({'behaviour': BEHAVIOUR, 'data': data, **self.canonical()})}"

    def data_settings(self) -> dict[str, Any]:
        """The settings that decide which tokens are prepared."""
        keys = ("dataset", "tokenizer", "vocab_size", "seq_len", "example", "train_examples", "validation_tokens")
        return {key: getattr(self, key) for key in keys}


def method_slug(norm: dict[str, Any]) -> str:
    """Short name of a method and its base, for file names."""
    own = norm["name"]
    if norm.get("preset", "").startswith("authors"):
        own += f".{norm['preset']}"
    return f"{own}.{method_slug(norm['base'])}" if isinstance(norm.get("base"), dict) else own


def digest(value: Any, length: int = 8) -> str:
    """First hexadecimal digits of the SHA-256 of the value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:length]
