"""Whole updates of descent on models of NeuZip's Table 1 at their full size, with fresh weights: memory and speed.

Ordinary SGD, LOMO and LOMO on packed weights train transformers' models of the paper's shapes, in bfloat16 with
activation checkpointing, on real text. The memory of all is capped as on the paper's card. The first updates are made
with PyTorch's deterministic kernels; their losses, and the hash of all weights behind them, tell whether methods agree.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Generator, Mapping
from typing import Any

from paperlm_kernels.bench.arguments import whole
from paperlm_kernels.bench.operation import Defaults, Operation, Row, Task
from paperlm_kernels.bench.peers import why_absent

UPDATES, TEXT = 64, "bundled:c4_sample"
CAP = 47.5
"GiB that a process may hold: what a card of 48 GB has free, as the paper's RTX A6000 (NeuZip, section 4.1)."


@dataclasses.dataclass(frozen=True)
class Case:
    """A class of transformers with its configuration, and updates of `batch` sequences of `seq_len` tokens."""

    model: str
    config: Mapping[str, Any]
    about: str
    batch: int = 2
    "the paper says neither 1 nor 2; its printed memory is that of 2"
    seq_len: int = 1024
    rate: float = 0.1
    "one of those that the paper sweeps (section 4.1: 1e-3 to 3e-1)"

    def small(self) -> Case:
        """One block, narrow and short: to try the benchmark, not to report."""
        config = {key: SMALL.get(key, value) for key, value in self.config.items()}
        return dataclasses.replace(self, config=config, seq_len=64)


SMALL: dict[str, Any] = {
    "vocab_size": 32000,  # T5's pieces, which the text is in
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_layers": 2, "num_heads": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "attention_types": [[["global", "local"], 1]],
}  # fmt: skip
_NEO = {
    "vocab_size": 50257, "hidden_size": 2560, "num_layers": 32, "num_heads": 20, "intermediate_size": 10240,
    "attention_types": [[["global", "local"], 16]], "max_position_embeddings": 2048,
}  # fmt: skip
_LLAMA3 = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
_LLAMA2 = {
    "vocab_size": 32000, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
    "num_attention_heads": 40, "num_key_value_heads": 40, "max_position_embeddings": 4096, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
# Shapes: the models' published configurations. All weights are fresh, N(0, 0.02^2), as the paper's.
CASES = {
    # whose attention is not scaled: it diverges at the others' rate
    "gpt_neo_2_7b": Case("GPTNeo", _NEO, "GPT-Neo 2.7B", rate=1e-3),
    "llama3_8b": Case("Llama", _LLAMA3, "Llama-3 8B"),
    "llama2_13b": Case("Llama", _LLAMA2, "Llama-2 13B"),
    "llama3_8b_one": Case("Llama", _LLAMA3, "Llama-3 8B, a sequence an update", batch=1),
}
METHODS = {
    "vanilla": "torch.optim.SGD: all gradients are kept until the update",
    "sgd": "the same descent by LOMO's products and its update, behind the backward pass",
    "lomo": "each weight is updated as its gradient comes, which is then dropped",
    "neuzip": "the same, weights of linear layers packed without loss",
    "neuzip keep": "the same, what a block's recomputation decoded is kept for its backward pass",
    "neuzip fix4": "the same as neuzip, exponents in four bits",
}


class Descent(Operation):
    """Whole updates of descent (NeuZip, arXiv 2410.20650, Table 1)."""

    summary = "memory and time of descent on full-size models, on plain and on packed weights"
    measures = {
        "update": "time of an update, three a turn of a method, --repeats turns; the loss of the last of the first "
        "ones, and the hash of all weights behind it",
        "memory": "the most that is allocated in the timed updates and in those that warm up for them, with weights",
        "kernels": "what kernels of an update take by phase: decoding, encoding, products, others",
    }
    metrics = {
        "time": {"measure": ("update",)}, "memory": {}, "resident": {}, "loss": {}, "weights_hash": {},
        "bits_per_weight": {}, "kernel": {"measure": ("decoding", "encoding", "products", "others")},
    }  # fmt: skip
    numbers = ("value", "low", "high", "per_second")
    packages = ("transformers",)
    groups = {"table1": ("gpt_neo_2_7b", "llama3_8b", "llama2_13b")}
    in_turns = True
    limit = 600.0
    methods = METHODS

    @property
    def cases(self) -> Mapping[str, str]:
        return {
            name: f"{case.about}: {case.batch} x {case.seq_len} tokens an update, fresh weights in bfloat16, "
            f"{CAP:g} GiB at most"
            for name, case in CASES.items()
        }

    def defaults(self, device: str, *, for_tables: bool = False) -> Defaults:
        return Defaults("table1", "vanilla,sgd,lomo,neuzip", "update,memory", repeats=12, warmup=4, seconds=20.0)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--updates", type=whole(), default=UPDATES, help="the first ones, which are compared and not timed"
        )
        parser.add_argument("--text", default=TEXT, help=f"a text of the data registry to train on (default: {TEXT})")
        parser.add_argument("--local-data", default="", help="folder of a `local:` text")

    def options(self, given: argparse.Namespace) -> dict[str, Any]:
        from paperlm.data.registry import dataset_entry
        from paperlm.data.sources import check_present
        from paperlm.errors import PaperLMError

        try:
            if not dataset_entry(given.text)[1].trains:
                raise ValueError(f"--text {given.text}: nothing of it is to train on; name another")
            check_present(given.text, given.local_data)
        except PaperLMError as error:
            raise ValueError(f"--text: {error}") from None
        return {"updates": given.updates, "text": given.text, "local_data": given.local_data}

    def absent(self, method: str, device: str) -> str | None:
        return why_absent(device, package="transformers")

    def modules(self, method: str) -> tuple[str, ...]:
        return ("transformers.models.llama.modeling_llama", "paperlm_kernels.stored")

    def identity(self, task: Task) -> dict[str, Any]:
        from paperlm_kernels.behaviour import NEUZIP

        case = task.sized(CASES)
        shape = {"batch": case.batch, "seq_len": case.seq_len, **dict(case.config)}
        text = task.options.get("text", TEXT)
        return {
            "shape": shape,
            "rate": case.rate,
            "first_updates": task.options.get("updates", UPDATES),
            "source": f"{text} by T5's tokenizer",
            "behaviour": NEUZIP["codec"],
        }

    def run(self, task: Task) -> Generator[Row | None, bool | None, None]:
        from paperlm_kernels.bench.ops.descent.updates import rows_of

        yield from rows_of(self, task)


OPERATION = Descent()
