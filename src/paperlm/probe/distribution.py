"""How the numbers that enter the projections are distributed, as they are and quantized (BitNet a4.8, Figures 2, 3).

Two passes: the first finds moments and the range of the bins, the second counts. Sums are float64, of float32 numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from paperlm.probe.inputs import GATE, PLACES, visited_inputs
from paperlm.quantizers.scheme import InputQuantizer
from paperlm.quantizers.topk import largest_entries

NEAR = 0.1
"Of the root mean square: what counts as near zero."
COARSE = 2**15
"Magnitudes by the upper 16 bits of float32 without the sign: 128 steps for each power of two."

Batches = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"Batches of ids and mask (B, S), anew at each call."


@dataclass(frozen=True)
class Histogram:
    """Equal bins over -edge to edge; numbers beyond are in none of them."""

    edge: float
    counts: np.ndarray
    numbers: int
    "all of them, those beyond the bins too"

    @property
    def edges(self) -> np.ndarray:
        """One more than there are bins."""
        return np.linspace(-self.edge, self.edge, len(self.counts) + 1)


@dataclass(frozen=True)
class Distributions:
    """Histograms, and for each name sums by sequence that its statistics follow from."""

    histograms: dict[tuple[str, int], Histogram]
    "name and block (0: all of them)"
    moments: dict[str, np.ndarray]
    "place -> (N, 6): numbers, sums of x, x^2, x^3, x^4, numbers near zero"
    quantized: dict[str, np.ndarray]
    "quantizer -> (N, 5): numbers, zeros, sums of squares, of squared errors, of squares of what is left in"
    tokens: int


@torch.no_grad()
def distributions(
    model: nn.Module,
    batches: Batches,
    bins: int,
    within: float,
    block: int,
    tried: Mapping[str, InputQuantizer],
    at: str,
) -> Distributions:
    """Of the inputs of all places, all blocks pooled and of one `block` (from 1), and of the quantizers `tried` on the
    inputs at place `at`. Bins reach to the magnitude that `within` (a share) of the numbers do not exceed."""
    first = _Pass(model)
    coarse = {place: torch.zeros(COARSE, dtype=torch.int64) for place in PLACES}
    powers: dict[str, list[np.ndarray]] = {place: [] for place in PLACES}

    def look(index: int, place: str, x: Tensor, real: Tensor) -> None:
        bits = (x[real].abs().view(torch.int32) >> 16).flatten()
        coarse[place] += torch.bincount(bits, minlength=COARSE).cpu()
        double = x.double() * real[..., None]
        sums = [real.sum(-1) * x.shape[-1], *(double.pow(power).sum((-2, -1)) for power in (1, 2, 3, 4))]
        first.add(powers[place], index, torch.stack([part.double() for part in sums], -1))

    tokens = first.run(batches(), look)
    edges = {place: _reached(counts, within) for place, counts in coarse.items()}
    sums = {place: np.concatenate(parts) for place, parts in powers.items()}
    near = {place: NEAR * float(np.sqrt(s[:, 2].sum() / s[:, 0].sum())) for place, s in sums.items()}

    second = _Pass(model)
    counts = {(place, b): torch.zeros(bins, dtype=torch.int64) for place in PLACES for b in (0, block)}
    counts |= {(name, 0): torch.zeros(bins, dtype=torch.int64) for name in tried}
    close: dict[str, list[np.ndarray]] = {place: [] for place in PLACES}
    errors: dict[str, list[np.ndarray]] = {name: [] for name in tried}

    def count(index: int, place: str, x: Tensor, real: Tensor) -> None:
        binned = _binned(x[real], edges[place], bins)
        counts[place, 0] += binned
        if index + 1 == block:
            counts[place, block] += binned
        second.add(close[place], index, ((x.abs() < near[place]).sum(-1) * real).sum(-1, keepdim=True).double())
        for name, described in tried.items() if place == at else ():
            kept = described.kept(x.shape[-1], name)
            entering = x if kept is None else x * largest_entries(x, kept)
            codes, step = described.quantizer.codes_and_step(entering)
            value = codes * step
            counts[name, 0] += _binned(value[real], edges[place], bins)
            wide = [t.double() * real[..., None] for t in (x, value - x, entering)]
            squares = [t.square().sum((-2, -1)) for t in wide]
            zeros = ((codes == 0).sum(-1) * real).sum(-1).double()
            numbers = real.sum(-1).double() * x.shape[-1]
            second.add(errors[name], index, torch.stack([numbers, zeros, *squares], -1))

    second.run(batches(), count)
    histograms = {}
    for (name, of_block), found in counts.items():
        place = name if name in PLACES else at
        numbers = int(sums[place][:, 0].sum()) // (first.blocks if of_block else 1)
        histograms[name, of_block] = Histogram(edges[place], found.numpy(), numbers)
    return Distributions(
        histograms=histograms,
        moments={place: np.concatenate([sums[place], np.concatenate(close[place])], 1) for place in PLACES},
        quantized={name: np.concatenate(parts) for name, parts in errors.items()},
        tokens=tokens,
    )


class _Pass:
    """One pass over the text; `add` collects sums by sequence, over the blocks."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.blocks = model, 0

    def run(self, batches: Iterable[tuple[Tensor, Tensor]], look: Callable[[int, str, Tensor, Tensor], None]) -> int:
        base, here, tokens = getattr(self.model, "base_model", self.model), {}, 0

        def visit(index: int, place: str, x: Tensor, codes: Tensor | None) -> None:
            if place != GATE:
                look(index, place, x.float(), here["real"])

        with visited_inputs(self.model, visit) as self.blocks:
            for ids, mask in batches:
                here["real"] = mask.bool()
                base(input_ids=ids, attention_mask=mask, use_cache=False)
                tokens += int(mask.sum())
        return tokens

    @staticmethod
    def add(parts: list[np.ndarray], index: int, sums: Tensor) -> None:
        """(B, ...) of block `index`; the first block of a batch begins a new part."""
        if index == 0:
            parts.append(sums.cpu().numpy())
        else:
            parts[-1] = parts[-1] + sums.cpu().numpy()


