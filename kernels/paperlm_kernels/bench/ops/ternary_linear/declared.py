"""What can be measured, by name. Free of torch, so that names can be checked before anything is measured."""

from __future__ import annotations

import dataclasses

from paperlm_kernels.bench.cards import BANDWIDTH

BF16, INT8 = 790e12, 1580e12
"Operations a second of large products: cuBLAS measured on random data, and twice that."
WIDTHS = {"700m": (1536, 4096), "1.3b": (2048, 5460), "3b": (3200, 8640), "7b": (4096, 11008)}
"Size -> width, and that of the feed-forward layer (BitNet a4.8, Table 6)."
TOKENS = (1, 16, 256, 4096)


@dataclasses.dataclass(frozen=True)
class Case:
    """A matrix (rows, columns) for so many tokens."""

    name: str
    about: str
    tokens: int
    rows: int
    columns: int

    def limits(self, bits: float, bandwidth: float = BANDWIDTH) -> dict[str, float]:
        """Microseconds of what a product with weights of so many bits needs: the bytes of weights, input and bfloat16
        output at a bandwidth, and the operations. 16: bfloat16 input; less: input in a byte, products of bytes."""
        M, N, K = self.tokens, self.rows, self.columns
        moved = N * K * bits / 8 + M * K * (2 if bits == 16 else 1) + 2 * M * N
        return {"bytes": 1e6 * moved / bandwidth, "operations": 1e6 * 2 * M * N * K / (BF16 if bits == 16 else INT8)}

    def floor(self, bits: float, bandwidth: float = BANDWIDTH) -> float:
        """Microseconds that none undercuts: the longer of both."""
        return max(self.limits(bits, bandwidth).values())

    def listed(self) -> str:
        """One line about it."""
        return (
            f"{self.about}: {self.tokens} tokens x {self.rows} x {self.columns}; at least {self.floor(2):.3g} us in 2 "
            f"bits, {self.floor(8):.3g} in 8, {self.floor(16):.3g} in 16 (H200)"
        )

    def small(self) -> Case:
        """An eighth of each size: to try out the benchmark, not to report."""
        sizes = {key: max(8, getattr(self, key) // 8) for key in ("rows", "columns")}
        return dataclasses.replace(self, tokens=max(1, self.tokens // 8), **sizes)


def _cases() -> list[Case]:
    found = []
    for size, (d, f) in WIDTHS.items():
        matrices = {"qkv": (3 * d, d), "o": (d, d), "gate_up": (2 * f, d), "down": (d, f)}
        for matrix, (rows, columns) in matrices.items():
            for tokens in TOKENS:
                name = f"{size}_{matrix}_m{tokens}"
                found.append(Case(name, f"{size.upper()}, {matrix}", tokens, rows, columns))
    return found


_ON_GPU = _cases()
_ON_CPU = [Case(f"tiny_cpu_m{tokens}", "a CPU's size", tokens, 384, 688) for tokens in (1, 16)]
CASES = {case.name: case for case in (*_ON_GPU, *_ON_CPU)}
GROUPS = {
    **{f"m{tokens}": tuple(case.name for case in _ON_GPU if case.tokens == tokens) for tokens in TOKENS},
    **{size: tuple(case.name for case in _ON_GPU if case.name.startswith(f"{size}_")) for size in WIDTHS},
    "all": tuple(case.name for case in _ON_GPU),
    "cpu": tuple(case.name for case in _ON_CPU),
}
"Cases by number of tokens and by size, all of a GPU, and those of a CPU."


METHODS = {
    "ours": "ternary weights in two bits, int8 input",
    "ours_int4": "the same with input of 4 bits, int4_absmean, in a byte each: Hopper multiplies no 4-bit numbers",
    "ours_sparse": "the same, half of the input zeros (TopK): only the other half's weights are read; up to 4 tokens",
    "ours_int8": "our kernel with weights in a byte each",
    "torch": "bfloat16 weights and input by cuBLAS",
    "torch int_mm": "torch._int_mm, int8 weights; more than 16 tokens and multiples of 8 only",
    "torch unpacked": "two bits unpacked to bfloat16 before each product: the floor",
    "gemlite": "A8W158_INT_dynamic, weights in two bits",
    "gemlite max": "the same, the longest of its lists of tiles tried",
    "torchao": "scaled_int8_mm of its quantized training, int8 weights",
    "quack-kernels": "W4A8 on Hopper: 4-bit weights, 8-bit floating point input",
    "bitblas": "int8 x int2",
}
"Method -> what it is."
METRICS = {"time": {"measure": ("product", "layer")}, "error": {}, "determinism": {}}
"Metric of a row -> what tells its rows apart, and the values that has."
