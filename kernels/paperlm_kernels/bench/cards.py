"""What the memory of cards reaches, for floors that no kernel undercuts."""

from __future__ import annotations

COPIED = {"NVIDIA H200": 4.26e12, "NVIDIA H100 80GB HBM3": 2.97e12}
"Card -> bytes a second that a copy of 2^27 bfloat16 numbers reads and writes (operation neuzip, method copy)."


def bandwidth_of(card: str, of_h200: float) -> float | None:
    """What an operation, which counts on `of_h200` bytes a second of an H200, may count on elsewhere; None where no
    copy was measured.

    >>> bandwidth_of("NVIDIA H200", 4.3e12), bandwidth_of("another", 4.3e12)
    (4300000000000.0, None)
    """
    return of_h200 * COPIED[card] / COPIED["NVIDIA H200"] if card in COPIED else None
