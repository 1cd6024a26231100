"""The printed tables: every transcription is read whole, and written back in the layout that it was printed in."""

from __future__ import annotations

import csv
import shutil
import subprocess
from pathlib import Path

import pytest

from paperlm.errors import SpecError
from paperlm.files import SUMS
from paperlm.plan.project import ROOT, Project
from paperlm.tables.build import _layout, printed_table
from paperlm.tables.contents import Contents, DiffRow, check_labels, format_count
from paperlm.tables.published import PublishedTable, check_numbers, half_a_digit, number, read_published

FOLDER = ROOT / "paper_tables/published"
SHAPES = {
    "mixln_table1": (1, 1, 5, 4), "mixln_table2": (2, 1, 8, 8), "mixln_table3": (2, 1, 2, 1),
    "mixln_table4": (1, 1, 2, 2), "mixln_table5": (1, 2, 1, 7), "mixln_table6": (1, 1, 1, 5),
    "mixln_table7": (1, 1, 5, 9), "mixln_table8": (3, 1, 6, 1),
    "lns_table1": (1, 1, 6, 4), "lns_table2": (0, 1, 1, 6), "lns_table3": (2, 1, 10, 8), "lns_table4": (1, 1, 5, 2),
    "bitnet_table1": (2, 1, 16, 7), "bitnet_table2": (2, 1, 12, 6), "bitnet_table3": (2, 1, 8, 6),
    "bitnet_table4": (2, 1, 2, 7), "bitnet_table5": (1, 1, 2, 9), "bitnet_table6": (1, 1, 4, 7),
    "bitnet_table7": (2, 1, 8, 4),
    "neuzip_table1": (1, 1, 3, 9), "neuzip_table2": (1, 1, 8, 9), "neuzip_table3a": (1, 1, 10, 9),
    "neuzip_table3b": (1, 1, 10, 9), "neuzip_table4": (1, 1, 2, 10),
    "cce_table1": (1, 1, 11, 6), "cce_tableA1": (1, 1, 6, 6), "cce_tableA3": (1, 1, 9, 3),
}  # fmt: skip
"Table -> label columns, header lines, rows, columns of numbers; of cce_table1 the ICLR edition."
WORDS = {"", "-", "OOM", "~300"}
"What stands where a number could, in tables of measured numbers."


def read(name: str):
    label_columns, header_lines, *_ = SHAPES[name]
    edition = "ICLR 2025" if name == "cce_table1" else ""
    return read_published(FOLDER / f"{name}.csv", edition, label_columns, header_lines)


def raw(name: str) -> list[list[str]]:
    lines = list(csv.reader((FOLDER / f"{name}.csv").read_text(encoding="utf-8").splitlines()))
    if lines[0][0] == "Edition":
        lines = [lines[0][1:], *(line[1:] for line in lines[1:] if line[0] == "ICLR 2025")]
    return lines


def test_every_printed_table_is_expected_and_there():
    assert {path.stem for path in FOLDER.glob("*.csv")} == set(SHAPES)


