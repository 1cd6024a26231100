"""Statistics of the two normalization papers' figures: curves of training, blocks that are left out, growth."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import scipy.stats
from support_figures import drawn
from support_tables import edited, record_of

from paperlm.checks import open_project
from paperlm.errors import SpecError
from paperlm.figures.depth import (
    AT_MOST_ONE,
    BEHIND_FIRST,
    DEEP_BUT_LAST,
    EXPONENTIAL,
    FIRST,
    HIGH_BUT_LAST,
    LARGEST_BEHIND_FIRST,
    LARGEST_BEHIND_THREE,
    LARGEST_OF_THREE,
    LAST,
    POWER,
    SHALLOW,
    UNEVENNESS,
    depth_samples,
    growth_statistics,
    removal_statistics,
)
from paperlm.figures.options import check_options
from paperlm.figures.series_curves import (
    END,
    HIGHEST_GAP,
    LATER_MEAN,
    SAME,
    curve_samples,
    curve_statistics,
    tokens_of_an_update,
)
from paperlm.plan.project import Project
from paperlm.record.record import write_record
from paperlm.result import Series
from paperlm.tables.claims import judge


def ids(project: Project, name: str) -> dict[tuple[str, str], str]:
    return {(cell.row, cell.column): cell.jobs[0].job_id for cell in project.cells(name) if cell.jobs}


# -- curves ----


def curve(job, losses: list[float | None], seed: int = 0):
    job = job.model_copy(update={"seed": seed})
    rows = [[10 * i, i, loss] for i, loss in enumerate(losses, 1)]
    return record_of(job, series={"train": Series(columns=["update", "tokens", "loss"], rows=rows)})


OPTIONS = {"series": "train", "x": "update", "y": "loss", "window": 2, "reference": "A", "since": "1/2", "noise": "log"}


def test_a_curve_is_compared_with_the_reference_of_its_seed_over_the_later_part(tiny):
    job = tiny.jobs_of("lns_figure5")[0]
    found = {
        "A": (curve(job, [9.0, 7.0, 5.0, 4.0]), curve(job, [1.0, 1.0, 1.0, 1.0], seed=1)),
        "B": (curve(job, [99.0, 6.5, 4.5, 3.0]), curve(job, [2.0, 2.0, 2.0, 2.0], seed=1)),
    }
    statistics = curve_statistics(found, OPTIONS)
    # Smoothed: A 8, 6, 4.5 and B 52.75, 5.5, 3.75 at 20, 30 and 40; the later part begins at 20.
    assert statistics["A"][0] == pytest.approx({END: 4.5, LATER_MEAN: 18.5 / 3})
    assert statistics["B"][0] == pytest.approx({END: 3.75, LATER_MEAN: 62 / 3, HIGHEST_GAP: 44.75, SAME: 0})
    assert statistics["B"][1][HIGHEST_GAP] == 1.0, "the reference of the same seed"
    later = curve_statistics(found, OPTIONS | {"since": "3/4"})
    assert later["B"][0][HIGHEST_GAP] == pytest.approx(-0.5), "below it from there on: a negative number"


def test_a_seed_without_the_reference_has_no_gap(tiny):
    job = tiny.jobs_of("lns_figure5")[0]
    found = {"A": (curve(job, [3.0, 2.0]),), "B": (curve(job, [3.0, 2.0], seed=4),)}
    assert HIGHEST_GAP not in curve_statistics(found, OPTIONS)["B"][4]


def test_points_that_are_no_numbers_are_left_out_of_a_curve(tiny):
    job = tiny.jobs_of("lns_figure5")[0]
    found = {"A": (curve(job, [3.0, 2.0, None]),)}
    assert curve_statistics(found, OPTIONS)["A"][0] == pytest.approx({END: 2.5, LATER_MEAN: 2.5})


def test_the_noise_of_a_curve_is_the_scales_and_that_of_a_gap_of_two_runs_larger(tiny):
    job = tiny.jobs_of("lns_figure5")[0]
    found = {"A": (curve(job, [50.0, 40.0]),), "B": (curve(job, [44.0, 36.0]),)}
    relative = curve_samples(found, OPTIONS | {"noise": "relative", "window": 1}, 0.03)
    assert relative["B", HIGHEST_GAP].values == pytest.approx((-0.1,)), "as a share of the reference: 0.88 and 0.9"
    assert relative["A", END].deviation == pytest.approx(0.03 * 40)
    log = curve_samples(found, OPTIONS | {"window": 1}, 0.03)
    assert log["B", HIGHEST_GAP].values == (-4.0,) and log["A", END].deviation == 0.03
    assert log["B", HIGHEST_GAP].deviation == relative["B", HIGHEST_GAP].deviation == pytest.approx(0.03 * 2**0.5)


def test_figure_five_has_a_second_axis_and_a_column_of_the_tokens_behind_each_update(tiny, tmp_path, monkeypatch):
    paths = []
    for job in tiny.jobs_of("lns_figure5"):
        rows = [[update, 90 * update + update % 3, 5 - update / 100] for update in range(10, 210, 10)]
        paths.append(tmp_path / f"{job.job_id}.json")
        write_record(
            paths[-1], record_of(job, series={"train": Series(columns=["update", "tokens", "loss"], rows=rows)})
        )
    (axis,) = drawn(monkeypatch, tiny, "lns_figure5", paths, tmp_path).axes
    (above,) = axis.child_axes
    assert (axis.get_xlabel(), above.get_xlabel()) == ("update", "tokens")
    each = (90 * 200 + 2) / 200  # at the end of the run
    assert above.get_xlim() == pytest.approx([each * end for end in axis.get_xlim()])
    with (tmp_path / "lns_figure5.csv").open() as file:
        numbers = list(csv.DictReader(file))
    assert [(int(n["update"]), int(n["tokens"])) for n in numbers[:2]] == [(10, 901), (20, 1802)]
    assert len(numbers) == 40


def test_runs_whose_updates_have_other_numbers_of_tokens_share_no_axis_of_them(tiny):
    job = tiny.jobs_of("lns_figure5")[0]
    one, near, other = (
        record_of(job, series={"train": Series(columns=["update", "tokens", "loss"], rows=[[10, count, 3.0]])})
        for count in (1000, 1010, 1020)
    )
    assert tokens_of_an_update("f", {"A": (one,), "B": (near,)}, OPTIONS | {"tokens": "tokens"}) == 100.5
    with pytest.raises(SpecError, match=r"figures\.f\.options\.tokens: .* 100 tokens in A, seed 0 and 102 in B"):
        tokens_of_an_update("f", {"A": (one,), "B": (other,)}, OPTIONS | {"tokens": "tokens"})


@pytest.mark.parametrize(
    ("changes", "words"), [({"x": "tokens"}, "x is tokens"), ({"tokens": "words"}, "unknown column 'words'")], ids=str
)
def test_an_axis_of_tokens_that_cannot_be_drawn_is_refused(tmp_path, changes, words):
    root = edited(tmp_path, "lns", lambda paper: paper["figures"]["lns_figure5"]["options"].update(changes))
    with pytest.raises(SpecError, match=words):
        check_options(Project({"scale": "tiny"}, root), "lns_figure5")


@pytest.mark.parametrize(("ends", "verdict"), [((40.0, 34.0), "holds"), ((40.0, 39.5), "undecided")])
def test_a_curve_that_stays_below_another_by_more_than_the_noise_does_so(tiny, ends, verdict):
    job = tiny.jobs_of("mixln_figure4")[0]
    found = {"A": (curve(job, [50.0, ends[0]]),), "B": (curve(job, [42.0, ends[1]]),)}
    samples = curve_samples(found, OPTIONS | {"noise": "relative", "window": 1}, 0.03)
    cells = {("F", key): sample for key, sample in samples.items()}
    assert judge(f"F['B','{HIGHEST_GAP}'] < 0", cells, {"F": {}}).verdict == verdict


# -- blocks that are left out ----


def test_what_is_said_of_removed_blocks_is_read_off_the_right_blocks():
    """Twelve blocks, of which the first and the last matter most: thirds are 1-4 and 9-12, the deep half 7-12."""
    values = [20.0, 3.0, 2.0, 1.0, -1.0, 0.0, 0.5, 0.5, 2.0, 1.0, 0.0, 9.0]
    found = removal_statistics(values)
    assert found[FIRST] == 20 and found[LARGEST_BEHIND_FIRST] == 9
    assert (found[LARGEST_OF_THREE], found[LARGEST_BEHIND_THREE]) == (20, 9)
    assert found[SHALLOW] == pytest.approx(25 / 6) and found[BEHIND_FIRST] == pytest.approx(18 / 11)
    assert found[DEEP_BUT_LAST] == pytest.approx(4 / 5) and found[HIGH_BUT_LAST] == pytest.approx(1)
    assert found[UNEVENNESS] == pytest.approx(20 / 39), "of what is lost, not of what is gained"
    assert found[AT_MOST_ONE] == 7
    assert removal_statistics([2.0]).keys() >= {FIRST, UNEVENNESS}, "one block has no others"
    assert removal_statistics([-1.0, -2.0])[UNEVENNESS] == 0


def test_the_error_of_the_blocks_says_nothing_of_statistics_in_another_unit():
    samples = depth_samples({"a": {0: removal_statistics([3.0, 1.0, 2.0])}}, {"a": 0.7})
    assert samples["a", FIRST].deviation == 0.7 and samples["a", FIRST].measured
    assert not samples["a", UNEVENNESS].measured and not samples["a", AT_MOST_ONE].measured


def test_an_unknown_set_of_statistics_is_refused_with_those_there_are(tmp_path):
    root = edited(tmp_path, "lns", lambda p: p["figures"]["lns_figure6"]["options"].update(also="grwoth"))
    with pytest.raises(SpecError, match=r"figures\.lns_figure6\.options.*also.*'growth'"):
        open_project({"scale": "tiny"}, root)


# -- growth ----


@pytest.mark.parametrize("depth", [3, 12, 24])
def test_growth_is_what_lines_through_the_logarithms_explain(depth):
    values = np.exp(np.random.default_rng(depth).normal(0, 1, depth))
    found, block = growth_statistics(values.tolist()), np.arange(1, depth + 1)
    assert found[LAST] == values[-1]
    assert found[EXPONENTIAL] == pytest.approx(scipy.stats.linregress(block, np.log(values)).rvalue ** 2)
    assert found[POWER] == pytest.approx(scipy.stats.linregress(np.log(block), np.log(values)).rvalue ** 2)


def test_exponentials_and_powers_are_told_apart():
    block = np.arange(1, 13)
    exponential, power = growth_statistics(np.exp(0.4 * block)), growth_statistics(3.0 * block**1.7)
    assert exponential[EXPONENTIAL] == pytest.approx(1) and exponential[POWER] < 0.95
    assert power[POWER] == pytest.approx(1) and power[EXPONENTIAL] < 0.95
    assert growth_statistics([1.0, 0.0, 2.0]).keys() == {LAST}, "no logarithm of zero"
