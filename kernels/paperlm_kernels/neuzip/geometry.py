"""How weights lie in blocks and lanes, and the profiles that choose it."""

from __future__ import annotations

import dataclasses
import difflib

import numpy as np
from numpy.typing import NDArray

LANES = 128
"Streams of a block, each read by a thread of its own."
OCTET = 8
"Weights that a lane decodes in a row."
MOST_UNITS = 255
"A lane's size is a byte."
OCTETS = (8, 16, 32, 64, 128)


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Octets of a lane, and the longest code in bits.

    The weight at place p of a block belongs to lane (p // 8) % 128: a step of all lanes covers 1,024 neighbours.
    """

    octets: int
    limit: int
    lanes: int = LANES

    @property
    def block(self) -> int:
        """Weights of a block."""
        return self.lanes * self.octets * OCTET

    @property
    def unit(self) -> int:
        """Bits to whose multiples a lane's stream is padded: small, as far as a lane's size stays a byte."""
        return 8 if self.octets <= 32 else 16

    def words(self, units: NDArray[np.uint8]) -> NDArray[np.int64]:
        """32-bit words of each block, from the units of its lanes (blocks, lanes)."""
        return -(-units.sum(axis=1, dtype=np.int64) * self.unit // 32)

    @property
    def guard(self) -> int:
        """Words of zeros behind the payload: what a lane of damaged codes can read beyond its end."""
        return -(-self.octets * (OCTET // 2) * self.limit // 32) + 2

    def blocks(self, count: int) -> int:
        """Blocks of so many weights."""
        return -(-count // self.block)


PROFILES = {
    "default": Geometry(16, 12),
    "dense": Geometry(128, 12),
    "fast": Geometry(8, 11),
    "fix4": Geometry(16, 4),
}
"""default: 128 weights a lane; dense: 1,024, smallest; fast: 64 and a table of half the size, decodes fastest of them;
fix4: exponents in 4 bits without a code, 12 bits a weight and more."""


def profile_of(name: str) -> Geometry:
    """Raises ValueError for an unknown profile."""
    if name not in PROFILES:
        near = difflib.get_close_matches(str(name), PROFILES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise ValueError(f"unknown profile {name!r}{hint} known: {', '.join(PROFILES)}")
    return PROFILES[name]
