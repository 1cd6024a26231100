"""What a codec of weights is asked for, and the weights."""

from __future__ import annotations

import abc
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from paperlm_kernels.bench.declared import Contender
from paperlm_kernels.bench.ops.neuzip.checkpoint import digest, weights_of
from paperlm_kernels.bench.ops.neuzip.declared import Case
from paperlm_kernels.bench.peers import AbsentError

Call = Callable[[], Any]
SCALE = 0.02
COLUMNS = 8192
"Of the matrix that is multiplied with tokens."
TOKENS = {"gemv": 1, "gemv2": 2, "gemv4": 4, "gemv8": 8, "gemv16": 16}
"Part -> tokens."
FILE_PARTS = ("pack_file", "unpack_file")
"""Of a coder with methods of these names, from the file of a path to that of another (`on_file`)."""


class Inputs:
    """Weights N(0, 0.02^2) in bfloat16, as in the paper's Figure 5, 0.02 times Student's t, or the first of a file."""

    def __init__(self, case: Case, device: torch.device, seed: int, file: str | None = None, sha256: str = "") -> None:
        """`sha256`: of the weights of `file` (`digest`). Raises ValueError where they have another one."""
        g = torch.Generator(device).manual_seed(seed)
        self.case, self.device = case, device
        if file is not None:
            weights = weights_of(Path(file), case.weights)
            if (found := digest(weights)) != sha256:
                raise ValueError(
                    f"{Path(file).name} has changed since the call began: the sha256 of its first {case.weights:,} "
                    f"weights was {sha256} and is {found}; measure again, with a file that stays as it is"
                )
            self.weights = weights.to(device)
        else:
            self.weights = torch.empty(case.weights, dtype=torch.bfloat16, device=device)
            for part in self.weights.split(2**24):  # never the whole in float32
                part.copy_(_drawn(case, len(part), g) * SCALE)
        self.tokens = torch.randn(max(TOKENS.values()), COLUMNS, generator=g, device=device).bfloat16()


def _drawn(case: Case, count: int, g: torch.Generator) -> Tensor:
    normal = torch.randn(count, generator=g, device=g.device)
    if case.degrees is None:
        return normal
    squares = sum(torch.randn(count, generator=g, device=g.device).square() for _ in range(case.degrees))
    return normal * (case.degrees / squares).sqrt()  # Student's t is defined as this


class Coder(Contender):
    """A codec. `stored` is what it keeps; `bits` of a weight in it are known once it is there."""

    parts: ClassVar[tuple[str, ...]] = ("decode", "encode")
    bits: float = 16.0
    lossless: ClassVar[bool] = True
    "what it decodes must be the weights, bit for bit"

    @abc.abstractmethod
    def stored(self) -> Any:
        """The weights, coded; a new copy."""

    @abc.abstractmethod
    def decode(self, stored: Any, out: Tensor) -> Tensor:
        """The weights, in `out` where it can write there."""

    def bits_of(self, stored: Any) -> float:
        """Bits of a weight in what is stored."""
        return self.bits

    def call(self, part: str) -> Call:
        if part == "encode":
            return self.stored
        stored, out = self.stored(), torch.empty_like(self.inputs.weights)
        return lambda: self.decode(stored, out)

    def matrix(self) -> Tensor:
        """The weights in rows of COLUMNS. Raises AbsentError where that does not go."""
        if self.case.weights % COLUMNS:
            raise AbsentError(f"{self.case.weights} weights are no rows of {COLUMNS}")
        return self.inputs.weights.view(-1, COLUMNS)

    def truth(self) -> Tensor:
        return self.inputs.weights
