"""Tokens a second of decoding BitNet a4.8's shapes end to end: packed weights against bfloat16 ones.

Ours has weights in two bits and keys and values as they are, in four bits or in three; the peer is transformers' LLaMA
of the same shape with a static cache, one whose heads are filled up to a multiple of 8, and that one compiled. Every
sequence has `context` positions behind it when the clock starts, and a token is one CUDA graph, the likeliest next one
included, for all. Weights are random: a token takes as long with others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Mapping
from typing import Any

from paperlm_kernels.bench.operation import Defaults, Operation, Row, Task
from paperlm_kernels.bench.peers import label, why_absent

from paperlm.models.sizes import SIZES, Size

PEER, PEER_PADDED, PEER_COMPILED = "transformers", "transformers padded", "transformers compiled"
PRESET = "a48_int4"
METHODS = {
    "ours": "weights in two bits, keys and values in bfloat16",
    "ours_kv4": "the same, keys and values in four bits",
    "ours_kv3": "the same, keys and values in three bits",
    PEER: "its LlamaForCausalLM in bfloat16, static cache, SDPA attention",
    PEER_PADDED: "the same, heads of the next multiple of 8, for which SDPA has a fast form",
    PEER_COMPILED: "that one, compiled by torch.compile",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """`batch` sequences of `context` positions, which `tokens` more are decoded behind at a time."""

    size: Size
    batch: int
    context: int = 2048
    tokens: int = 64
    vocab: int = 32_000
    dtype: str = "bfloat16"

    @property
    def capacity(self) -> int:
        """Positions of the caches."""
        return self.context + self.tokens

    def small(self) -> Case:
        """A block, narrow and short: to try the benchmark, not to report."""
        return dataclasses.replace(self, size=_TINY, batch=min(2, self.batch), context=12, tokens=12, vocab=1024)


_TINY = Size(80, 176, 4, 2, 0, "to try the benchmark: heads of 20, which are filled up as 3B's 100 are")
CASES = {
    f"{name}_b{batch}": Case(SIZES[f"bitnet_{name}"], batch)
    for name in ("3B", "700M", "1.3B", "7B")
    for batch in (1, 16)
}


class Decode(Operation):
    """Decoding end to end."""

    summary = "tokens a second of decoding with packed weights and caches, against bfloat16"
    measures = {
        "decode": "tokens a second of all sequences together",
        "memory": "what weights and caches take",
        "kernels": "time of each kernel of a token",
    }
    metrics = {"throughput": {"measure": ("decode",)}, "memory": {}, "kernel": {}}
    methods = METHODS
    packages = (PEER,)
    groups = {"3B": ("3B_b1", "3B_b16")}
    limit = 300.0

    @property
    def cases(self) -> Mapping[str, str]:
        return {
            name: f"BitNet {name.split('_')[0]}, width {case.size.hidden_size}, {case.size.n_layers} blocks: "
            f"{case.batch} sequences of {case.context} positions, {case.tokens} tokens behind them"
            for name, case in CASES.items()
        }

    def defaults(self, device: str, *, for_tables: bool = False) -> Defaults:
        return Defaults("3B", ",".join(METHODS), "decode,memory", repeats=20, warmup=1, seconds=4.0)

    def absent(self, method: str, device: str) -> str | None:
        if method == PEER_COMPILED and device == "cpu":
            return "it is compiled for a GPU"
        return why_absent(device, package=PEER)

    def label(self, method: str) -> str:
        return label(method, PEER if method.startswith(PEER) else None)

    def modules(self, method: str) -> tuple[str, ...]:
        if method.startswith(PEER):
            return ("transformers.models.llama.modeling_llama",)
        return ("paperlm.models.decoding",)

    def identity(self, task: Task) -> dict[str, Any]:
        from paperlm_kernels.behaviour import BITNET

        case = task.sized(CASES)
        shape = {name: getattr(case, name) for name in ("batch", "context", "tokens", "vocab", "dtype")}
        size = {name: getattr(case.size, name) for name in ("hidden_size", "intermediate_size", "n_heads", "n_layers")}
        return {"shape": shape | size, "source": "synthetic", "behaviour": dict(BITNET)}

    def run(self, task: Task) -> Generator[Row | None, bool | None, None]:
        from paperlm_kernels.bench.ops.decode.sides import rows_of

        yield from rows_of(self, task)


OPERATION = Decode()