def _reached(coarse: Tensor, within: float) -> float:
    """The magnitude that a share of the numbers does not exceed, rounded up to the next of COARSE; 1 if all are 0."""
    share = coarse.cumsum(0).double() / coarse.sum()
    index = int((share >= within).nonzero()[0])
    edge = float(torch.tensor((index + 1) << 16, dtype=torch.int32).view(torch.float32)) if index else 0.0
    return edge or 1.0


def _binned(values: Tensor, edge: float, bins: int) -> Tensor:
    return torch.histc(values.float().cpu(), bins=bins, min=-edge, max=edge).to(torch.int64)


def moment_statistics(sums: np.ndarray) -> dict[str, float]:
    """Of sums over numbers (6 of them, see Distributions): root mean square, excess kurtosis, share near zero."""
    numbers, one, two, three, four, near = sums.tolist()
    mean = one / numbers
    variance = two / numbers - mean**2
    fourth = four / numbers - 4 * mean * three / numbers + 6 * mean**2 * two / numbers - 3 * mean**4
    kurtosis = fourth / variance**2 - 3 if variance else 0.0
    return {"rms": (two / numbers) ** 0.5, "kurtosis": kurtosis, "near_zero": near / numbers}


def quantized_statistics(sums: np.ndarray) -> dict[str, float]:
    """Of sums over numbers (5 of them): share of zeros, squared error over square, square that is left in over all."""
    numbers, zeros, squares, errors, kept = sums.tolist()
    squares = squares or 1.0
    return {"zeros": zeros / numbers, "relative_error": errors / squares, "square_kept": kept / squares}
