"""docs/results.md is what the committed reference says, and nothing more."""

from __future__ import annotations

import csv
import json
import types

import pytest

from paperlm import results_page
from paperlm.checks import open_project
from paperlm.errors import RecordError
from paperlm.figures.base import write_figure
from paperlm.plan.project import ROOT, Project
from paperlm.plan.state import State
from paperlm.plan.workflow import Workflow
from paperlm.record.record import read_record
from paperlm.results_page import REFERENCE, grid, page, reference_part, take_reference
from paperlm.tables.build import write_table
from paperlm.tables.contents import SHOWN, read_built

MADE = {"seeds": [0], "machines": ["m"], "dates": ["d"], "commits": ["c"], "torch": ["t"]}
SCALES = tuple(sorted(path.name for path in (ROOT / REFERENCE).iterdir() if path.is_dir()))


def test_the_page_of_results_is_generated_from_the_reference():
    assert (ROOT / "docs/results.md").read_text() == page(Project(), SCALES)


@pytest.mark.parametrize("scale", SCALES)
def test_the_reference_has_the_claims_as_they_are_declared_now_and_the_notes_of_those_that_were_tested(scale):
    """What is declared anew, and a reference that nobody built since, would contradict each other."""
    project, stale = Project({"scale": scale}), []
    for path in sorted((ROOT / REFERENCE / scale).glob("*.claims.csv")):
        declared = {claim.id: claim for claim in project.exhibit(path.name.removesuffix(".claims.csv"))[1].claims}
        with path.open(newline="") as file:
            rows = {row["claim"]: row for row in csv.DictReader(file) if not row["part"]}
        assert rows.keys() == declared.keys(), path.name
        for name, claim in declared.items():
            row, note = rows[name], claim.note or ""
            said = row["verdict"] == "not tested" or note in row["reason"]
            if (row["says"], row["expression"]) != (claim.says, claim.expression) or not said:
                stale.append(name)
    assert not stale, "build these exhibits, then `python -m paperlm results --take`"


def test_what_failed_stands_before_what_held_and_every_proxy_is_named():
    text = page(Project(), SCALES)
    for table in text.split("| claim | verdict | why |")[1:]:
        verdicts = [line.split(" | ")[1] for line in table.splitlines() if line.startswith("| ") and " | " in line]
        known = [v for v in verdicts if v in ("fails", "undecided", "holds", "not tested")]
        assert known == sorted(known, key=("fails", "undecided", "holds", "not tested").index)
    assert "a proxy of phi3.5-mini: the shape of gpt2" in text


def test_no_proxy_is_named_twice_beside_an_exhibit():
    for section in page(Project(), SCALES).split("\n### "):
        named = [line.split(" (")[0] for line in section.splitlines() if line.startswith("- a proxy of ")]
        assert len(named) == len(set(named)), section[:80]


def test_a_part_that_fails_is_listed_though_the_whole_claim_does_not_fail(root):
    """A claim of which one size was run can fail there and be not tested as a whole."""
    project = Project({"scale": "gpu", "run_missing": "no"}, root)
    folder = root / REFERENCE / "gpu"
    folder.mkdir(parents=True)
    (folder / "made.json").write_text(json.dumps({"mixln_table1": MADE}))
    rows = ["A,,not tested", "A,71M,fails", "A,130M,holds", "A,250M,fails", "B,,fails", "B,71M,fails", "C,71M,holds"]
    rows = [f",,,gpu,{row[0]} is least,,{row}" for row in rows]
    (folder / "mixln_table1.claims.csv").write_text(
        "\n".join(["margin,detectable,would_decide,scale,says,reason,claim,part,verdict", *rows]) + "\n"
    )
    lines = page(project, ("gpu",)).splitlines()
    assert lines[lines.index("What fails, and why in the tables below:") + 2] == "- B (`mixln_table1`): B is least"
    told = lines.index("What fails in a part, where other parts are open or were not run:")
    assert lines[told + 2 :] == ["- A (`mixln_table1`), 71M, 250M: A is least"], "B is told as a whole"


