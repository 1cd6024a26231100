"""Figures of every kind on made-up records: what is inside the page, colours of methods, notes, numbers, files."""

from __future__ import annotations

import csv
import functools
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from support_figures import drawn, extent, measured, records_of
from support_tables import edited, record_of

from paperlm.checks import open_project
from paperlm.errors import SpecError
from paperlm.figures import figure_kinds
from paperlm.figures.base import LINES, NOTES, drawing_of, labels_of
from paperlm.figures.histograms import _sample
from paperlm.figures.series_curves import sampling
from paperlm.figures.style import METHODS, legend_below, row_styles
from paperlm.norms import norm_methods
from paperlm.plan.project import Project
from paperlm.record.record import read_record, write_record
from paperlm.result import UNIGRAM, Series
from paperlm.tables.results import seed_of

plt.switch_backend("Agg")
SCALE = "tiny"
TINY = Project({"scale": SCALE})
FIGURES = list(TINY.figures)
OF_JOBS = [name for name in FIGURES if TINY.figure(name)[1].job]


@pytest.fixture(scope="module")
def tiny() -> Project:
    return TINY


@pytest.fixture(scope="module")
def files(tiny, tmp_path_factory):
    """Figure of jobs -> a record of each of its jobs."""
    folder = tmp_path_factory.mktemp("records")
    return {name: records_of(tiny, name, folder) for name in OF_JOBS}


@dataclass(frozen=True)
class Page:
    """A drawn figure, its files, and where legend and notes were in the pictures that were saved."""

    figure: Figure
    folder: Path
    saved: list[tuple[Bbox, Bbox, Bbox]]
    "legend, notes, page"


@pytest.fixture(scope="module")
def page(tiny, files, tmp_path_factory):
    """Draw a figure by name, once, with records where it is drawn from jobs."""

    @functools.cache
    def draw(name: str) -> Page:
        folder, saved, original = tmp_path_factory.mktemp(name), [], Legend.draw

        def watched(legend: Legend, renderer: object) -> None:
            original(legend, renderer)
            whole = legend.get_figure(root=True)
            if legend in whole.legends:
                boxes = [artist.get_window_extent(renderer) for artist in (legend, whole.texts[-1])]
                saved.append((*boxes, whole.bbox.frozen()))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Legend, "draw", watched)
            figure = drawn(patch, tiny, name, files.get(name, []), folder)
        figure.canvas.draw()
        return Page(figure, folder, saved)

    return draw


# -- the page ----


@pytest.mark.parametrize("name", FIGURES)
def test_the_legend_lies_inside_the_page_and_covers_no_panel(page, name):
    figure = page(name).figure
    for legend in figure.legends:
        left, bottom, right, top = extent(figure, legend)
        assert left >= 0 and bottom >= 0 and right <= 1 and top <= 1, (left, bottom, right, top)
        panels = [axis.get_tightbbox(figure.canvas.get_renderer()) for axis in figure.axes]
        box = legend.get_window_extent(figure.canvas.get_renderer())
        assert not any(panel.overlaps(box) for panel in panels if panel is not None)


@pytest.mark.parametrize("name", FIGURES)
def test_numbers_along_an_axis_stand_apart(page, name):
    """By a fifth of their height: closer ones read as one."""
    figure = page(name).figure
    renderer = figure.canvas.get_renderer()
    for axis in figure.axes:
        low, high = sorted(axis.get_xlim())
        if not axis.get_xticklabels():
            continue  # it has those of the panel below
        places = zip(axis.get_xticks(), axis.get_xticklabels(), strict=True)
        shown = [label for x, label in places if low <= x <= high and label.get_text() and not label.get_rotation()]
        boxes = sorted((label.get_window_extent(renderer) for label in shown), key=lambda box: box.x0)
        apart = [after.x0 - box.x1 > box.height / 5 for box, after in itertools.pairwise(boxes)]
        assert all(apart), [label.get_text() for label in shown]


