"""How far a training curve falls where its rate and weight decay change."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from support_bitnet_exhibits import jobs
from support_tables import pretrained, record_of

from paperlm.errors import SpecError
from paperlm.figures.fall import Change
from paperlm.figures.options import options_class
from paperlm.figures.series_curves import END, FALL, curve_samples, curve_statistics, draw
from paperlm.load import parse
from paperlm.record.record import write_record
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


def falls_of_noise(change, number, spread):
    rng = random.Random(0)
    lines = ([5 - place / 100 + spread(rng) for place in X] for _ in range(number))
    return [change.fall(X, line) for line in lines]


def seen(falls):
    return statistics.stdev(fall.size for fall in falls)


def test_its_deviation_is_that_of_falls_of_the_same_line_with_fresh_noise():
    falls = falls_of_noise(HALF, 400, lambda rng: rng.gauss(0, 0.2))
    assert seen(falls) == pytest.approx(0.2 * math.sqrt(2 / 10), rel=0.1)
    assert statistics.fmean(fall.deviation for fall in falls) == pytest.approx(seen(falls), rel=0.1)


def test_sides_of_different_numbers_of_points_count_each():
    x = [1, *range(3, 51), *range(51, 101, 2)]  # ten points in front, five behind, of which each is twice as wide
    fresh = random.Random(0)
    falls = [HALF.fall(x, [fresh.gauss(0, 0.2) for _ in x]) for _ in range(400)]
    assert seen(falls) == pytest.approx(0.2 * math.sqrt(1 / 10 + 1 / 4), rel=0.1), "the first behind it lies on both"
    assert statistics.fmean(fall.deviation for fall in falls) == pytest.approx(seen(falls), rel=0.1)


def test_a_curve_that_falls_and_rises_elsewhere_is_less_certain_than_its_points():
    narrow = Change(at="1/2", within="1/50")
    steps = [4.0 + 0.5 * (place // 3 % 2) for place in X]
    smooth = [4.0 + 0.5 * math.sin(place / 9) for place in X]
    for curve in (steps, smooth):
        deviation = narrow.fall(X, curve).deviation
        places = [sum(curve[p - 2 : p]) / 2 - sum(curve[p : p + 2]) / 2 for p in range(27, 98, 4) if abs(p - 50) >= 4]
        middle = statistics.median(places)
        assert deviation >= statistics.median(abs(p - middle) for p in places) / 0.6745 - 1e-12
    bends = [a - 2 * b + c for a, b, c in zip(smooth, smooth[1:], smooth[2:], strict=False)][24:]
    of_points = math.sqrt(statistics.fmean(bend**2 for bend in bends) / 6)
    assert narrow.fall(X, smooth).deviation > 3 * of_points, "a wave is no noise of points, and falls nevertheless"


def test_a_point_that_is_the_mean_of_what_lies_on_both_sides_counts_on_none():
    bins = [10, 20, 30, 40, 55, 60, 70, 80, 90, 100]
    wide = Change(at="1/2", within="1/4")
    # in front of 50 the means up to 40, from 25 on; behind it those from 55 to 75: the fifth begins at 40
    y = [9.0, 9.0, 9.0, 4.0, 100.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    assert wide.fall(bins, y) is None, "one in front"
    assert Change(at="1/2", within="1/2").fall(bins, y).size == pytest.approx(31 / 4 - 2 / 5)


@pytest.mark.parametrize("lost", [None, math.nan, math.inf])
def test_a_curve_with_a_point_that_is_no_number_has_no_fall(lost):
    assert HALF.fall(X, [lost if place == 3 else 4.0 for place in X]) is None


def test_two_points_on_each_side_are_the_least():
    assert Change(at="1/2", within="1/50").fall(X, [4.0] * 100).size == 0
    assert Change(at="1/2", within="1/100").fall(X, [4.0] * 100) is None
    assert HALF.fall([], []) is None


def tokens_of(update):
    """Twice as many an update behind the 100th of 200, so that half of them lie behind the 125th."""
    return 512 * (update + max(0, update - 100))


def curve(job, seed, fall, wave=0.0, outcome="ok"):
    points = [[n, tokens_of(n), 4.0 - fall * (n > 125) + wave * (n % 2)] for n in range(5, 201, 5)]
    series = {"train": Series(columns=["update", "tokens", "loss"], rows=points)}
    job = job.model_copy(update={"seed": seed})
    return record_of(job, {}, series=series).model_copy(update={"outcome": outcome})


def test_falls_of_each_row_and_seed_are_there_for_claims_and_vary_by_the_most_uncertain(tiny):
    options = tiny.figure("bitnet_curves")[1].options | {"change": {"at": "1/2", "within": "1/10"}}
    rows = {row: job for (row, _), job in jobs(tiny, "bitnet_curves").items()}
    found = {row: (curve(job, 0, 0.25), curve(job, 1, 0.5, wave=0.1)) for row, job in rows.items()}
    by_seed = curve_statistics(found, options)["LLaMA, 1.3B"]
    assert by_seed[0][FALL] == 0.25 and by_seed[1][FALL] == pytest.approx(0.5, abs=0.1), "by tokens, not updates"
    samples = curve_samples(found, options, noise=0.04)
    assert samples["BitNet b1.58, 700M", END].deviation == 0.04, "levels vary by the seed noise of the scale"
    change = Change.model_validate(options["change"])
    each = [change.fall(*map(record.series["train"].column, ("tokens", "loss"))) for record in found["LLaMA, 1.3B"]]
    assert samples["LLaMA, 1.3B", FALL].deviation == each[1].deviation > each[0].deviation


def test_a_row_of_which_a_run_broke_off_has_no_fall_and_is_not_judged_by_its_other_seeds(tiny):
    options = tiny.figure("bitnet_curves")[1].options | {"change": {"at": "1/2", "within": "1/10"}}
    rows = {row: job for (row, _), job in jobs(tiny, "bitnet_curves").items()}
    found = {row: (curve(job, 0, 0.25), curve(job, 1, 0.25)) for row, job in rows.items()}
    found["LLaMA, 1.3B"] = (
        curve(rows["LLaMA, 1.3B"], 0, 0.25),
        curve(rows["LLaMA, 1.3B"], 1, 0.25, outcome="not_finite"),
    )
    samples = curve_samples(found, options, noise=0.04)
    assert {row for row, statistic in samples if statistic == FALL} == set(rows) - {"LLaMA, 1.3B"}
    assert ("LLaMA, 1.3B", END) in samples


def test_a_verdict_on_a_single_seed_says_what_a_fall_varies_by(tmp_path, tiny):
    files = []
    for job in jobs(tiny, "bitnet_curves").values():
        files.append(tmp_path / f"{job.job_id}.json")
        made = pretrained(job, 60.0)
        write_record(files[-1], made.model_copy(update={"series": {**made.series, **curve(job, 0, 0.25).series}}))
    assert FALL in draw(tiny, "bitnet_curves", files).one_sample
    assert FALL not in draw(tiny, "bitnet_figure4", ()).one_sample


def test_a_change_without_a_row_to_compare_with_is_refused(tiny):
    options = tiny.figure("bitnet_curves")[1].options | {"reference": ""}
    with pytest.raises(SpecError, match="need a reference row"):
        parse(options, options_class("series_curves"), "figures.f.options")