def reference(root, scale: str, name: str, claims: tuple[str, ...] = ()) -> None:
    """The reference of a scale with one more exhibit, of one number; none of its claims was tested."""
    folder = root / REFERENCE / scale
    folder.mkdir(parents=True, exist_ok=True)
    made = json.loads((folder / "made.json").read_text()) if (folder / "made.json").is_file() else {}
    (folder / "made.json").write_text(json.dumps(made | {name: MADE}))
    (folder / f"{name}.diff.csv").write_text(f"{','.join(SHOWN['diff'])}\nr,c,{scale},,1,,\n")
    lines = [
        ",".join(SHOWN["claims"]),
        *(f"{claim},,{claim} is said,{scale},not tested,a reason,,," for claim in claims),
    ]
    (folder / f"{name}.claims.csv").write_text("\n".join(lines) + "\n")


def test_of_parts_that_all_say_the_same_the_gaps_on_the_same_items_are_told_all_the_same():
    gap = "A less B: -0.4 on the same 50 items of 5 sets, 95 % from -1.3 to +0.5"
    parts = [
        {"part": "700M", "verdict": "not tested", "reason": f"scale tiny: full scale only; {gap}"},
        {"part": "1.3B", "verdict": "not tested", "reason": "not run"},
    ]
    assert results_page._parts(parts) == f"700M: {gap}"
    parts[1] |= {"verdict": "holds"}
    assert results_page._parts(parts) == f"700M not tested, 1.3B holds; 700M: {gap}"
    assert results_page._parts([parts[1]]) == ""


def test_an_exhibit_of_another_scale_alone_is_missed_where_it_has_no_section_with_its_claims(root):
    project = Project({"scale": "gpu", "run_missing": "no"}, root)
    for scale, names in {
        "gpu": ["mixln_figure5"],
        "tiny": ["mixln_figure3e", "mixln_figure4", "mixln_figure5"],
    }.items():
        for name in names:
            reference(root, scale, name)
    nowhere, gpu, tiny = page(project, ("gpu", "tiny")).split("\n## Scale ")
    told = gpu.partition("Without a section at this scale")[2].partition("\n### ")[0]
    assert "\n`mixln_figure3e` (MIX-F3-3), `mixln_figure4` (MIX-F4-1).\n" in told
    assert "Without a section at this scale" not in tiny, "it has every section that there is"
    assert "`mixln_figure3e`" not in nowhere and "`lns_figure5` (LNS-F5-1)" in nowhere and "`lns_figure3`," in nowhere


def test_an_exhibit_with_claims_is_told_of_at_every_scale_where_it_has_no_section():
    project = Project()
    nowhere, *sections = page(project, SCALES).split("\n## Scale ")
    assert len(sections) == len(SCALES)
    for scale, section in zip(SCALES, sections, strict=True):
        for name in project.exhibits:
            claims = project.exhibit(name)[1].claims
            if claims and not (ROOT / REFERENCE / scale / f"{name}.diff.csv").is_file():
                told = f"`{name}` ({', '.join(claim.id for claim in claims)})"
                assert (told in nowhere) != (told in section), (scale, name)


def test_beside_a_verdict_stands_what_a_look_at_the_printed_picture_says(root):
    reference(root, "gpu", "mixln_figure2ab", ("MIX-F2-1", "MIX-F2-1p", "MIX-F2-0"))
    lines = page(Project({"scale": "gpu", "run_missing": "no"}, root), ("gpu",)).splitlines()
    assert [line.split(" | ")[-1] for line in lines if line.startswith("| MIX-F2-")] == [
        "a reason; in print, by eye: holds ([P] Figure 2a, b) |",
        *("a reason |", "a reason |"),
    ], "one of ours, and one that is declared no more, no picture shows"


@pytest.fixture
def copy(root):
    """The declarations alone."""
    return Project({"scale": "gpu", "run_missing": "no"}, root)


def test_a_reference_of_nothing_is_refused(copy):
    with pytest.raises(RecordError, match="no exhibit of scale gpu has been built"):
        take_reference(copy)


