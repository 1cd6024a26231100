"""What each kernel of the linear cross-entropy reads and writes, and how often: Figure 2 of Cut Cross-Entropy.

E (N, D) hidden states, C (V, D) classifier, q (N, V) gradient of the logits, k the share of 128 x 128 tiles that the
gradient filter keeps. `factor` is how often each element is read or written, counted at the kernel's own loads and
stores; caches serve most of the repeated reads. Tile sizes of the published kernels: apple/ml-cross-entropy at d42911f,
tl_autotune.py:460,489 and indexed_dot.py:11-85; ours: paperlm_kernels.cross_entropy.
"""

from __future__ import annotations

from dataclasses import dataclass

READ, WRITE, UPDATE = "read", "write", "update"
"update: read, added to and written back, by many programs in turn (locks or atomics)."
PUBLISHED, OURS = "published", "ours"


@dataclass(frozen=True)
class Access:
    """One tensor as one kernel uses it, over the whole kernel."""

    scheme: str
    kernel: str
    tensor: str
    mode: str
    block: str
    "what one program touches at a time"
    factor: float
    elements: int
    element_bytes: float

    @property
    def bytes(self) -> float:
        """Bytes of all its loads and stores; an update counts twice."""
        return self.elements * self.element_bytes * self.factor * (2 if self.mode == UPDATE else 1)


def accesses(tokens: int, vocab: int, width: int, alive: float) -> list[Access]:
    """Every access of the published kernels and of ours (default: lists before recomputing), 16-bit inputs."""
    n, v, d, k = tokens, vocab, width, alive
    hidden, classifier, logits = n * d, v * d, n * v
    rows: list[Access] = []

    def add(scheme: str, kernel: str, *parts: tuple[str, str, str, float, int, float]) -> None:
        rows.extend(Access(scheme, kernel, *part) for part in parts)

    add(
        PUBLISHED, "a target logit",
        ("E", READ, "128 x 256", 1, hidden, 2),
        ("C", READ, "128 gathered rows x 256", 1, hidden, 2),
        ("target logit", UPDATE, "128", d / 256, n, 4),
    )  # fmt: skip
    add(
        PUBLISHED, "b log-sum-exp",
        ("E", READ, "256 x D", v / 128, hidden, 2),
        ("C", READ, "128 x D", n / 256, classifier, 2),
        ("LSE", UPDATE, "256, under a lock", v / 128, n, 4),
        ("mean logit", UPDATE, "128, atomic", n / 256, v, 4),
    )  # fmt: skip
    add(
        PUBLISHED, "c backward",
        ("E", READ, "128 x D, again where the tile is alive", v / 128 * (1 + k), hidden, 2),
        ("C", READ, "128 x D, again where the tile is alive", n / 128 * (1 + k), classifier, 2),
        ("LSE", READ, "128", v / 128, n, 4),
        ("dE", UPDATE, "128 x 64, under a lock", k * v / 128, hidden, 2),
        ("dC", UPDATE, "128 x 64, under a lock", k * n / 128, classifier, 2),
    )  # fmt: skip
    add(
        OURS, "a+b forward",
        ("E", READ, "128 x D", v / 256, hidden, 2),
        ("C", READ, "256 x D", n / 128, classifier, 2),
        ("target logit", WRITE, "128", 1, n, 4),
        ("LSE of a strip", WRITE, "128, one owner", 2, n, 8),
        ("tile maxima", WRITE, "128 x 2", 1, logits // 128, 1),
    )  # fmt: skip
    add(
        OURS, "lists",
        ("tile maxima", READ, "128 x groups", 1, logits // 128, 1),
        ("LSE", READ, "128", 1, n, 4),
    )  # fmt: skip
    add(
        OURS, "c gradient of alive tiles",
        ("E", READ, "128 x D for two tiles", k * v / 256, hidden, 2),
        ("C", READ, "128 x D", k * n / 128, classifier, 2),
        ("q", WRITE, "128 x 128, alive only", k, logits, 2),
    )  # fmt: skip
    add(
        OURS, "d products",
        ("q", READ, "128 x 128, alive only, for dE and for dC", 2 * k * d / 256, logits, 2),
        ("E", READ, "128 x 256", k * v / 128, hidden, 2),
        ("C", READ, "128 x 256", k * n / 128, classifier, 2),
        ("dE", WRITE, "128 x 256, one owner", 1, hidden, 2),
        ("dC", WRITE, "128 x 256, one owner", 1, classifier, 2),
    )  # fmt: skip
    return rows
