"""Figures of a quantity that each block has: the statistics that claims read, their noise, what is drawn where."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import scipy.stats
from support_claims import verdict
from support_figures import drawn, measured, records_of
from support_tables import edited, record_of

from paperlm.figures.block_bars import values
from paperlm.figures.block_curves import curve_statistics, update_of
from paperlm.figures.depth import (
    CORRELATION,
    DEEP,
    HIGH,
    LARGEST,
    LOW,
    MEAN,
    VARIATION,
    depth_samples,
    depth_statistics,
)
from paperlm.figures.heat_maps import grid, neighbours
from paperlm.plan.project import ROOT, Project
from paperlm.record.record import Record, write_record
from paperlm.result import Series


def series_of(record: Record, name: str, columns: list[str], rows: list[list]) -> Record:
    return record.model_copy(update={"series": {name: Series(columns=columns, rows=rows)}})


# -- statistics ----


@pytest.mark.parametrize("depth", [1, 2, 5, 12, 24])
def test_statistics_over_depth_are_those_of_numpy_and_scipy(depth):
    found = np.random.default_rng(depth).normal(3, 1, depth)
    statistics = depth_statistics(found.tolist())
    deep = [v for block, v in enumerate(found, 1) if block > depth / 2] if depth > 1 else found
    third = max(1, depth // 3)
    assert statistics[MEAN] == pytest.approx(found.mean()) and statistics[LARGEST] == found.max()
    if depth % 2 == 0 or depth == 1:
        assert statistics[DEEP] == pytest.approx(np.mean(deep))
    assert statistics[LOW] == pytest.approx(found[:third].mean())
    assert statistics[HIGH] == pytest.approx(found[-third:].mean())
    assert statistics[VARIATION] == pytest.approx(scipy.stats.variation(found))
    if depth > 1:
        assert statistics[CORRELATION] == pytest.approx(scipy.stats.spearmanr(range(depth), found).statistic)


def test_the_deep_half_is_the_later_blocks():
    assert depth_statistics([1.0, 1.0, 5.0, 7.0])[DEEP] == 6.0
    assert depth_statistics([0.0, 0.0])[VARIATION] == 0.0, "no spread of nothing"


def test_a_curve_is_read_at_a_fifth_of_its_axis_and_at_its_end():
    curve = {0: [9.0, 1.0, 1.0], 100: [2.0, 3.0, 4.0], 250: [2.5, 3.0, 50.0], 500: [3.0, 5.0, 8.0]}
    found = curve_statistics(curve)
    assert (found["First Block, Fifth"], found["Last Block, Fifth"]) == (2.0, 4.0)
    assert (found["First Block, End"], found["Last Block, End"]) == (3.0, 8.0)
    assert found["Largest"] == 50.0 and found[f"{CORRELATION}, End"] == pytest.approx(1.0)


# -- noise ----


def test_one_seed_has_the_measurements_own_error_in_the_units_of_the_statistic_or_decides_nothing():
    one = {"a": {0: {"x": 2.0}}, "b": {0: {"x": 5.0}}}
    with_error = depth_samples(one, {"a": 0.5, "b": 1.5})
    assert [with_error[r, "x"].deviation for r in "ab"] == [0.5, 1.5]
    assert with_error["a", "x"].measured
    without = depth_samples(one)
    found = verdict("M['b','x'] > M['a','x']", without)
    assert (found.verdict, found.per_seed) == ("undecided", (True,)) and "was not measured" in found.reason


def test_several_seeds_have_the_deviation_between_them_and_at_least_the_measurements_own_error():
    seeds = {"a": {5: {"x": 2.0}, 2: {"x": 4.0}, 7: {"x": 3.0}}}
    sample = depth_samples(seeds)["a", "x"]
    assert (sample.values, sample.seeds, sample.deviation) == ((2.0, 4.0, 3.0), (5, 2, 7), 0.0) and sample.measured
    assert depth_samples(seeds, {"a": 9.0})["a", "x"].deviation == 9.0


def test_a_gap_of_several_seeds_near_zero_is_open():
    mixed, pre = ({seed: {"x": x} for seed, x in enumerate(values)} for values in ((0.5, 0.3, 0.1), (0.0,) * 3))
    drops = depth_samples({"Mix": mixed, "Pre": pre})
    assert verdict("M['Mix','x'] > M['Pre','x']", drops).verdict == "undecided"


@pytest.mark.parametrize(("gap", "word"), [(0.1, "holds"), (0.03, "undecided"), (-0.1, "fails")])
def test_a_gap_of_drops_is_decided_by_the_error_of_the_accuracy(gap, word):
    """A standard error of 0.02 of each accuracy, near zero, where a relative noise would decide everything."""
    samples = depth_samples({"Mix": {0: {"x": gap}}, "Pre": {0: {"x": 0.0}}}, {"Mix": 0.02, "Pre": 0.02})
    assert verdict("M['Mix','x'] > M['Pre','x']", samples).verdict == word


# -- what is drawn where ----


def test_the_number_of_a_block_is_found_whatever_the_order_of_the_rows(tiny):
    job = tiny.jobs_of("mixln_figure6b")[0]
    record = series_of(record_of(job), "removal", ["drop", "block"], [[0.03, 3], [0.01, 1], [0.02, 2]])
    options = {"series": "removal", "column": "drop"}
    assert values(record, options | {"percent": False}) == [0.01, 0.02, 0.03]
    assert values(record, options | {"percent": True}) == pytest.approx([1, 2, 3])


def test_an_angle_is_drawn_at_its_block_and_so_many_blocks_further(tiny):
    job = tiny.jobs_of("mixln_figure5")[0]
    rows = [[1, 1, 0.1, 0.5], [1, 2, 0.2, None], [1, 3, 0.3, 1.0], [2, 1, 0.4, 0.0], [2, 2, 0.5, 1.0], [3, 1, 0.6, 1.0]]
    record = series_of(record_of(job), "angular", ["block", "n", "raw", "scaled"], rows)
    array = grid(record, "raw")
    np.testing.assert_array_equal(array, [[0.1, 0.4, 0.6], [0.2, 0.5, np.nan], [0.3, np.nan, np.nan]])
    assert np.isnan(grid(record, "scaled")[1, 0]) and grid(record, "scaled")[0, 1] == 0.0
    assert neighbours(record) == [0.1, 0.4, 0.6]


def test_states_along_a_run_are_put_at_their_updates(tiny):
    jobs = [cell.jobs[0] for cell in tiny.cells("lns_figure1") if cell.row == "Pre-LN"]
    updates = [update_of(measured(job)) for job in jobs]
    assert updates[0] == 0 and updates == sorted(set(updates))
    assert updates[-1] == jobs[0].of.steps // 2, "the first half of the run"


def test_the_drawn_numbers_and_the_statistics_of_a_figure_of_blocks_are_those_of_its_records(
    tiny, tmp_path, monkeypatch
):
    name, drops = "mixln_figure6b", {}
    for path in records_of(tiny, name, tmp_path / "records"):
        path.unlink()
    for index, cell in enumerate(tiny.cells(name)):
        job = cell.jobs[0]
        drops[cell.row] = [0.001 * (index + 1) * block for block in range(1, 13)]
        rows = [[block, 0.5 + drop, drop, 0.01, 20.0] for block, drop in enumerate(drops[cell.row], 1)]
        record = series_of(measured(job), "removal", job.series()["removal"], rows)
        write_record(tmp_path / f"records/{index}.json", record)
    drawn(monkeypatch, tiny, name, sorted((tmp_path / "records").iterdir()), tmp_path)
    lines = list(csv.DictReader((tmp_path / f"{name}.csv").read_text().splitlines()))
    for row, expected in drops.items():
        assert [float(x["drop"]) for x in lines if x["row"] == row] == pytest.approx([100 * d for d in expected])
    diff = {
        (r["row"], r["column"]): float(r["judged_on"])
        for r in csv.DictReader((tmp_path / f"{name}.diff.csv").read_text().splitlines())
    }
    assert diff["Post-LN", DEEP] == pytest.approx(100 * np.mean(drops["Post-LN"][6:]), rel=1e-6)


def test_blocks_are_counted_in_whole_numbers_under_their_bars(tmp_path, monkeypatch):
    project = Project({"scale": "gpu"})
    (record,) = (ROOT / "paper_tables/records/gpu/block_removal").glob("*llama_130m-post_ln-s0-*.json")
    figure = drawn(monkeypatch, project, "lns_figure2", [record], tmp_path)
    (axis,) = (axis for axis in figure.axes if axis.patches)
    assert len(axis.get_xticks()) > 2 and all(tick == round(tick) for tick in axis.get_xticks())


def test_on_a_logarithmic_axis_the_number_of_a_block_is_a_dot_for_bars_would_have_no_foot(tiny, tmp_path, monkeypatch):
    records = records_of(tiny, "mixln_figure3e", tmp_path / "records")
    figure = drawn(monkeypatch, tiny, "mixln_figure3e", records, tmp_path)
    for axis in figure.axes:
        (dots,) = axis.lines
        assert axis.get_yscale() == "log" and not axis.patches
        assert dots.get_marker() == "o" and dots.get_linestyle() == "None" and len(dots.get_xdata()) == 12


@pytest.mark.parametrize(("factor", "own"), [(15.0, False), (1000.0, True)])
def test_panels_of_curves_share_their_axis_or_say_that_they_do_not(tiny, tmp_path, monkeypatch, factor, own):
    """Pre-LN's variances are `factor` times those of the other rows."""
    paths = []
    for cell in tiny.cells("lns_figure1"):
        record = measured(cell.jobs[0])
        series = record.series["variance"]
        times = factor if cell.row == "Pre-LN" else 1.0
        rows = [[block, *(times * value for value in values)] for block, *values in series.rows]
        paths.append(tmp_path / f"{cell.jobs[0].job_id}.json")
        write_record(paths[-1], series_of(record, "variance", series.columns, rows))
    figure = drawn(monkeypatch, tiny, "lns_figure1", paths, tmp_path)
    panels = [axis for axis in figure.axes if axis.lines]
    assert [axis.get_title().endswith("\n(own scale)") for axis in panels] == [own] * len(panels)
    assert len({axis.get_ylim() for axis in panels}) == 1 or own
    assert "(dimensionless)" in panels[0].get_ylabel()


