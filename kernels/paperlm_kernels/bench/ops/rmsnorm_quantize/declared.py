"""What can be measured, by name. Free of torch, so that names can be checked before anything is measured."""

from __future__ import annotations

import dataclasses

from paperlm_kernels.bench.cards import BANDWIDTH
from paperlm_kernels.bench.ops.ternary_linear.declared import TOKENS, WIDTHS


@dataclasses.dataclass(frozen=True)
class Site:
    """Where in a block it stands: what is read, and the quantizer behind the norm."""

    about: str
    mode: str
    keep: float | None = None
    residual: bool = False
    glu: bool = False
    "what is normalized is up * relu(gate)^2, as wide as the feed-forward layer"


SITES = {
    "b158": Site("in front of b1.58's QKV: INT8", "int8_absmax"),
    "qkv": Site("in front of a4.8's QKV, and of gate and up: a residual added, INT4", "int4_absmean", residual=True),
    "o": Site("in front of a4.8's O: the larger half, INT8", "int8_absmax", keep=0.5),
    "down": Site("in front of a4.8's down: squared-ReLU GLU, INT8", "int8_absmax", glu=True),
}
"BitNet a4.8 (arXiv 2411.04965), sections 3.1 and 3.2."


@dataclasses.dataclass(frozen=True)
class Case:
    """A site of a model for so many tokens."""

    name: str
    about: str
    tokens: int
    width: int
    site: str

    def bytes(self) -> int:
        """That are moved: each token read in bfloat16 (twice for a GLU, or with a residual, whose sum is written too),
        its codes of a byte, filled up to a multiple of 128, its scale and the sum of its codes, and the gains.

        >>> Case("", "", 4096, 4096, "b158").bytes() == 4096 * (2 * 4096 + 4096 + 8) + 2 * 4096
        True
        """
        site = SITES[self.site]
        rows = 1 + site.glu + 2 * site.residual
        return self.tokens * (2 * self.width * rows + -(-self.width // 128) * 128 + 8) + 2 * self.width

    def floor(self, bandwidth: float = BANDWIDTH) -> float:
        """Microseconds of these bytes at a bandwidth."""
        return 1e6 * self.bytes() / bandwidth

    def listed(self) -> str:
        """One line about it."""
        return f"{self.about}: {self.tokens} tokens of {self.width}; at least {self.floor():.3g} us (H200)"

    def small(self) -> Case:
        """An eighth of each size: to try out the benchmark, not to report."""
        return dataclasses.replace(self, tokens=max(1, self.tokens // 8), width=max(8, self.width // 8))


_ON_GPU = [
    Case(f"{size}_{name}_m{tokens}", f"{size.upper()}, {site.about}", tokens, f if site.glu else d, name)
    for size, (d, f) in WIDTHS.items()
    for name, site in SITES.items()
    for tokens in TOKENS
]
_ON_CPU = [Case(f"tiny_cpu_{name}", f"a CPU's size, {site.about}", 32, 688, name) for name, site in SITES.items()]
CASES = {case.name: case for case in (*_ON_GPU, *_ON_CPU)}
GROUPS = {
    **{f"m{tokens}": tuple(case.name for case in _ON_GPU if case.tokens == tokens) for tokens in TOKENS},
    **{size: tuple(case.name for case in _ON_GPU if case.name.startswith(f"{size}_")) for size in WIDTHS},
    **{site: tuple(case.name for case in _ON_GPU if case.site == site) for site in SITES},
    "all": tuple(case.name for case in _ON_GPU),
    "cpu": tuple(case.name for case in _ON_CPU),
}
"Cases by number of tokens, size and site, all of a GPU, and those of a CPU."


METHODS = {
    "ours": "one kernel",
    "torch": "PyTorch's operations one after the other: the norm's result in bfloat16, then the quantizer",
    "torch compiled": "the same under torch.compile",
    "liger-kernel": "its RMSNorm in the place of PyTorch's",
}
"Method -> what it is."
METRICS = {"time": {"measure": ("quantize",)}, "error": {}, "determinism": {}}
"Metric of a row -> what tells its rows apart, and the values that has."