@pytest.mark.parametrize("name", FIGURES)
def test_in_the_saved_picture_legend_and_notes_are_whole_and_apart(page, name):
    """Saving enlarges the page so that the notes fit on it; a legend that hangs on the page's edge would move."""
    saved = page(name).saved
    assert bool(saved) == bool(page(name).figure.legends)
    for legend, note, paper in saved[-1:]:
        assert not legend.overlaps(note)
        for box in (legend, note):
            assert min(box.x0 - paper.x0, box.y0 - paper.y0, paper.x1 - box.x1, paper.y1 - box.y1) >= -1, box


@pytest.mark.parametrize("name", FIGURES)
def test_the_picture_has_the_first_three_notes_below_everything_and_the_file_all_of_them(page, tiny, files, name):
    figure, folder = page(name).figure, page(name).folder
    in_file = (folder / f"{name}.notes.txt").read_text().splitlines()
    proxies = [line for line in in_file if line.startswith("a proxy of ")]
    lines = [line for line in in_file if line not in proxies[1:]]  # in the picture all of them are one note
    lines = ["; ".join(proxies) if line in proxies else line for line in lines]
    note = figure.texts[-1]
    shown = note.get_text().split("\n") if note.get_text() else []
    if len(lines) > NOTES == 3:
        assert shown.pop() == f"({len(lines) - NOTES} more beside the CSV)"
    for whole in lines[:NOTES]:
        words = ""
        for _ in range(LINES):
            words = f"{words} {shown.pop(0)}".strip()
            if words == whole or words.endswith(" ..."):
                break
        assert words == whole or whole.startswith(words.removesuffix(" ..."))
    assert not shown
    left, _, right, top = extent(figure, note)
    assert left >= 0 and right <= 1.02, "no line is wider than the page"
    others = [*figure.axes, *figure.legends]
    assert all(top <= extent(figure, other)[1] + 1e-6 for other in others)
    expected = [*labels_of(tiny, name, files[name])] if name in files else []
    departures = [f"{d.what}: {d.why}" for d in tiny.deviations(name)]
    scale = [f"not comparable at this scale: {tiny.scale.summary}"] if tiny.jobs_of(name) else []
    assert in_file == [*scale, *expected, *tiny.figure(name)[1].notes, *departures]


@pytest.mark.parametrize(("labels", "width"), [(3, 4.0), (12, 9.6), (5, 5.2), (1, 3.0)])
def test_a_legend_takes_as_many_lines_as_its_labels_need(labels, width):
    figure, axis = plt.subplots(figsize=(width, 3.5))
    handles = [axis.plot([0, 1], [i, i])[0] for i in range(labels)]
    legend_below(figure, handles, [f"a method with a long name {i}" for i in range(labels)])
    figure.canvas.draw()
    left, bottom, right, _ = extent(figure, figure.legends[0])
    assert left >= 0 and bottom >= 0 and right <= 1
    box = figure.legends[0].get_window_extent()
    assert not axis.get_tightbbox(figure.canvas.get_renderer()).overlaps(box)


