"""A number that is not of the paper's own model says so wherever it stands."""

from __future__ import annotations

import csv

import pytest
from support_figures import measured
from support_tables import edited, write_records

from paperlm.figures.base import in_picture, write_figure
from paperlm.plan.project import Project
from paperlm.record.record import write_record
from paperlm.tables.build import sibling, write_table
from paperlm.tables.jobs import proxies, proxies_of
from paperlm.tables.terminal import print_summary

TABLE = "mixln_table1"


def test_a_row_with_a_number_of_a_proxy_says_so_and_a_row_of_the_papers_own_size_does_not(tmp_path):
    """1B is trained in 250M's shape here, 71M in its own; the count of a column is of that column's models."""

    def edit(paper: dict) -> None:
        paper["scales"]["gpu"]["stand_ins"] = {"1B": {"size": "250M", "why": "a test"}}

    project = Project({"scale": "gpu"}, edited(tmp_path / "root", "mixln", edit))
    proxy = "a proxy of 1B: the shape of 250M"
    value = lambda r, c, s: 30.0 if c == "LLaMA-71M" or (r, c) == ("Mix-LN", "LLaMA-1B") else None  # noqa: E731
    out = tmp_path / f"{TABLE}.csv"
    write_table(project, TABLE, write_records(project, tmp_path / "records", value), out)
    rows = {row[1]: row[0] for row in list(csv.reader(out.read_text().splitlines()))[1:]}
    cells = {(d["row"], d["column"]): d for d in csv.DictReader(sibling(out, "diff").read_text().splitlines())}
    of_proxy = {key for key, cell in cells.items() if proxy in cell["labels"]}
    assert {cells[key]["scale"] for key in cells} == {"gpu"}
    assert of_proxy == {("Mix-LN", "LLaMA-1B"), ("Training Tokens", "LLaMA-1B")}
    assert rows == {row: f"gpu: {proxy}" if row in dict(of_proxy) else "gpu" for row in rows} and len(rows) == 6


def test_a_row_of_several_sizes_names_every_proxy_and_the_page_and_the_terminal_name_each_once(tmp_path, capsys):
    project = Project({"scale": "tiny"})
    records = write_records(project, tmp_path / "records", lambda r, c, s: 30.0)
    out = tmp_path / f"{TABLE}.csv"
    write_table(project, TABLE, records, out, tmp_path / "html")
    print_summary(out)
    page, said = (tmp_path / f"html/{TABLE}.html").read_text(), capsys.readouterr().out
    for row in list(csv.reader(out.read_text().splitlines()))[1:]:
        said_of = [part.rsplit(":", 1)[0] for part in row[0].removeprefix("tiny: ").split("; ")]
        assert said_of == [f"a proxy of {size}" for size in ("130M", "1B", "250M", "71M")]
    for size in ("71M", "130M", "250M", "1B"):
        assert page.count(f"a proxy of {size}:") == said.count(f"a proxy of {size}:") == 1


@pytest.mark.parametrize(
    ("name", "row", "column", "checkpoint", "shape"),
    [
        ("neuzip_table3a", "Vanilla", "Llama-2 13B Losses", "Llama-2-13b-hf", "the shape of 350M"),
        ("neuzip_table3a", "NeuZip 3-bit", "Yi-1.5 34B Mem", "Yi-1.5-34B", "the shape of 350M"),
        ("neuzip_table3b", "Vanilla", "T5 3B Mem", "t5-3b", "vocab_size 32000"),
        ("neuzip_table4", "NeuZip 0-bit", "Block 32 PPL", "Meta-Llama-3-70B", "the shape of 350M"),
    ],
)
def test_a_model_trained_in_the_place_of_a_published_checkpoint_is_a_proxy_of_it(name, row, column, checkpoint, shape):
    """Columns that are not printed too; and where the checkpoint itself is fetched there is no proxy."""
    project = Project({"scale": "gpu"})
    cells = {(cell.row, cell.column): cell for cell in project.cells(name)}
    said = proxies_of(project, name, [cells[row, column]])
    assert said == [f"a proxy of {checkpoint}: trained here, {shape}"]
    assert set(said) <= set(proxies(project, name))
    assert proxies(Project({"scale": "paper"}), name) == []


def test_a_model_whose_shape_is_its_parents_is_no_second_proxy_beside_it():
    """Rows of Table 2 are tuned on a small T5 that is trained first, whose shape is theirs."""
    project = Project({"scale": "tiny"})
    cells = {(cell.row, cell.column): cell for cell in project.cells("neuzip_table2")}
    said = proxies_of(project, "neuzip_table2", [cells["Vanilla", "T5 3B BLEU"]])
    assert said == ["a proxy of t5-3b: trained here, hidden_size 192, n_layers 2, vocab_size 1024"]


def test_a_figures_row_of_a_published_model_does_not_carry_the_proxy_of_the_row_beside_it(tmp_path):
    project = Project({"scale": "tiny"})
    records = []
    for job in project.jobs_of("neuzip_figure1"):
        records.append(tmp_path / f"{job.job_id}.json")
        write_record(records[-1], measured(job))
    out = tmp_path / "neuzip_figure1.svg"
    write_figure(project, "neuzip_figure1", records, out)
    ours, others = "A model trained here", "stories260K, a published model"
    for path, column in ((out.with_suffix(".csv"), "proxies"), (sibling(out.with_suffix(".csv"), "diff"), "labels")):
        said = {row["row"]: row[column] for row in csv.DictReader(path.read_text().splitlines())}
        assert "a proxy of 130M: " in said[ours] and "a proxy of" not in said[others], path.name


def test_a_picture_has_room_for_few_notes_and_for_all_proxies_as_one_of_them():
    one, two, three = "a proxy of A: x", "a proxy of B: y", "a proxy of C: z"
    lines = ["not comparable", "Mix-LN: collapsed", "Post-LN: collapsed", one, two, "1 of 3 seeds", three]
    shown = in_picture(lines, 24)
    assert (shown[0], shown[-2]) == ("not comparable", "Mix-LN: collapsed")
    assert " ".join(shown[1:-2]) == f"{one}; {two}; {three}", "whatever stands before them"
    assert shown[-1] == "(2 more beside the CSV)"
    assert in_picture(lines[:3], 24) == lines[:3]
    assert in_picture([one], 24) == [one]
    assert in_picture(["w " * 100], 24)[-1].endswith(" ...") and len(in_picture(["w " * 100], 24)) == 3


def test_what_random_weights_take_is_a_proxy_of_a_checkpoint_at_every_scale():
    for scale in ("tiny", "paper"):
        project = Project({"scale": scale})
        drawn = "a proxy of a checkpoint's weights: drawn from N(0, "
        assert proxies(project, "neuzip_table3a_full") == [f"{drawn}0.02^2)"]
        assert proxies(project, "neuzip_table4_full") == [f"{drawn}0.02^2)", f"{drawn}0.018^2)"]
