"""How a finished model's weights are stored while it is evaluated: settings that jobs share, and the conversion."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from paperlm.errors import JobError
from paperlm.jobs.base import Head, Job, LooksAtModel, packed_bytes

Store = Literal["plain", "packed", "int8", "fp4", "nf4", "fp4_double", "nf4_double"]
"""plain: bfloat16 as it is; packed: NeuZip's; the others are bitsandbytes' quantizers, int8 with products of whole
numbers, double with scales that are quantized as well."""


class StoreSettings(Job):
    """Settings of a job about weights that are rounded to bfloat16, and stored."""

    store: Store
    mant_bits: Literal[0, 1, 3, 7] = 7
    "of packed: bits of the mantissa; 7 is without loss"
    block_norm: int | None = Field(None, gt=0)
    "of packed with fewer: weights that are divided by the mantissa of their largest together; null: none are"
    norm_semantics: Literal["true_max", "authors_v1"] = "true_max"
    "of block_norm: the largest of a block, or what the published program takes for it"
    policy: Literal["paper", "all_linear", "all"] = "paper"
    "which weights: linear layers but the head; the head too; embeddings too"

    @model_validator(mode="after")
    def options_are_of_the_store(self) -> StoreSettings:
        rounds = self.store == "packed" and self.mant_bits < 7
        if self.store != "packed" and self.mant_bits != 7:
            raise ValueError(f"mant_bits is of store packed; leave it out for {self.store}")
        if self.block_norm is not None and (not rounds or self.block_norm not in (32, 64, 128, 256, 512, 1024)):
            raise ValueError("block_norm is of packed weights of fewer than 7 bits, and a power of two from 32 to 1024")
        if self.norm_semantics != "true_max" and self.block_norm is None:
            raise ValueError("norm_semantics says what block_norm divides by: give that too")
        if self.store == "plain" and self.policy != "paper":
            raise ValueError("policy says which weights are stored; plain ones are not: leave it out")
        return self

    def behaviours(self) -> dict[str, int]:
        counts_bytes = self.store == "packed" and "weight_bytes" in (self.metrics() or ())
        return super().behaviours() | (packed_bytes() if counts_bytes else {})

    def stored_as(self) -> str:
        """Short name of the store, for file names."""
        if self.store != "packed":
            return self.store
        norm = "" if self.block_norm is None else f"_n{self.block_norm}"
        authors = "_authors" if self.norm_semantics == "authors_v1" else ""
        return f"packed{self.mant_bits}{norm}{authors}"


class StoredModel(StoreSettings, LooksAtModel):
    """Settings of a job that looks at a model whose weights are rounded to bfloat16, and stored."""

    def needs_head(self) -> Head:
        return "tokens"

    def card_bytes(self) -> None:
        """How far weights shrink follows from the numbers in them."""
        return None

    def slug(self) -> str:
        policy = "" if self.policy == "paper" else f"-{self.policy}"
        return f"{self.kind}-{self.stored_as()}{policy}-{self.of_what()}"


def cannot_store(job: StoreSettings) -> str:
    """Why the job's store is not to be had here; empty if it is."""
    import importlib.util

    if job.store not in ("plain", "packed") and importlib.util.find_spec("bitsandbytes") is None:
        return f"{job.store.upper()} is that of bitsandbytes, which is not installed: pip install bitsandbytes"
    return ""


def store_factory(job: StoreSettings) -> Any:
    """What makes a store of a weight in bfloat16; None for plain ones."""
    from paperlm_kernels.stored import Int8Store, Nf4Store, PackedStore

    if job.store == "plain":
        return None
    if job.store == "packed":
        options: dict[str, Any] = {"mant_bits": job.mant_bits, "block_norm": job.block_norm}
        if job.block_norm is not None:
            options["norm_semantics"] = job.norm_semantics
        return partial(PackedStore, **options)
    if job.store == "int8":
        return Int8Store
    name, _, double = job.store.partition("_")
    return partial(Nf4Store, quant_type=name, double=bool(double))


def counted(model: Any, device: Any) -> dict[str, float]:
    """weight_bytes, bits_per_weight and stored_weights of a model that was evaluated on a device.

    Raises StreamError if a packed weight was found damaged while a card unpacked it for that: what came of it is wrong.
    """
    from paperlm_kernels.neuzip import raise_decode_errors
    from paperlm_kernels.stored import weight_bytes

    raise_decode_errors(device)
    found = weight_bytes(model)
    return {
        "weight_bytes": found.total,
        "bits_per_weight": found.bits_per_weight or 16.0,
        "stored_weights": found.stored_weights,
    }


def put_into_stores(model: Any, job: StoreSettings, device: Any, apart: Sequence[str] = ()) -> Any:
    """A model in bfloat16, converted in place, on a device. Weights go there one after the other and are stored there,
    so that a model that fits on a card in its stores alone gets there too; what is not stored follows. apart: parts of
    the names of weights that are not stored; they come in float32, to layers that take any input (T5's `.wo.`)."""
    from paperlm_kernels.stored import convert

    names = in_float32(apart, model)
    for name, module in model.named_modules():
        if f"{name}.weight" in names:
            module.float()
    if (factory := store_factory(job)) is not None:
        convert(model, lambda weight: factory(weight.to(device)), job.policy, leave=apart)
    return model.to(device)


def load_into_stores(folder: Path, job: StoreSettings, device: Any) -> Any:
    """The decoder of a model folder in bfloat16, as `put_into_stores` leaves it. It is never there whole: one weight
    after the other is read, goes to the device and is stored there.

    A folder whose weights do not stand under their names in the model (experts, say, which are joined) is read whole.
    Raises JobError if it cannot be read.
    """
    import torch
    from paperlm_kernels.stored import convert

    from paperlm.models.folder import load_model
    from paperlm.models.shell import shell_of

    if (shell := shell_of(folder, torch.bfloat16)) is None:
        return put_into_stores(load_model(folder, dtype=torch.bfloat16), job, device)
    if (factory := store_factory(job)) is not None:
        convert(shell.model, factory, job.policy, values=lambda name: shell.read(name, device))
    shell.fill(device)
    return shell.model.to(device)


def in_float32(parts: Sequence[str], model: Any) -> set[str]:
    """Names of the weights that have one of `parts` in them. Raises JobError for a part that none has."""
    names = [name for name, _ in model.named_parameters()]
    for part in parts:
        if not any(part in name for name in names):
            raise JobError(f"in_float32: no weight of the model has {part!r} in its name; take it out, or mend it")
    return {name for name in names if any(part in name for part in parts)}
