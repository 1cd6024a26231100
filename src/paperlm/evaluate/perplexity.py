"""Validation perplexity: token-weighted, and the means that the authors' codes average."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ValidationLosses:
    """Summed next-token losses and their number, one entry per validation example (float64, int64)."""

    sums: np.ndarray
    counts: np.ndarray

    def loss_true(self) -> float:
        """Token-weighted mean loss in nats."""
        return float(self.sums.sum() / self.counts.sum())

    def loss_batches(self, batch: int) -> float:
        """Mean over batches of `batch` examples of the batch's mean loss, as the authors average it."""
        starts = np.arange(0, len(self.sums), batch)
        means = np.add.reduceat(self.sums, starts) / np.add.reduceat(self.counts, starts)
        return float(means.mean())

    def loss_word(self, words: int) -> float:
        """Nats a word: each example's mean loss times its length, the first token, which nothing predicts, included, by
        the words of the text. As NeuZip's program counts (train_clm.py:518, 765-797)."""
        counted = self.counts > 0
        sums, counts = self.sums[counted], self.counts[counted]
        return float((sums / counts * (counts + 1)).sum()) / words

    def ppl_sequences(self) -> float | None:
        """Mean over sequences of exp(mean loss of the sequence), or None where that is no finite number.

        What the code of Cut Cross-Entropy reports as perplexity; never below exp(loss_true) of equally long sequences.
        """
        counted = self.counts > 0
        with np.errstate(over="ignore"):
            value = float(np.exp(self.sums[counted] / self.counts[counted]).mean())
        return value if math.isfinite(value) else None


def perplexity(loss: float) -> float | None:
    """exp(loss), or None where that is no finite number."""
    value = math.exp(loss) if loss < 700 else math.inf  # exp overflows at 709
    return value if math.isfinite(value) else None
