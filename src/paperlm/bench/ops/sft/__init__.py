"""A step of trl's SFTTrainer with the losses that it can have: peak memory, time, and whether the loss is right.

SFTTrainer has its default settings (float32 parameters under bfloat16 autocast, gradient checkpointing, fused AdamW)
but for the lengths. All methods train the same random weights on the same ids; the loss of the first step is compared
with float32's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable
from typing import Any

from paperlm_kernels.bench import report
from paperlm_kernels.bench.operation import Defaults, Operation, Row, Task
from paperlm_kernels.bench.ops.pretrain import CASES as PRETRAIN
from paperlm_kernels.bench.peers import label, why_absent

VOCABULARIES = {"": 32_000, "_128k": 128_256}
"Of LLaMA 2 and of LLaMA 3."
CASES = {
    f"{size}{suffix}": dataclasses.replace(
        PRETRAIN[size], batch=8, seq_len=2048, vocab=vocab, dtype="float32", compiled=False
    )
    for size in ("71M", "130M")
    for suffix, vocab in VOCABULARIES.items()
}
CASES["tiny"] = dataclasses.replace(PRETRAIN["tiny"], batch=8)


@dataclasses.dataclass(frozen=True)
class Method:
    """Which model, and who computes its loss; `package`: the peer's, with which the method's name begins."""

    about: str
    package: str | None = None
    ours: bool = False
    "our decoder, else LlamaForCausalLM"
    asks_model: bool = False
    "the trainer takes the loss that the model returns, else it computes its own"
    fused: bool = False
    "the model has `use_fused_loss`, exact and without kept logits"
    liger: str = ""
    "layers: use_liger_kernel=True; loss: its fused linear cross-entropy in the model"


METHODS = {
    "transformers logits": Method("its loss, which holds all logits", "transformers", asks_model=True),
    "trl": Method("SFTTrainer as it is: its loss in tiles", "trl"),
    "liger-kernel layers": Method(
        "SFTTrainer(use_liger_kernel=True): its layers, trl's loss", "liger-kernel", liger="layers"
    ),
    "liger-kernel loss": Method(
        "its fused linear cross-entropy as the model's loss", "liger-kernel", asks_model=True, liger="loss"
    ),
    "fused": Method("use_fused_loss as the model's loss", asks_model=True, fused=True),
    "ours": Method("our decoder, SFTTrainer as it is", ours=True),
    "ours fused": Method("our decoder, use_fused_loss as its loss", ours=True, asks_model=True, fused=True),
}


class SFT(Operation):
    """Steps of supervised fine-tuning."""

    summary = "memory and time of a step of trl's SFTTrainer, by loss"
    cases = {
        name: f"LLaMA of width {case.size.hidden_size}, {case.size.n_layers} blocks; {case.batch} x {case.seq_len} "
        f"tokens a step, {case.vocab} ids"
        for name, case in CASES.items()
    }
    methods = {name: f"{'' if method.ours else 'LlamaForCausalLM, '}{method.about}" for name, method in METHODS.items()}
    measures = {
        "time": "milliseconds of a step",
        "memory": "peak within a step above what is held before it",
        "loss": "of the first step, and its relative difference from float32's",
    }
    packages = ("transformers", "trl", "accelerate", "datasets", "liger-kernel")
    groups = {"documented": tuple(name for name in CASES if name != "tiny")}

    def defaults(self, device: str, *, for_tables: bool = False) -> Defaults:
        cases = "documented" if device == "cuda" else "tiny"
        return Defaults(cases, ",".join(METHODS), ",".join(self.measures), repeats=10, warmup=3, seconds=5.0)

    def absent(self, method: str, device: str) -> str | None:
        liger = bool(METHODS[method].liger)
        return why_absent(device, package="trl") or why_absent(
            device, package="liger-kernel" if liger else None, needs_gpu=liger
        )

    def label(self, method: str) -> str:
        return label(method, METHODS[method].package)

    def modules(self, method: str) -> tuple[str, ...]:
        return ("trl.trainer.sft_trainer", "paperlm_kernels.bench.ops.sft.steps")

    def identity(self, task: Task) -> dict[str, Any]:
        case = task.sized(CASES)
        precision = "float32" if task.device == "cpu" else "bfloat16 autocast"
        return {
            "shape": {name: getattr(case, name) for name in ("batch", "seq_len", "vocab")} | {"precision": precision}
        }

    def run(self, task: Task) -> Generator[Row | None, bool | None, None]:
        from paperlm_kernels.bench.ops.sft.steps import rows_of

        yield from rows_of(self, task)

    def tables(self, found: Iterable[Row]) -> str:
        """Rows as Markdown; on a GPU also which methods of the documented cases have none in full size."""
        found = list(found)
        parts = [report.tables(found)]
        for device in dict.fromkeys(row["device"] for row in found if not row["device"].startswith("cpu")):
            there = {(row["case"], row["name"]) for row in found if row["device"] == device and row["scale"] == "full"}
            missing = {
                case: [method for method in METHODS if (case, method) not in there]
                for case in self.groups["documented"]
            }
            lost = [
                case if len(methods) == len(METHODS) else f"{', '.join(methods)} of {case}"
                for case, methods in missing.items()
                if methods
            ]
            if lost:
                parts.append(f"Not measured on {device}: {'; '.join(lost)}.")
        return "\n\n".join(parts)


OPERATION = SFT()