def built(copy: Project, name: str, value: str = "90.1", scale: str = "gpu", jobs: str = "") -> None:
    """Files of an exhibit with one number."""
    folder = copy.root / "paper_tables"
    (folder / f"{name}.diff.csv").write_text(f"{','.join(SHOWN['diff'])},jobs\nr,c,{scale},1,{value},,,{jobs}\n")
    (folder / f"{name}.claims.csv").write_text("claim,verdict\n")


def test_an_exhibit_without_a_number_and_one_of_another_scale_are_no_reference(copy):
    built(copy, "mixln_table1", "not run")
    built(copy, "mixln_table5", scale="tiny")
    with pytest.raises(RecordError, match="no exhibit of scale gpu has been built"):
        take_reference(copy)


def test_a_reference_is_taken_of_what_was_built_and_kept_of_what_was_not_unless_it_is_declared_no_more(copy):
    folder = copy.root / REFERENCE / "gpu"
    folder.mkdir(parents=True)
    earlier = {name: MADE for name in ("mixln_table1", "mixln_table5", "mixln_table99")}
    (folder / "made.json").write_text(json.dumps(earlier))
    for name in earlier:
        for kind in ("diff", "claims"):
            (folder / f"{name}.{kind}.csv").write_text("earlier\n")
    built(copy, "mixln_table5", jobs="cross_entropy/case/a method")
    built(copy, "mixln_table2", "not run")
    assert take_reference(copy) == ["mixln_table5"]
    assert sorted(path.name for path in folder.glob("*.csv")) == [
        *("mixln_table1.claims.csv", "mixln_table1.diff.csv", "mixln_table5.claims.csv", "mixln_table5.diff.csv")
    ]
    assert (folder / "mixln_table1.diff.csv").read_text() == "earlier\n"
    assert "r,c,gpu,1,90.1,,,cross_entropy/case/a method" in (folder / "mixln_table5.diff.csv").read_text()
    made = json.loads((folder / "made.json").read_text())
    assert made == {"mixln_table1": MADE, "mixln_table5": {key: [] for key in MADE} | {"seeds": [0]}}


def test_a_reference_is_not_taken_of_an_exhibit_that_was_built_from_other_jobs(copy):
    built(copy, "mixln_table1", jobs="llama_71m-pre_ln-s0-00000000")
    with pytest.raises(
        RecordError, match=r"mixln_table1\.diff\.csv: was built from llama_71m-pre_ln-s0-00000000, which mixln"
    ):
        take_reference(copy)


def test_a_reference_is_not_taken_of_a_table_that_was_built_before_a_record_of_its_was_there(copy, monkeypatch):
    """It would say the seeds of today over numbers of fewer."""
    first, second = [job for cell in copy.cells("mixln_table1") for job in cell.jobs][:2]
    built(copy, "mixln_table1", jobs=first.job_id)
    there = {first.job_id, second.job_id}
    kept = ROOT / "paper_tables/records/gpu/pretrain/llama_71m-admin-s0-3a13e1ff.json"
    stored = lambda _, job: types.SimpleNamespace(path=kept) if job.job_id in there else None  # noqa: E731
    monkeypatch.setattr(State, "stored", stored)
    with pytest.raises(RecordError, match=f"was built without {second.job_id}, whose record is there now; build it ag"):
        take_reference(copy)
    there.remove(second.job_id)
    take_reference(copy)


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[]",
        "{}",
        None,
        json.dumps({"mixln_table1": {**MADE, "dates": []}}),
        '{"mixln_table1": {"machines": ["m"]}}',
        '{"mixln_table1": 7}',
    ],
)
def test_a_reference_that_does_not_say_where_it_was_made_is_refused_and_stays(copy, damage):
    folder = copy.root / REFERENCE / "gpu"
    folder.mkdir(parents=True)
    if damage is not None:
        (folder / "made.json").write_text(damage)
    (folder / "mixln_table1.diff.csv").write_text("earlier\n")
    built(copy, "mixln_table5")
    for ask in (lambda: take_reference(copy), lambda: page(copy, ("gpu",))):
        with pytest.raises(
            RecordError, match=r"made\.json: (does not say where|no such) .*git checkout, or delete the"
        ):
            ask()
    assert (folder / "mixln_table1.diff.csv").read_text() == "earlier\n"


