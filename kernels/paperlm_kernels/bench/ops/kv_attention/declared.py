"""What can be measured, by name. Free of torch, so that names can be checked before anything is measured."""

from __future__ import annotations

import dataclasses

from paperlm_kernels.bench.cards import BANDWIDTH

HEADS = {"700m": (24, 64), "1.3b": (32, 64), "3b": (32, 100), "7b": (32, 128)}
"Size -> heads and their numbers (BitNet a4.8, Table 6)."


@dataclasses.dataclass(frozen=True)
class Case:
    """One layer's cache of `batch` sequences of `context` positions, and a query for each."""

    name: str
    about: str
    batch: int
    context: int
    heads: int
    head_dim: int

    def token_bytes(self, bits: int) -> int:
        """Of a position's keys and values in this layer, with float16 steps where they are quantized.

        >>> [Case("", "", 1, 1, 32, 128).token_bytes(bits) for bits in (16, 4, 3)]
        [16384, 4224, 3200]
        """
        D = self.head_dim
        row = {16: 2 * D, 4: D // 2 + 2, 3: D // 4 + -(-D // 8) + 2}[bits]
        return 2 * self.heads * row

    def floor(self, bits: int, bandwidth: float = BANDWIDTH) -> float:
        """Microseconds of reading the cache at a bandwidth."""
        return 1e6 * self.batch * self.context * self.token_bytes(bits) / bandwidth

    def listed(self) -> str:
        """One line about it."""
        return (
            f"{self.about}: {self.batch} x {self.context} positions, {self.heads} heads of {self.head_dim}; at least "
            f"{self.floor(3):.3g} us in 3 bits, {self.floor(4):.3g} in 4, {self.floor(16):.3g} in 16 (H200)"
        )

    def small(self) -> Case:
        """An eighth of the context: to try out the benchmark, not to report."""
        return dataclasses.replace(self, context=max(2, self.context // 8))


_ON_GPU = [
    Case(f"{size}_b{batch}_c{context}", size.upper(), batch, context, *heads)
    for size, heads in HEADS.items()
    for batch in (1, 16)
    for context in (2048, 4096, 8192)
]
_ON_CPU = [Case("tiny_cpu", "a CPU's size", 2, 128, 4, 64)]
CASES = {case.name: case for case in (*_ON_GPU, *_ON_CPU)}
GROUPS = {
    **{size: tuple(case.name for case in _ON_GPU if case.name.startswith(f"{size}_")) for size in HEADS},
    **{f"b{batch}": tuple(case.name for case in _ON_GPU if case.batch == batch) for batch in (1, 16)},
    "all": tuple(case.name for case in _ON_GPU),
    "cpu": tuple(case.name for case in _ON_CPU),
}
"Cases by size and by batch, all of a GPU, and those of a CPU."


METHODS = {
    "ours_4bit": "keys and values in 4 bits",
    "ours_3bit": "in 3 bits, position 0 in 4",
    "ours_3bit_q4": "the same, the query in 4 bits",
    "torch": "bfloat16, scaled_dot_product_attention",
    "torch padded": "the same, heads of 100 filled up to 104, for which it has a fast form",
    "flash-attn": "bfloat16, flash_attn_with_kvcache",
    "flashinfer-python": "bfloat16, a decode of each sequence; batch 1",
}
"Method -> what it is."
METRICS = {"time": {"measure": ("decode", "append")}, "error": {}, "determinism": {}, "bytes_per_token": {}}
"Metric of a row -> what tells its rows apart, and the values that has."
