"""Each comparison alone: true, false, or open, at a level that is shared by all comparisons of a claim.

The sides are means over seeds. The standard error of their gap comes from the deviation of one run of each cell
(samples.Noise) and the number of seeds; from PAIRED common seeds on, from the gaps of the seeds themselves. A gap
beyond the quantile for 1 - level decides. Hashes are compared seed by seed, and differ if they do with one. Only
`div()` and cells whose own seeds end differently are uncertain in their outcome: the chance of it has the posterior
Beta(k + 1/2, n - k + 1/2) of Jeffreys' prior.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from scipy.special import betainc, ndtri, stdtrit

from paperlm.tables.claims.formula import Comparison, Key, Leaf, Outcome, Tested
from paperlm.tables.claims.samples import Cells, Estimate, Noise

ALPHA = 0.025
"Chance of a wrong `holds`, and of a wrong `fails`, that a claim is given."
PAIRED = 5
"Common seeds from which gaps of seeds say enough about themselves."
DRAWS = 20_000
TEST_LEVEL = 0.05
"Level of significant()."
MOST_SEEDS = 1000
"More are not counted."
MOST_MIXED = 6
"Cells of one comparison whose seeds end differently: 2 to this power of cases are looked at."


@dataclass(frozen=True)
class Decision:
    """What became of a comparison or an outcome."""

    truth: bool | None
    gap: float | None = None
    "of the means, left less right; None: there is none"
    detectable: float | None = None
    "smallest gap that these seeds could have decided"
    reason: str = ""
    "why it is open"
    missing: tuple[Key, ...] = ()
    "cells that were not run"
    seeds: int = 0
    "of the cell with the fewest"
    enough: int = 0
    "of an open one: seeds of each cell that would decide it if means, deviations and outcomes went on like this"

    @property
    def sharpness(self) -> float:
        """Gap over the smallest that could be decided: above 1 it is decided."""
        if self.gap is None or self.detectable is None:
            return math.inf if self.truth is not None else 0.0
        return abs(self.gap) / self.detectable if self.detectable else math.inf


class Judge:
    """Decides leaves of one claim. `level`: chance of a wrong answer in one direction; `seed`: that of the redraws."""

    def __init__(self, cells: Cells, level: float, seed: str) -> None:
        self._cells, self._level, self._seed = cells, level, seed
        self._noise = Noise(cells)
        self.decisions: dict[Leaf, Decision] = {}

    def __call__(self, leaf: Leaf) -> bool | None:
        if leaf not in self.decisions:
            self.decisions[leaf] = self._decide(leaf)
        return self.decisions[leaf].truth

    def _decide(self, leaf: Leaf) -> Decision:
        if missing := tuple(sorted(key for key in leaf.reads if key not in self._cells)):
            return Decision(None, missing=missing, reason="not run")
        if isinstance(leaf, Outcome):
            return self._outcome(leaf)
        if isinstance(leaf, Tested):
            return self._tested(leaf)
        assert isinstance(leaf, Comparison)
        if leaf.same:
            return Decision(leaf.relation in ("<=", "=="), 0.0, 0.0)
        return self._over_outcomes(leaf)

    def _outcome(self, leaf: Outcome) -> Decision:
        found = self._cells[leaf.key].diverged
        k, n = sum(found), len(found)
        truth = self._mostly(k, n)
        if truth is not None:
            return Decision(truth, seeds=n)
        reason = f"{k} of {n} runs diverged; {self._enough(0, 0)} that agree would decide"
        return Decision(None, reason=reason, seeds=n, enough=self._enough(k, n))

    def _mostly(self, k: int, n: int) -> bool | None:
        """Whether more than half of all runs would end as k of n did; None: not known."""
        above = 1 - float(betainc(k + 0.5, n - k + 0.5, 0.5))
        return True if above >= 1 - self._level else False if above <= self._level else None

    def _enough(self, k: int, n: int) -> int:
        """Runs after which an outcome is decided, if all further ones end as most have."""
        mostly = 2 * k >= n
        return next(m for m in itertools.count(n + 1) if self._mostly(k + (m - n) * mostly, m) is not None)

    def _tested(self, leaf: Tested) -> Decision:
        numbers = {key: statistics.fmean(self._cells[key].values) for key in leaf.reads}
        p, q = float(leaf.for_it.value(numbers)), float(leaf.against_it.value(numbers))
        seeds = min(len(self._cells[key].values) for key in leaf.reads)
        if min(p, q) > TEST_LEVEL:
            reason = f"neither the statement nor its opposite is significant at {TEST_LEVEL} with {seeds} seeds"
            return Decision(None, reason=reason, seeds=seeds)
        return Decision(p <= q, seeds=seeds)

    def _over_outcomes(self, leaf: Comparison) -> Decision:
        """A comparison that comes out alike for every outcome that its cells may have is decided."""
        options: dict[Key, list[bool]] = {}
        for key in leaf.reads:
            cell = self._cells[key]
            if not cell.mixed:
                options[key] = [cell.diverged[0]]
                continue
            mostly = self._mostly(sum(cell.diverged), len(cell.diverged))
            options[key] = [False, True] if mostly is None else [mostly]
        mixed = [key for key in leaf.reads if len(options[key]) > 1]
        if len(mixed) > MOST_MIXED:
            return Decision(None, reason=f"seeds of {len(mixed)} cells end differently")
        cases = []
        for outcomes in itertools.product(*options.values()):
            estimates = {k: self._noise.estimate(k, o) for k, o in zip(options, outcomes, strict=True)}
            cases.append(self._compare(leaf, estimates))
        if len({case.truth for case in cases}) == 1:
            return min(cases, key=lambda case: case.sharpness)
        usual = next(case for case in cases if case.truth is None) if any(c.truth is None for c in cases) else cases[0]
        names = ", ".join(", ".join(key[1]) if isinstance(key[1], tuple) else key[1] for key in mixed)
        outcomes = [self._cells[key].diverged for key in mixed]
        return Decision(
            None, usual.gap, usual.detectable, f"seeds of {names} end differently", seeds=usual.seeds,
            enough=max(self._enough(sum(found), len(found)) for found in outcomes),
        )  # fmt: skip

    def _compare(self, leaf: Comparison, cells: Mapping[Key, Estimate]) -> Decision:
        means = {key: cell.mean for key, cell in cells.items()}
        varying = [cell for cell in cells.values() if not cell.constant]
        seeds = min((cell.n for cell in varying), default=1)
        if any(cell.hashes for cell in cells.values()):
            return self._by_bits(leaf, cells)
        gap = float(leaf.gap(means))
        if math.isnan(gap):
            return Decision(None, reason="a number that is not finite on both sides", seeds=seeds)
        if not varying:
            return Decision(bool(leaf.holds(means)), gap, 0.0, seeds=seeds)
        if any(not cell.measured for cell in varying):
            reason = "one seed; how this number varies between seeds was not measured"
            return Decision(None, gap, reason=reason, seeds=1, enough=3)
        if math.isinf(gap):
            return Decision(bool(leaf.holds(means)), gap, seeds=seeds)
        if leaf.drawn:
            return self._redrawn(leaf, cells, gap, seeds)
        shared = sorted(set.intersection(*(set(cell.by_seed) for cell in varying)))
        if len(shared) >= PAIRED:
            gaps = [
                float(leaf.gap({k: c.mean if c.constant else c.by_seed[s] for k, c in cells.items()})) for s in shared
            ]
            gap, seeds = statistics.fmean(gaps), len(shared)
            error, freedom = statistics.stdev(gaps) / math.sqrt(seeds), seeds - 1
        else:
            error = math.sqrt(sum(self._moved(leaf, means, key, cell) ** 2 for key, cell in cells.items()))
            known = [cell.freedom for cell in varying if cell.freedom is not None]
            freedom = min(known) if known else None
        detectable = self._quantile(freedom) * error
        return self._by_gap(leaf, gap, detectable, seeds)

    def _by_bits(self, leaf: Comparison, cells: Mapping[Key, Estimate]) -> Decision:
        """Hashes are the same bits in every common seed, or are not."""
        if not all(cell.hashes for cell in cells.values()):
            return Decision(None, reason="a hash names bits: it can be compared with hashes alone")
        bits = [{seed for seed, value in cell.by_seed.items() if math.isfinite(value)} for cell in cells.values()]
        shared, most = sorted(set.intersection(*bits)), max(map(len, bits))
        if not shared:
            reason = "bits are compared seed by seed, and no seed of all cells has them"
            return Decision(None, reason=reason, seeds=most, enough=most + 1)
        found = [{key: cell.by_seed[seed] for key, cell in cells.items()} for seed in shared]
        shown = next((numbers for numbers in found if not leaf.holds(numbers)), found[0])
        return Decision(all(map(leaf.holds, found)), float(leaf.gap(shown)), 0.0, seeds=len(shared))

    def _by_gap(self, leaf: Comparison, gap: float, detectable: float, seeds: int) -> Decision:
        if abs(gap) <= detectable:
            times = (detectable / abs(gap)) ** 2 if gap else math.inf
            enough = max(seeds + 1, math.ceil(min(seeds * times, MOST_SEEDS)))
            reason = "the gap is smaller than its seeds can tell from none"
            return Decision(None, gap, detectable, reason, seeds=seeds, enough=enough)
        truth = {"==": False, "!=": True}.get(leaf.relation, gap < 0)
        return Decision(truth, gap, detectable, seeds=seeds)

    def _moved(self, leaf: Comparison, means: Mapping[Key, float], key: Key, cell: Estimate) -> float:
        """How far a standard error of one cell moves the gap."""
        if not cell.error:
            return 0.0
        up, down = (float(leaf.gap({**means, key: cell.mean + sign * cell.error})) for sign in (1, -1))
        return (up - down) / 2

    def _quantile(self, freedom: int | None) -> float:
        p = 1 - self._level
        return float(ndtri(p) if freedom is None else stdtrit(freedom, p))

    def _redrawn(self, leaf: Comparison, cells: Mapping[Key, Estimate], gap: float, seeds: int) -> Decision:
        """A rank or a fit: the share of redraws of its cells in which the comparison is true."""
        import numpy as np

        rng = np.random.default_rng(random.Random(self._seed).getrandbits(64))
        draws = {
            # Deviations that were estimated from few seeds have Student's tails.
            key: cell.mean
            + cell.error * (rng.standard_normal(DRAWS) if cell.freedom is None else rng.standard_t(cell.freedom, DRAWS))
            for key, cell in sorted(cells.items())
        }
        share = float(np.mean(leaf.holds(draws)))
        truth = True if share >= 1 - self._level else False if share <= self._level else None
        reason = "" if truth is not None else f"true in {share:.1%} of {DRAWS:,} redraws".replace("%", " %")
        return Decision(truth, gap, reason=reason, seeds=seeds, enough=0 if truth is not None else seeds + 2)