def test_tables_of_shapes_and_settings_stand_under_the_published_scale_which_has_no_record():
    said = page(Project({}, ROOT), ("paper",))
    assert "No record: what stands here follows from shapes and settings alone." in said
    assert "Records of" not in said and said.count("### ") == 5
    assert "| 700M | 1536 (1536) | 4096 (4096) |" in said  # of BitNet's Table 6
    assert "| BitNet b1.58 2B | not run (68.66) |" in said  # of its Table 5


def test_the_commit_of_a_record_that_a_changed_tree_made_is_named_with_that():
    """Of the committed records some of BitNet's were made before their code was committed."""
    name = "bitnet_table1"
    made = json.loads((ROOT / REFERENCE / "gpu/made.json").read_text())[name]
    project = Project({"scale": "gpu", "run_missing": "no", "seeds": made["seeds"]})
    stored = filter(None, map(State(project).stored, project.jobs_of(name)))
    places = [read_record(ROOT / one.path).environment for one in stored]
    said = {f"{one.commit[:7]}{' with uncommitted changes' if one.modified else ''}" for one in places}
    assert made["commits"] == sorted(said) and len({bool(one.modified) for one in places}) == 2


def test_a_table_that_no_reference_has_is_named_with_the_command_that_makes_it(copy):
    with pytest.raises(RecordError, match="paperlm results --take --config scale=gpu"):
        reference_part(copy, "gpu", "mixln_table2")


@pytest.mark.parametrize("name", ["mixln_table1", "cce_figure3"])
def test_the_reference_of_the_committed_records_is_what_they_give_today(tmp_path, name):
    folder = ROOT / REFERENCE / "gpu"
    made = json.loads((folder / "made.json").read_text())
    project = open_project({"scale": "gpu", "run_missing": "no", "seeds": made[name]["seeds"]})
    files = [ROOT / path for path in Workflow(project).inputs(name)]
    if name in project.tables:
        write_table(project, name, files, tmp_path / f"{name}.csv")
    else:
        write_figure(project, name, files, tmp_path / f"{name}.svg")
    for kind in ("diff", "claims"):
        assert (tmp_path / f"{name}.{kind}.csv").read_text() == (folder / f"{name}.{kind}.csv").read_text()


def cells(grid: dict[str, dict[str, tuple[str, str]]]) -> list[dict[str, str]]:
    """row -> column -> (regenerated, published), as a diff has them."""
    named = ((row, column, *pair) for row, columns in grid.items() for column, pair in columns.items())
    return [dict(zip(("row", "column", "regenerated", "published"), each, strict=True)) for each in named]


def test_rows_and_columns_without_a_number_of_either_kind_are_named_and_take_no_room():
    none, ours, printed = ("not run", ""), ("1.5", ""), ("not run", "2.5")
    shown = list(grid(cells({"A": {"x": ours, "y": printed, "z": none}, "B": {"x": none, "y": none, "z": none}})))
    assert shown == [
        "| | x | y |",
        "|---|---|---|",
        "| A | 1.5 | not run (2.5) |",
        "",
        "Not run, and without a printed number here: row `B`; column `z`.",
    ]
    assert list(grid(cells({"A": {"x": none, "y": none}}))) == [
        "",
        "Not run, and without a printed number here: row `A`; columns `x`, `y`.",
    ]
    assert list(grid(cells({"A": {"x": ("blocked", "")}})))[-1] == "| A | blocked |", "an outcome says something"


def test_every_row_and_column_of_a_reference_is_on_the_page_or_has_no_number_and_is_named():
    for diff in sorted((ROOT / "docs/reference").glob("*/*.diff.csv")):
        found = read_built(diff)
        table, _, said = "\n".join(grid(found)).replace(r"\|", "|").partition("without a printed number here: ")
        for cell in found:
            if f"| {cell['row']} " in table and f" {cell['column']} |" in table:
                continue
            assert any(f"`{cell[key]}`" in said for key in ("row", "column")), (diff.name, cell)
            assert not cell["published"] and cell["regenerated"] in ("", "not run"), (diff.name, cell)
