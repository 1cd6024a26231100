"""What the memory of cards reaches, for floors that no kernel undercuts."""

from __future__ import annotations

BANDWIDTH = 4.3e12
"Bytes a second of an H200 that floors of models in few bits count on."
COPIED = {"NVIDIA H200": 4.13e12, "NVIDIA H100 80GB HBM3": 2.97e12}
"""Card -> bytes a second, read and written, of PyTorch's copy of 2^27 bfloat16 numbers (operation neuzip, method copy,
measure decode: 130.0 microseconds, in a row that was replaced since, and 180.7)."""


def bandwidth_of(card: str, of_h200: float) -> float | None:
    """What an operation that counts on `of_h200` bytes a second of an H200 counts on elsewhere: less, as copies are
    slower there; None where no copy was measured.

    >>> bandwidth_of("NVIDIA H200", 4.3e12), bandwidth_of("another", 4.3e12)
    (4300000000000.0, None)
    """
    return of_h200 * COPIED[card] / COPIED["NVIDIA H200"] if card in COPIED else None