# -- what a look at the printed pictures says ----


def test_every_claim_on_the_figures_of_the_normalization_papers_says_that_the_printed_picture_satisfies_it():
    """24 of 25 (of two fits of Figure 6 no eye tells which is better); what a paper's two kinds of models do is two
    claims here, and what is ours no picture shows."""
    counted = {"MIX-F2": 3, "MIX-F3": 3, "MIX-F4": 1, "MIX-F5": 2, "MIX-F6a": 2, "MIX-F6b": 1}
    counted |= {"LNS-F1": 5, "LNS-F2": 2, "LNS-F4": 2, "LNS-F5": 1, "LNS-F6": 2}
    wanted = {f"{of}-{n}" for of, count in counted.items() for n in range(1, count + 1)}
    assert len(wanted) == 24
    figures = [figure for _, figure in Project({}).figures.values()]
    seen = {claim.id: claim.by_eye for figure in figures for claim in figure.claims if claim.by_eye}
    assert seen.keys() == wanted | {"LNS-F2-1r"}
    assert all(look.holds and look.source.startswith("[P] Figure ") for look in seen.values())


@pytest.mark.parametrize("holds", [True, False])
def test_what_a_look_at_the_picture_says_stands_where_printed_numbers_would_say_it(tmp_path, monkeypatch, holds):
    """A picture that satisfies the whole claim satisfies its parts; one that does not may miss any of them."""

    def look(paper):
        paper["figures"]["lns_figure6"]["claims"][0]["by_eye"]["holds"] = holds
        del paper["figures"]["lns_figure6"]["claims"][1]["by_eye"]

    project = Project({"scale": "tiny"}, edited(tmp_path, "lns", look))
    drawn(monkeypatch, project, "lns_figure6", [], tmp_path)
    rows = list(csv.DictReader((tmp_path / "lns_figure6.claims.csv").read_text().splitlines()))
    said = {(row["claim"], bool(row["part"])): row["holds_in_print"] for row in rows}
    whole, part = f"by eye: {str(holds).lower()}", "by eye: true" if holds else ""
    assert said == {
        ("LNS-F6-1", False): whole,
        ("LNS-F6-1", True): part,
        ("LNS-F6-2", False): "",
        ("LNS-F6-3", False): "",
        ("LNS-F6-3", True): "",
    }
