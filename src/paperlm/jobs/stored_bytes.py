"""Bytes that a model of some shape takes when its weights are stored in fewer bits (NeuZip, Tables 3a, 3b and 4)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from paperlm.evaluate.stores import StoreSettings, cannot_store, in_float32, store_factory
from paperlm.jobs.base import Inputs, Machine
from paperlm.result import Result

CODE_LENGTH = 2.0
"""Bits: at most the standard deviation of a code's length. Below the most frequent ones, each exponent of a normal
distribution is half as frequent as the next larger, so that lengths are spread like a geometric distribution of 1/2,
whose standard deviation is 1.41."""


class StoredBytes(StoreSettings):
    """A model with weights from N(0, std^2), one matrix of each shape drawn and counted as often as it occurs.

    No model is made, and matrices lie in memory one at a time. What the draws leave open is in the standard errors.
    """

    kind: ClassVar[str] = "stored_bytes"
    summary: ClassVar[str] = "bytes of a model of some shape, with random weights that are stored in fewer bits"
    on_card: ClassVar[bool] = False

    architecture: Literal["llama", "t5"]
    "transformers' LLaMA, or its T5: an encoder and a decoder of n_layers blocks each"
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    n_heads: int = Field(gt=0)
    n_kv_heads: int | None = Field(None, gt=0)
    "of llama: heads of keys and values; null: as many as n_heads"
    head_size: int = Field(gt=0)
    n_layers: int = Field(gt=0)
    vocab_size: int = Field(gt=2)
    tied: bool = False
    "of llama: the head is the embedding, as T5's is"
    in_float32: list[str] = []
    "weights with one of these in their name are not stored, and lie in float32"
    std: float = Field(gt=1e-30, lt=1e30)
    "standard deviation of the weights"

    @model_validator(mode="after")
    def options_are_of_the_architecture(self) -> StoredBytes:
        if self.n_kv_heads is not None and self.architecture != "llama":
            raise ValueError(f"n_kv_heads is of llama; leave it out for {self.architecture}")
        if self.architecture == "llama" and self.hidden_size % self.n_heads:
            raise ValueError(
                f"n_heads: {self.n_heads} does not divide hidden_size, {self.hidden_size}, as of any llama"
            )
        if self.tied and self.architecture != "llama":
            raise ValueError(f"tied is of llama; the head of {self.architecture} is its embedding: leave it out")
        if self.policy == "all_linear" and (self.tied or self.architecture == "t5"):
            raise ValueError("policy: the head is the embedding: say all to store both, or paper for neither")
        if self.n_kv_heads is not None and self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_kv_heads: {self.n_kv_heads} does not divide n_heads, {self.n_heads}")
        return self

    def metrics(self) -> tuple[str, ...]:
        return ("parameters", "stored_weights", "weight_bytes", "bits_per_weight")

    def series(self) -> dict[str, tuple[str, ...]]:
        return {}

    def proxy(self) -> str:
        return f"a checkpoint's weights: drawn from N(0, {self.std:g}^2)"

    def slug(self) -> str:
        apart = "" if self.policy == "paper" else f"-{self.policy}"
        apart += "-float32" if self.in_float32 else ""
        shape = f"{self.architecture}_{self.n_layers}x{self.hidden_size}x{self.intermediate_size}"
        return f"stored_bytes-{self.stored_as()}{apart}-{shape}"


def run(job: StoredBytes, inputs: Inputs, machine: Machine) -> Result:
    """Metrics: parameters, stored_weights (those in stores), weight_bytes (of all parameters, between their uses, with
    the tables of codes that a GPU keeps), bits_per_weight (of those stored; 16 where none is).

    `blocked` for a store that is not to be had here. Raises JobError for a name of `in_float32` that no weight has.
    """
    import torch
    from paperlm_kernels.stored import chosen_weights

    if why := cannot_store(job):
        return Result(outcome="blocked", reason=why)
    model = shape_of(job)
    parameters = dict(model.named_parameters())
    apart, factory = in_float32(job.in_float32, model), store_factory(job)
    stored = chosen_weights(model, job.policy, job.in_float32) if factory else {}
    kept = sum((4 if name in apart else 2) * p.numel() for name, p in parameters.items() if name not in stored)
    found, numbers, variance = 0, 0, 0.0
    for index, (shape, times) in enumerate(sorted(_matrices(model, stored.values()).items())):
        draw = torch.Generator().manual_seed(index)
        weight = torch.randn(shape, generator=draw).mul_(job.std).bfloat16()
        found += times * factory(weight).nbytes
        numbers += times * weight.numel()
        if job.store == "packed":  # other stores take the same for any values
            variance += (times * CODE_LENGTH / 8) ** 2 * weight.numel()
    return Result(
        outcome="measured",
        metrics={
            "parameters": sum(p.numel() for p in parameters.values()),
            "stored_weights": numbers,
            "weight_bytes": found + kept,
            "bits_per_weight": 8 * found / numbers if numbers else 16.0,
        },
        standard_errors={
            "parameters": 0.0,
            "stored_weights": 0.0,
            "weight_bytes": math.sqrt(variance),
            "bits_per_weight": 8 * math.sqrt(variance) / max(1, numbers),
        },
    )


def _matrices(model: Any, weights: Iterable[Any]) -> Counter[tuple[int, ...]]:
    """Shape -> how many stores have it. An embedding is stored in blocks of rows."""
    from paperlm_kernels.stored import RowBlocks

    found: Counter[tuple[int, ...]] = Counter()
    for weight in weights:
        if weight is not model.get_input_embeddings().weight:
            found[tuple(weight.shape)] += 1
            continue
        rows, width = weight.shape
        block = RowBlocks.usual_rows(width)
        found[block, width] += rows // block
        if rows % block:
            found[rows % block, width] += 1
    return found


def shape_of(job: StoredBytes) -> Any:
    """The model on the meta device: names and shapes, no values."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

    if job.architecture == "llama":
        config: Any = LlamaConfig(
            vocab_size=job.vocab_size, hidden_size=job.hidden_size, intermediate_size=job.intermediate_size,
            num_hidden_layers=job.n_layers, num_attention_heads=job.n_heads, head_dim=job.head_size,
            num_key_value_heads=job.n_kv_heads or job.n_heads, tie_word_embeddings=job.tied,
        )  # fmt: skip
        cls: Any = LlamaForCausalLM
    else:
        config = T5Config(
            vocab_size=job.vocab_size, d_model=job.hidden_size, d_ff=job.intermediate_size, d_kv=job.head_size,
            num_layers=job.n_layers, num_heads=job.n_heads,
        )  # fmt: skip
        cls = T5ForConditionalGeneration
    with torch.device("meta"):
        return cls(config)