@pytest.mark.parametrize("name", ["lns_figure5", "mixln_figure4", "mixln_table3_curve", "bitnet_figure5"])
def test_text_of_a_figure_with_one_panel_is_readable_in_a_column_of_3_3_inches(page, name):
    """At least 6.5 points after the saved picture, with all that hangs over the page's edge, is made as narrow."""
    figure = page(name).figure
    width = max(figure.get_figwidth(), figure.get_tightbbox().width + 0.2)
    sizes = [text.get_fontsize() for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert min(sizes) * 3.3 / width >= 6.5


def test_no_label_of_an_axis_reaches_into_the_title(page):
    for name in FIGURES:
        figure = page(name).figure
        if len(figure.axes) == 1 and figure._suptitle:
            renderer = figure.canvas.get_renderer()
            label, title = (t.get_window_extent(renderer) for t in (figure.axes[0].yaxis.label, figure._suptitle))
            assert label.y1 <= title.y0 + 1, name


# -- colours ----


def test_a_method_has_the_same_colour_in_every_figure_and_table_and_at_every_scale():
    seen: dict[str, set[str]] = {}
    for scale in ("tiny", "gpu"):
        project = Project({"scale": scale})
        for name in project.exhibits:
            norms = {}
            for cell in project.cells(name):
                if cell.jobs and getattr(cell.jobs[0], "norm", None):
                    norms.setdefault(cell.row, set()).add(cell.jobs[0].norm["name"])
            styles = row_styles(project, name)
            if len(set().union(*norms.values())) > 1 and all(len(n) == 1 for n in norms.values()):
                first = dict.fromkeys(norm for (norm,) in norms.values())
                for row, (norm,) in norms.items():
                    if norm in first:
                        seen.setdefault(norm, set()).add(to_hex(styles[row]["color"]))
                        del first[norm]
    assert {"post_ln", "deep_norm", "pre_ln", "mix_ln"} <= seen.keys()
    assert all(len(colours) == 1 for colours in seen.values()), seen
    assert len(set.union(*seen.values())) == len(seen), "two methods never share one"


def test_rows_of_one_method_have_shades_of_its_colour_and_other_dashes():
    """Table 1 has DeepNorm twice at scale gpu: with the authors' constants, and as defined."""
    styles = row_styles(Project({"scale": "gpu"}), "mixln_table1")
    one, other = styles["DeepNorm"], styles["DeepNorm (as defined)"]
    assert one["color"] != other["color"] and one["linestyle"] != other["linestyle"]
    assert all(a <= b <= 1 for a, b in zip(one["color"], other["color"], strict=True)), "the second one is lighter"
    assert to_hex(one["color"]) == to_hex(row_styles(Project({"scale": "tiny"}), "mixln_table1")["DeepNorm"]["color"])


@pytest.mark.parametrize("pair", [("cce_figure3", "cce_figure4"), ("cce_figure4", "cce_figure5")])
def test_rows_that_differ_in_something_else_keep_their_colours_too(tiny, pair):
    first, second = (row_styles(tiny, name) for name in pair)
    common = first.keys() & second.keys()
    assert len(common) == 4 and all(first[row] == second[row] for row in common)
    assert len({to_hex(style["color"]) for style in second.values()}) == len(second)


def test_neighbouring_lines_can_be_told_apart_without_colour(tiny):
    for name in (*OF_JOBS, "mixln_table1"):
        dashes = [style["linestyle"] for style in row_styles(tiny, name).values()]
        assert all(a != b for a, b in itertools.pairwise(dashes)), name


def test_every_method_with_a_place_in_the_palette_exists():
    assert set(METHODS) <= set(norm_methods()) and len(set(METHODS)) == len(METHODS)


# -- numbers and files ----


@pytest.mark.parametrize("name", OF_JOBS)
def test_a_figure_of_jobs_has_numbers_of_every_row_and_its_claims_read_what_it_computes(page, tiny, name):
    folder = page(name).folder
    spec = tiny.figure(name)[1]
    numbers = list(csv.DictReader((folder / f"{name}.csv").read_text().splitlines()))
    assert {line["row"] for line in numbers} == {cell.row for cell in tiny.cells(name)}
    assert (folder / f"{name}.png").stat().st_size > 5000 and (folder / f"{name}.svg").is_file()
    assert (folder / f"{name}.claims.csv").is_file() == bool(spec.claims)
    if spec.claims:
        rows = list(csv.DictReader((folder / f"{name}.claims.csv").read_text().splitlines()))
        judged = {row["claim"]: row for row in rows}
        assert list(judged) == [claim.id for claim in spec.claims]
        elsewhere = [claim.id for claim in spec.claims if claim.only_at and "tiny" not in claim.only_at.scales]
        excepted = [*tiny.changes(tiny.figure(name)[0]).except_, *elsewhere]
        untested = {c for c, row in judged.items() if row["verdict"] == "not tested"} - set(excepted)
        assert not untested, judged


@pytest.mark.parametrize("name", OF_JOBS)
def test_a_figures_numbers_and_what_claims_read_of_it_are_called_by_their_seeds(tmp_path, name):
    """Not by their places: of two rows, one may have other seeds."""
    project = Project({"scale": SCALE, "seeds": [3, 7]})
    drawing = drawing_of(project, name, records_of(project, name, tmp_path / "records"))
    plt.close(drawing.figure)
    seeds = {cell.row: {seed_of(job.canonical()) for job in cell.jobs} for cell in project.cells(name)}
    if "seed" in drawing.numbers:
        assert all(set(of["seed"]) <= seeds[row] for row, of in drawing.numbers.groupby("row"))
    for (row, _), sample in drawing.samples.items():
        if len(set(sample.values)) > 1 and len(sample.values) == len(seeds.get(row, ())):
            assert set(sample.seeds) == seeds[row]


@pytest.mark.parametrize("name", OF_JOBS)
def test_a_figure_without_records_says_so_and_judges_nothing(tiny, tmp_path, monkeypatch, name):
    figure = drawn(monkeypatch, tiny, name, [], tmp_path)
    said = [text.get_text() for axis in figure.axes for text in axis.texts]
    assert any("yet" in text for text in said)
    assert len((tmp_path / f"{name}.csv").read_text().splitlines()) == 1
    if tiny.figure(name)[1].claims:
        rows = csv.DictReader((tmp_path / f"{name}.claims.csv").read_text().splitlines())
        assert {row["verdict"] for row in rows} == {"not tested"}


def test_a_blocked_record_is_left_out_of_a_figure(tiny, files, tmp_path, monkeypatch):
    name = "mixln_figure6b"
    job = next(cell.jobs[0] for cell in tiny.cells(name) if cell.row == "Post-LN")
    blocked = tmp_path / f"{job.job_id}.json"
    write_record(blocked, record_of(job, outcome="blocked", reason="its model ended not_finite"))
    others = [path for path in files[name] if path.name != blocked.name]
    figure = drawn(monkeypatch, tiny, name, [*others, blocked], tmp_path)
    rows = {line["row"] for line in csv.DictReader((tmp_path / f"{name}.csv").read_text().splitlines())}
    assert rows == {"Pre-LN", "Mix-LN"}
    assert figure.get_suptitle().endswith("\nblocked: Post-LN")


@pytest.mark.parametrize("name", [name for name in OF_JOBS if len({c.row for c in TINY.cells(name)}) > 1])
def test_a_row_that_was_not_run_is_named_in_the_picture(tiny, files, tmp_path, monkeypatch, name):
    """Half of the rows, so that a list of names has to find its place; none is named where all were run."""
    rows = list(dict.fromkeys(cell.row for cell in tiny.cells(name)))
    left_out = rows[: len(rows) // 2]
    unwanted = {job.job_id for cell in tiny.cells(name) if cell.row in left_out for job in cell.jobs}
    unwanted -= {job.job_id for cell in tiny.cells(name) if cell.row not in left_out for job in cell.jobs}
    figure = drawn(monkeypatch, tiny, name, [p for p in files[name] if p.stem not in unwanted], tmp_path)
    title = figure.get_suptitle()
    assert title.replace("\n", " ").partition("not run")[2].endswith(f": {', '.join(left_out)}")
    figure.canvas.draw()
    left, bottom, right, _ = extent(figure, figure._suptitle)
    assert left >= 0 and right <= 1 and all(extent(figure, axis.title)[3] <= bottom for axis in figure.axes)
    numbers = csv.DictReader((tmp_path / f"{name}.csv").read_text().splitlines())
    assert {line["row"] for line in numbers} == set(rows) - set(left_out)


@pytest.mark.parametrize("name", OF_JOBS)
def test_a_figure_of_which_every_row_was_run_names_none(page, name):
    assert "not run" not in page(name).figure.get_suptitle()


def test_what_stands_beside_the_numbers_of_a_figure_is_in_the_notes_first(tiny, files, tmp_path, monkeypatch):
    name = "mixln_figure6a"
    jobs = tiny.jobs_of(name)
    changed = measured(jobs[0]).model_copy(update={"behaviour": {"gradient_norms": 0}, "labels": ["a label"]})
    write_record(tmp_path / "changed.json", changed)
    rest = [path for path in files[name] if path.stem != jobs[0].job_id]
    drawn(monkeypatch, tiny, name, [*rest, tmp_path / "changed.json"], tmp_path)
    lines = (tmp_path / f"{name}.notes.txt").read_text().splitlines()
    assert lines[0] == f"not comparable at this scale: {tiny.scale.summary}"
    assert lines[1].startswith("a proxy of 250M: hidden_size 64") and "Pre-LN: a label" in lines[2:4]
    assert f"Pre-LN: earlier rules: gradient_norms 0 -> {type(jobs[0]).behaviour}" in lines[2:4]


# -- kinds ----


def test_every_kind_of_figure_is_drawn_by_some_figure_of_a_paper(tiny):
    assert {figure.draw for _, figure in tiny.figures.values()} == set(figure_kinds())


def test_an_unknown_kind_of_figure_is_refused_before_anything_starts(tmp_path):
    root = edited(tmp_path, "mixln", lambda p: p["figures"]["mixln_figure6a"].update(draw="block_bar"))
    with pytest.raises(SpecError, match=r"mixln\.yaml: figures\.mixln_figure6a\.draw: .*mean 'block_bars'"):
        open_project({}, root)


def test_a_curve_has_the_plateau_of_a_model_that_knows_frequencies_alone_where_its_axis_reaches_it(
    tiny, files, tmp_path, monkeypatch
):
    found = {}
    for unigram in (60.0, 5000.0):
        paths = []
        for path in files["bitnet_figure5"]:
            record = read_record(path)
            paths.append(tmp_path / path.name)
            write_record(paths[-1], record.model_copy(update={"metrics": record.metrics | {UNIGRAM: unigram}}))
        axis = drawn(monkeypatch, tiny, "bitnet_figure5", paths, tmp_path).axes[0]
        found[unigram] = [line.get_ydata()[0] for line in axis.lines if line.get_label() == "unigram plateau"]
    assert found == {60.0: [pytest.approx(math.log(60))], 5000.0: []}, "the axis is not widened for it"


def test_the_line_of_the_middle_block_is_named_beside_the_histograms(page):
    (legend,) = page("bitnet_figure2").figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["all blocks", "block 2 alone"]
    assert page("bitnet_figure3").figure.legends == [], "what is quantized has no line"


def test_a_statistic_of_a_histogram_varies_as_the_mean_of_its_seeds_errors_says():
    runs = [
        SimpleNamespace(metrics={"o/rms": value}, standard_errors={"o/rms": error}, job={"seed": seed})
        for seed, (value, error) in enumerate(((1.0, 0.1), (2.0, 0.3)))
    ]
    found = _sample(tuple(runs), "o/rms")
    assert (found.values, found.deviation) == ((1.0, 2.0), pytest.approx(0.2))


def test_the_band_of_one_run_is_that_of_the_mean_of_its_answers():
    """Five updates of 16 answers each, whose deviation is 0.5: 1.96 * 0.5 / sqrt(80) of every smoothed point."""
    reward = Series(columns=["update", "reward", "reward_std"], rows=[[update, 0.1, 0.5] for update in range(1, 21)])
    run = SimpleNamespace(series={"reward": reward}, job={"batch": 16})
    half = sampling(run, {"series": "reward", "spread": "reward_std", "samples": "batch", "window": 5})
    assert len(half) == 16 and half == pytest.approx(1.96 * 0.5 / 80**0.5)
