"""When a curve of finite losses counts as diverged: the published rule at its numbers, and what claims make of it."""

from __future__ import annotations

import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paperlm.errors import SpecError
from paperlm.figures.divergence import Rise
from paperlm.figures.options import options_class, options_of
from paperlm.figures.series_curves import END, curve_samples
from paperlm.load import parse
from paperlm.plan.project import Project
from paperlm.result import Series
from paperlm.tables.claims import judge

UPDATES = 25_000
RULE = Rise(rise=0.5, window="1/125", lasting="1/50")
"Of 25,000 updates: a mean of 200, above its smallest by 0.5 nat, for 500."


def falling(updates: int = UPDATES) -> np.ndarray:
    return 3 + 5 * np.exp(-np.arange(updates) / 2000)


def lifted(start: int, length: int, by: float) -> np.ndarray:
    """A curve that jumps up at an update and back down after so many."""
    losses = falling()
    losses[start : start + length] = losses[start] + by
    return losses


def holds(losses: Any, rule: Rise = RULE, step: int = 1) -> bool:
    losses = [float(x) for x in losses]
    return rule.holds(range(step, step * len(losses) + 1, step), losses, step * len(losses))


def by_hand(losses: np.ndarray, window: int, rise: float, lasting: int) -> bool:
    """The rule's sentence as a loop."""
    smallest, since = math.inf, None
    for t in range(window, len(losses) + 1):
        mean = losses[t - window : t].mean()
        smallest = min(smallest, mean)
        if mean <= smallest + rise:
            since = None
        else:
            since = t if since is None else since
            if t - since + 1 >= lasting:
                return True
    return False


@pytest.mark.parametrize(
    ("losses", "truth"),
    [
        (falling(), False),
        (lifted(15_000, 10_000, 1.0), True),
        (lifted(15_000, 10_000, 0.45), False),
        (lifted(15_000, 400, 2.0), False),
        (lifted(15_000, 800, 2.0), True),
        (lifted(24_700, 300, 5.0), False),
        (falling() + np.random.default_rng(0).normal(0, 0.4, UPDATES), False),
    ],
    ids=["falls", "stays up", "rises little", "comes back", "comes back late", "ends first", "noise"],
)
def test_a_curve_diverges_when_its_mean_stays_above_its_smallest_for_long_enough(losses, truth):
    assert holds(losses) == by_hand(losses, 200, 0.5, 500) == truth


@pytest.mark.parametrize("length", [*range(330, 420, 10), 600])
def test_the_updates_that_it_has_to_last_are_counted_as_the_loop_counts_them(length):
    losses = lifted(15_000, length, 2.0)
    assert holds(losses) == by_hand(losses, 200, 0.5, 500)


def test_a_curve_of_means_over_bins_is_judged_like_the_curve_of_every_update():
    for losses in (falling(), lifted(15_000, 10_000, 1.0), lifted(15_000, 1200, 2.0), lifted(15_000, 300, 2.0)):
        bins = losses.reshape(-1, 50).mean(1)
        assert holds(bins, step=50) == holds(losses)


def test_a_shorter_run_has_the_rule_by_shares():
    losses = np.concatenate([np.linspace(7, 4, 500), np.full(400, 5.0)])
    assert holds(losses) and not holds(losses, Rise(rise=1.5, window="1/125", lasting="1/50"))
    assert holds(losses, Rise(rise=0.5, window="1/125", lasting="43/100"))
    assert not holds(losses, Rise(rise=0.5, window="1/125", lasting="9/20"))


@pytest.mark.parametrize("name", ["bitnet_figure4", "bitnet_figure5", "bitnet_figure6"])
def test_the_figures_of_bitnet_have_the_rule_by_its_numbers_at_scale_paper(name):
    """A mean of 200 updates, above its smallest by 0.5 nat, for 500, whatever the runs' length."""
    project = Project({"scale": "paper"})
    rule = Rise(**options_of(project, name)["diverged"])
    (updates,) = {cell.jobs[0].steps for cell in project.cells(name)}
    assert (Fraction(rule.window) * updates, rule.rise, Fraction(rule.lasting) * updates) == (200, 0.5, 500)


def test_a_curve_without_points_has_not_diverged():
    assert not RULE.holds([], [], 0)


# -- in a figure ----

OPTIONS = {
    "series": "train", "x": "tokens", "y": "loss", "window": 2, "reference": "A", "since": "1/2", "noise": "log",
    "diverged": RULE.model_dump(),
}  # fmt: skip


def record(losses: np.ndarray, seed: int = 0, outcome: str = "trained") -> Any:
    rows = [[n + 1, 10 * (n + 1), None if math.isnan(x) else float(x)] for n, x in enumerate(losses)]
    series = {"train": Series(columns=["update", "tokens", "loss"], rows=rows)}
    return SimpleNamespace(job={"of": {"kind": "pretrain", "seed": seed}}, outcome=outcome, series=series)


def test_a_claim_reads_the_outcome_by_the_figures_rule_and_a_loss_that_is_no_number_as_well():
    broken = falling(900)
    broken[-1] = math.nan
    up = np.concatenate([np.linspace(7, 4, 500), np.full(400, 5.0)])
    found = {
        "A": (record(falling(900)),),
        "up": (record(up, 0), record(up, 1), record(up, 2), record(up, 3)),
        "no number": (record(broken, outcome="not_finite"),),
    }
    samples = curve_samples(found, OPTIONS, 0.01)
    assert samples["A", END].diverged == (False,) and samples["no number", END].diverged == (True,)
    assert samples["up", END].diverged == (True,) * 4 and samples["up", END].seeds == (0, 1, 2, 3)
    cells = {("F", key): sample for key, sample in samples.items()}
    assert judge("div(F['up','End'])", cells, {"F": {}}).verdict == "holds"
    plain = curve_samples(found, OPTIONS | {"diverged": None}, 0.01)
    assert plain["up", END].diverged == (False,) * 4 and plain["no number", END].diverged == (True,)


@pytest.mark.parametrize(
    "changes", [{"rise": 0}, {"window": 200}, {"window": "1/0"}, {"lasting": "half"}, {"last": "1/50"}], ids=str
)
def test_a_rule_that_says_nothing_is_refused_with_its_place(changes):
    options = {"series": "train", "x": "tokens", "y": "loss", "label": "loss", "window": 1}
    with pytest.raises(SpecError, match=rf"options.*diverged.*{next(iter(changes))}"):
        parse(options | {"diverged": RULE.model_dump() | changes}, options_class("series_curves"), "figures.f.options")
    kept = parse(options | {"diverged": RULE.model_dump()}, options_class("series_curves"), "figures.f.options")
    assert kept.reads() == {"train": ("tokens", "loss", "update")}