def test_every_printed_table_has_its_listed_checksum():
    """After a table was compared with the print: `(cd paper_tables/published && sha256sum *.csv > SHA256SUMS)`."""
    listed = {line.split()[1] for line in (FOLDER / SUMS).read_text().splitlines()}
    assert listed == {path.name for path in FOLDER.glob("*.csv")}
    done = subprocess.run(["sha256sum", "--check", "--quiet", SUMS], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_digit_that_changed_since_is_refused_and_a_table_that_is_not_listed_is_read(tmp_path):
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "mixln_table1.csv"
    text = path.read_text()
    path.write_text(text.replace("26.95", "26.96"))
    with pytest.raises(SpecError, match=r"mixln_table1\.csv: altered: SHA256SUMS beside it .*list it anew"):
        read_published(path)
    path.rename(tmp_path / "new.csv")
    assert read_published(tmp_path / "new.csv").cell("Post-LN", "LLaMA-130M") == "26.96"


@pytest.mark.parametrize("name", SHAPES)
def test_a_printed_table_is_read_with_every_row_and_column_once(name):
    label_columns, header_lines, rows, columns = SHAPES[name]
    table, lines = read(name), raw(name)
    assert (len(table.rows), len(table.columns)) == (rows, columns)
    assert (len(lines), {len(line) for line in lines}) == (header_lines + rows, {label_columns + columns})
    assert len(table.corners) == label_columns and len(table.heads) == header_lines
    read_back = [[*table.labels[row], *(table.cell(row, c) for c in table.columns)] for row in table.rows]
    assert read_back == lines[header_lines:]
    assert [list(head) for head in table.heads] == [line[label_columns:] for line in lines[:header_lines]]


@pytest.mark.parametrize("name", [n for n in SHAPES if n not in ("mixln_table7", "bitnet_table6", "bitnet_table7")])
def test_what_is_left_of_the_labels_are_numbers_and_the_words_for_none(name):
    """The other way round, a label column that is taken for numbers would be words, or a number taken for a label."""
    table = read(name)
    assert {v for cells in table.rows.values() for v in cells if number(v) is None} <= WORDS
    labels = [part for parts in table.labels.values() for part in parts]
    sizes = {"679M", "638M", "390M", "1.2B", "1.1B", "0.7B", "3.2B", "3.0B", "1.8B", "6.5B", "6.0B", "3.4B"}
    sizes |= {"700M", "1.3B", "3B", "7B"}
    assert not [part for part in labels if number(part) is not None and part not in sizes]


def test_columns_that_another_table_compares_are_left_out_with_their_heads_and_a_misspelt_one_is_refused():
    table, name = read("bitnet_table2"), "neuzip_table4"
    less = read(name).without(["Block 32 PPL", "Block 512 Mem"])
    assert less.columns == [c for c in read(name).columns if c not in ("Block 32 PPL", "Block 512 Mem")]
    assert all(less.cell(row, c) == read(name).cell(row, c) for row in less.rows for c in less.columns)
    assert [list(head) for head in less.heads] == [less.columns] and less.cell("NeuZip 0-bit", "Block 32 PPL") == ""
    assert table.without([]) == table
    with pytest.raises(SpecError, match="left_out: unknown column 'Block 32 PLP'; did you mean 'Block 32 PPL'"):
        read(name).without(["Block 32 PLP"])


@pytest.mark.parametrize("name", SHAPES)
def test_a_table_is_written_in_the_layout_that_it_is_printed_in(name):
    """Whatever the number of label columns and header lines: the file is the print with the scale in front."""
    table = read(name)
    diff = [
        DiffRow(name, row, column, "tiny", table.cell(row, column), table.cell(row, column))
        for row in table.rows
        for column in table.columns
    ]
    heads, rows = _layout(Contents(diff), table)
    header_lines = SHAPES[name][1]
    lines = raw(name)
    assert heads == [["scale" if i == 0 else "", *line] for i, line in enumerate(lines[:header_lines])]
    assert rows == [["tiny", *line] for line in lines[header_lines:]]


def test_rows_and_columns_of_ours_stand_beside_the_printed_ones_in_the_same_layout():
    for name, labels in (("mixln_table8", ["Mix-LN", "✓", "✓"]), ("mixln_table5", ["Perplexity"])):
        table = read(name)
        diff = [
            DiffRow(name, row, column, "tiny", "", "1.0")
            for row in (*table.rows, "Ours")
            for column in (*table.columns, "Seconds")
        ]
        heads, rows = _layout(Contents(diff), table)
        assert {len(line) for line in (*heads, *rows)} == {1 + len(labels) + len(table.columns) + 1}
        assert rows[-2][1 : 1 + len(labels)] == labels
        assert rows[-1][1 : 1 + len(labels)] == ["Ours", *[""] * (len(labels) - 1)]
        assert [head[-1] for head in heads] == [*[""] * (len(heads) - 1), "Seconds"]


def test_what_the_paper_files_declare_of_the_layout_is_what_the_files_have():
    project = Project({})
    for name, (_, table) in project.tables.items():
        if table.published:
            printed = Path(table.published).stem  # two tables may be held against one
            assert (table.label_columns, table.header_lines) == SHAPES[printed][:2], name
            assert printed_table(project, name) == read(printed).without(getattr(table, "left_out", ()))


def test_labels_of_several_columns_and_heads_of_several_lines_are_joined():
    assert read("mixln_table2").cell("LLaMA-1B, Mix-LN", "Avg.") == "44.66"
    assert read("mixln_table5").cell("Perplexity", "Mix-LN, 25.0%") == "18.18"
    assert read("mixln_table8").cell("Mix-LN, ✓, ✓", "Perplexity") == "31.19"
    assert read("bitnet_table3").cell("w/ 4-bit Q, 3-bit KV, 7B", "Avg↑") == "54.43"
    assert read("bitnet_table7").cell("LLaMA LLM, 7B", "Adam β") == "(0.9, 0.95)"
    assert read("lns_table2").cell("", "LayerNorm Scaling") == "25.76"
    assert read("neuzip_table1").cell("Vanilla", "LLama-2 13B Mem") == "OOM"
    assert read("mixln_table1").cell("Mix-LN", "LLaMA-9B") == read("mixln_table1").cell("Mixed", "LLaMA-1B") == ""


# -- what is refused ----


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (",a,b\nx,1,2\ny,3,4\nx,5,6\n", {}, "row 'x' stands twice; give the table more `label_columns`"),
        (",a,a\nx,1,2\n", {}, "column 'a' stands twice; give the table more `header_lines`"),
        ("m,n,a\nx,,1\n,x,2\n", {"label_columns": 2}, "row 'x' stands twice"),
        (",a,b\n,c,c\nx,1,2\n", {"header_lines": 3}, "3 lines, of which 3 are heads: there is no row"),
        (",a,b\nx,1,2\n", {"label_columns": 3}, "3 columns, of which 3 are labels: there is no number"),
        (",a,b\nx,1\n", {}, ":2: has 2 cells, the first line 3"),
        ("", {}, "has 0 lines"),
        ("a,b\n1,2\n3,4\n", {"label_columns": 0}, "row '' stands twice"),
        ("Edition,,a\nv1,x,1\n", {"edition": "v3"}, "unknown edition 'v3'; did you mean 'v1'"),
        ("Edition,,a\nv1,x,1\nv2,x,1\nv2,x,2\n", {"edition": "v2"}, "row 'x' stands twice"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_the_declared_table_is_refused(tmp_path, text, options, message):
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(SpecError, match=message):
        read_published(path, **options)


def test_a_file_in_another_encoding_is_named(tmp_path):
    (tmp_path / "table.csv").write_bytes("α,a\nx,1\n".encode("utf-16"))
    with pytest.raises(SpecError, match=r"table\.csv: not UTF-8"):
        read_published(tmp_path / "table.csv")


def test_the_same_row_in_two_editions_is_no_duplicate(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("Edition,,a\nv1,x,1\nv2,x,2\nv1,y,3\n")
    table = read_published(path, "v2")
    assert (table.rows, table.other_editions) == ({"x": ["2"]}, frozenset({"x", "y"}))


# -- printed cells ----


@pytest.mark.parametrize(
    ("cell", "value", "half"),
    [("26.07", 26.07, 0.005), ("1.1B", 1.1e9, 5e7), ("5B", 5e9, 5e8), ("20K", 2e4, 500), ("25%", 0.25, 0.005),
     ("6.25%", 0.0625, 5e-5), ("1e-3", 1e-3, 5e-4), ("512", 512, 0.5), ("0.0", 0.0, 0.05), ("11.9x", 11.9, 0.05)],
)  # fmt: skip
def test_printed_cells_are_read_with_their_unit_and_precision(cell, value, half):
    assert number(cell) == pytest.approx(value) and half_a_digit(cell) == pytest.approx(half)


@pytest.mark.parametrize("word", ["Mix-LN", "", "✓", "-", "OOM", "~300", "1.5e-3 → 1e-3", "(0.9, 0.95)"])
def test_words_are_no_numbers(word):
    assert number(word) is None and half_a_digit(word) == 0


def test_counts_print_as_the_paper_prints_them():
    assert [format_count(v) for v in (331_000, 1.1e9, 4.6e5, 2.2e9, 512)] == ["331K", "1.10B", "460K", "2.20B", "0.51K"]


@pytest.mark.parametrize("cell", ["26.o7", "about 3", "1,2,3 or so"])
def test_a_cell_that_is_neither_a_number_nor_a_word_for_none_is_refused_by_row_and_column(tmp_path, cell):
    path = tmp_path / "table.csv"
    path.write_text(f',A,B\nfirst,1.1B,~25%\nsecond,OOM,"{cell}"\nthird,-,\n')
    with pytest.raises(SpecError, match=rf"table.csv: row 'second', column 'B': '{cell}' is no number"):
        check_numbers(path, read_published(path))
    path.write_text(path.read_text().replace(cell, "26.07"))
    check_numbers(path, read_published(path))


def test_a_row_may_be_printed_in_another_edition_and_a_column_may_not():
    table = PublishedTable(("",), ["A"], {"first": ["1"]}, other_editions=frozenset({"old"}))
    rows, columns = {"first": True, "old": True}, {"A": True}
    check_labels("t", rows, columns, table)
    for wrong in ((rows | {"new": True}, columns), (rows, columns | {"old": True})):
        with pytest.raises(SpecError, match=r"(row 'new'|column 'old') is declared but not printed"):
            check_labels("t", *wrong, table)
