"""Training curves behind a table: panels, lines, rows and columns without a record, notes."""

from __future__ import annotations

import csv

import matplotlib.pyplot as plt
import pytest
from support_figures import extent, records_of
from support_tables import pretrained, write_records

from paperlm.figures.curves import draw_curves
from paperlm.plan.project import Project
from paperlm.record.record import write_record
from paperlm.tables.build import table_contents

plt.switch_backend("Agg")


def test_curves_are_drawn_with_a_panel_a_column_and_a_legend_inside(tmp_path, monkeypatch):
    left = []
    monkeypatch.setattr(plt, "close", left.append)
    project = Project({"scale": "gpu"})
    not_run = {("DeepNorm (as defined)", "LLaMA-250M"), ("Mix-LN", "LLaMA-250M")}
    value = lambda r, c, s: None if c == "LLaMA-1B" or (r, c) in not_run else 30.0  # noqa: E731
    some = write_records(project, tmp_path, value)
    draw_curves(project, "mixln_table1", some, tmp_path / "curves.svg")
    (figure,) = left
    figure.canvas.draw()
    assert [axis.get_title() for axis in figure.axes] == ["LLaMA-71M", "LLaMA-130M", "LLaMA-250M"]
    assert "(not run: LLaMA-1B)" in figure.get_suptitle()
    below = [axis.get_xlabel().replace("\n", " ").removeprefix("training tokens") for axis in figure.axes]
    assert below == ["", "", " not run: DeepNorm (as defined), Mix-LN"]
    x0, y0, x1, y1 = extent(figure, figure.legends[0])
    assert min(x0, y0) >= 0 and max(x1, y1) <= 1
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["Post-LN", "DeepNorm", "DeepNorm (as defined)", "Pre-LN", "Mix-LN", "unigram plateau"]
    monkeypatch.undo()
    rows = list(csv.DictReader((tmp_path / "curves.csv").read_text().splitlines()))
    assert {row["kind"] for row in rows} == {"train", "eval"} and {row["scale"] for row in rows} == {"gpu"}


def test_a_table_whose_methods_are_its_columns_has_a_line_for_each(tmp_path, monkeypatch):
    left = []
    monkeypatch.setattr(plt, "close", left.append)
    project = Project({"scale": "tiny"})
    files = [tmp_path / f"{job.job_id}.json" for job in project.jobs_of("mixln_table5")]
    for path, job in zip(files, project.jobs_of("mixln_table5"), strict=True):
        write_record(path, pretrained(job, float("inf") if job.norm["name"] == "post_ln" else 20.0))
    draw_curves(project, "mixln_table5", files, tmp_path / "curves.svg")
    rows = list(csv.DictReader((tmp_path / "curves.csv").read_text().splitlines()))
    columns = project.table("mixln_table5")[1].columns
    assert {row["column"] for row in rows} == set(columns)
    (figure,) = left
    assert [axis.get_title() for axis in figure.axes] == ["size 1B"], "one panel, in which they can be compared"
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named[: len(columns)] == list(columns)
    colors = [line.get_color() for line in figure.axes[0].lines][: len(columns)]
    assert len(set(colors)) == len(columns)
    in_legend = [(line.get_linestyle(), line.get_marker()) for line in figure.legends[0].get_lines()]
    of_mix_ln = [look for look, label in zip(in_legend, named, strict=True) if label.startswith("Mix-LN")]
    assert len(set(of_mix_ln)) == len(of_mix_ln) == 5, "told apart without their shades"


@pytest.mark.parametrize(
    ("table", "headings", "title"),
    [
        ("mixln_table8", ["size 130M"], "Table 8, training curves: Scaled initialization and scaled embedding"),
        ("mixln_table6", ["LLaMA-250M"], "Table 6, training curves: Perplexity of further normalization methods"),
        ("lns_table4", ["LLaMA-130M", "LLaMA-250M"], "Table 4, training curves: LayerNorm Scaling against LayerScale"),
    ],
)
def test_curves_have_the_tables_number_and_title_and_panels_are_headed_by_the_size(
    tmp_path, monkeypatch, table, headings, title
):
    left = []
    monkeypatch.setattr(plt, "close", left.append)
    project = Project({"scale": "tiny"})
    draw_curves(project, table, records_of(project, table, tmp_path), tmp_path / "curves.svg")
    (figure,) = left
    assert figure.get_suptitle().replace("\n", " ").startswith(title)
    assert [axis.get_title() for axis in figure.axes if axis.lines] == headings


def test_jobs_without_a_curve_and_columns_of_the_same_runs_have_no_panel(tmp_path):
    project = Project({"scale": "tiny"})
    files = records_of(project, "neuzip_table1", tmp_path)
    assert {job.kind for job in project.jobs_of("neuzip_table1")} == {"pretrain", "stored_speed"}
    draw_curves(project, "neuzip_table1", files, tmp_path / "curves.svg")
    rows = list(csv.DictReader((tmp_path / "curves.csv").read_text().splitlines()))
    assert {row["column"].rpartition(" ")[2] for row in rows} == {"Loss"}
    assert {row["row"] for row in rows} == {"Vanilla", "LOMO", "+NeuZip Lossless"}
    assert "not run" not in (tmp_path / "curves.svg").read_text()


@pytest.mark.parametrize(("scale", "comparable"), [("tiny", False), ("paper", True)])
def test_curves_say_what_their_table_says_of_its_numbers(tmp_path, scale, comparable):
    project = Project({"scale": scale})
    job = project.jobs_of("mixln_table1")[0]
    write_record(tmp_path / "one.json", pretrained(job, 20.0, labels=["leaks the future"]))
    draw_curves(project, "mixln_table1", [tmp_path / "one.json"], tmp_path / "curves.svg")
    said = (tmp_path / "curves.notes.txt").read_text().splitlines()
    of_the_table = table_contents(project, "mixln_table1", []).notes
    departures = [f"{departure.what}: {departure.why}" for departure in project.deviations("mixln_table1")]
    assert said == [*of_the_table, "Post-LN, LLaMA-71M: leaks the future", *departures]
    assert comparable == (not of_the_table), "a proxy, and another scale than the paper's"
    assert said[0][:40] in (tmp_path / "curves.svg").read_text()


def test_curves_without_a_record_say_so(tmp_path):
    draw_curves(Project({"scale": "gpu"}), "mixln_table1", [], tmp_path / "curves.svg")
    assert "no run has a record yet" in (tmp_path / "curves.svg").read_text()
    assert (tmp_path / "curves.png").is_file()
