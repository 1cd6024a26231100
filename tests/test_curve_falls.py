"""How far a training curve falls where its rate and weight decay change."""

from __future__ import annotations

import math
import random

import pytest
from support_bitnet_exhibits import jobs
from support_tables import record_of

from paperlm.figures.fall import Change
from paperlm.figures.series_curves import END, FALL, curve_samples, curve_statistics
from paperlm.result import Series

HALF = Change(at="1/2", within="1/10")
X = list(range(1, 101))


def test_a_fall_is_the_difference_of_the_means_on_both_sides_of_the_change():
    step = [4.0 if place <= 50 else 3.0 for place in X]
    assert HALF.fall(X, step).size == 1.0
    line = [5 - place / 100 for place in X]  # ten points on each side, ten apart
    size, deviation = HALF.fall(X, line)
    assert size == pytest.approx(0.1) and deviation == pytest.approx(0, abs=1e-12), "a line is no noise"
    rises = [3.0 if place <= 50 else 4.0 for place in X]
    assert HALF.fall(X, rises).size == -1.0


def test_its_deviation_is_that_of_falls_of_the_same_line_with_fresh_noise():
    rng, found = random.Random(0), []
    for _ in range(400):
        found.append(HALF.fall(X, [5 - place / 100 + rng.gauss(0, 0.2) for place in X]))
    sizes = [fall.size for fall in found]
    mean = sum(sizes) / len(sizes)
    seen = math.sqrt(sum((size - mean) ** 2 for size in sizes) / (len(sizes) - 1))
    assert sum(fall.deviation for fall in found) / len(found) == pytest.approx(seen, rel=0.1)
    assert seen == pytest.approx(0.2 * math.sqrt(2 / 10), rel=0.1)


@pytest.mark.parametrize("lost", [None, math.nan, math.inf])
def test_a_curve_with_a_point_that_is_no_number_has_no_fall(lost):
    assert HALF.fall(X, [lost if place == 3 else 4.0 for place in X]) is None


def test_two_points_on_each_side_are_the_least():
    assert Change(at="1/2", within="1/50").fall(X, [4.0] * 100).size == 0
    assert Change(at="1/2", within="1/100").fall(X, [4.0] * 100) is None
    assert HALF.fall([], []) is None


def test_the_fall_of_each_row_and_seed_is_there_for_claims_and_none_of_a_run_that_broke_off(tiny):
    options = tiny.figure("bitnet_curves")[1].options
    rows = {row: job for (row, _), job in jobs(tiny, "bitnet_curves").items()}
    found = {}
    for row, job in rows.items():
        fall = 0.5 if row.startswith("BitNet") else 0.25
        points = [[n, 512 * n, 4.0 - fall * (n > 100)] for n in range(1, 201)]
        outcome = "not_finite" if row == "LLaMA, 3B" else "ok"
        series = {"train": Series(columns=["update", "tokens", "loss"], rows=points)}
        found[row] = (record_of(job, {}, series=series).model_copy(update={"outcome": outcome}),)
    statistics = curve_statistics(found, options)
    assert {row: one[0].get(FALL) for row, one in statistics.items()} == {
        row: None if row == "LLaMA, 3B" else 0.5 if row.startswith("BitNet") else 0.25 for row in rows
    }
    samples = curve_samples(found, options, noise=0.04)
    assert samples["BitNet b1.58, 700M", END].deviation == 0.04, "levels vary by the seed noise of the scale"
    bent = 2 * 0.5**2  # two second differences are half a nat, of the 149 behind the first quarter
    right = math.sqrt(bent / 149 / 6) * math.sqrt(2 / 4)  # four points on each side
    assert samples["BitNet b1.58, 700M", FALL].deviation == pytest.approx(right), "falls, by the noise of the points"
