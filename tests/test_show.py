"""What people read: `show` from a number to what is behind it, the HTML page, and the words of verdicts."""

from __future__ import annotations

import ast
import html
import json
import re

import pytest
from rich.text import Text
from support_cce import Bench
from support_tables import edited, pretrained, write_records

from paperlm.plan.project import ROOT, Project
from paperlm.record.record import write_record
from paperlm.tables.build import write_table
from paperlm.tables.claims.judge import FAILS, HOLDS, NOT_TESTED, UNDECIDED
from paperlm.tables.show import show
from paperlm.tables.terminal import print_summary
from paperlm.tables.vocabulary import MOODS, UNCOLOURED, mood, painted

NOT_COMPARABLE = "not comparable at this scale"
MIX = "Mix-LN,LLaMA-130M"


@pytest.fixture
def said(capsys):
    """What `show` prints, spaces folded."""

    def call(project: Project, *arguments: object) -> str:
        show(project, *arguments)
        return " ".join(capsys.readouterr().out.split())

    return call


# -- show ----


def test_of_a_published_model_show_names_what_it_reads_and_no_method_of_ours(said):
    text = said(Project({"scale": "paper"}), "neuzip_table3b", "NeuZip 3-bit,T5 3B PPL")
    assert '"dataset": "hub:wmt/wmt14"' in text and "hub:google-t5/t5-3b" in text
    assert "method" not in text and "wiring" not in text


@pytest.mark.parametrize("scale", ["tiny", "paper"])
def test_every_kind_of_cell_can_be_shown(said, scale):
    project, seen = Project({"scale": scale}), set()
    for name in project.tables:
        for cell in project.cells(name):
            chain = tuple(job.kind for one in cell.jobs[:1] for job in (one, *one.ancestors()))
            if chain and chain not in seen:
                seen.add(chain)
                assert cell.jobs[0].job_id in said(project, name, f"{cell.row},{cell.column}")
    assert len(seen) > 8


@pytest.mark.parametrize(
    ("scale", "printed", "here"),
    [
        ("tiny", "ppl_true printed at scale tiny; ppl_paper where it is compared with the print",
         "perplexity within 10% of the unigram's, or above it"),
        ("gpu", "ppl_true printed at scale gpu; ppl_paper where it is compared with the print",
         "perplexity within 10% of the unigram's, or above it"),
        ("paper", "ppl_paper printed at scale paper; claims are judged on ppl_true", "perplexity above 1000"),
    ],
)  # fmt: skip
def test_show_tells_the_metric_printed_here_and_the_limits_of_divergence_here_and_in_print(said, scale, printed, here):
    text = said(Project({"scale": scale}), "mixln_table1", MIX)
    assert f"metric {printed}" in text and "claims are judged on ppl_true" in text
    assert f"diverged here: {here} [" in text and "in print: perplexity above 1000" in text


def test_a_table_whose_own_rule_is_about_the_unigram_is_shown_too(said, tmp_path):
    def edit(paper: dict) -> None:
        paper["tables"]["mixln_table1"]["diverged"] = {"unigram_within": 0.2, "source": "a test"}
        del paper["scales"]["tiny"]["diverged"]

    text = said(Project({"scale": "tiny"}, edited(tmp_path, "mixln", edit)), "mixln_table1", MIX)
    assert "perplexity within 20% of the unigram's, or above it [a test]" in text and "in print:" not in text


@pytest.mark.parametrize("scale", ["smoke", "tiny", "gpu", "paper"])
def test_show_gives_warm_up_in_updates_and_the_tokens_of_a_run(said, scale):
    project = Project({"scale": scale})
    job = next(c for c in project.cells("mixln_table1") if (c.row, c.column) == ("Mix-LN", "LLaMA-130M")).jobs[0]
    text = said(project, "mixln_table1", MIX)
    assert f"(warm-up) {round(0.1 * job.steps)} updates warmup_fraction x steps" in text
    assert f"(token slots) {job.steps * job.global_batch * job.seq_len:,}" in text
    assert f"steps {job.steps} " in text and job.job_id in text


def test_show_names_the_method_the_file_that_wires_it_and_the_rule_with_files_that_exist(said):
    text = said(Project({"scale": "tiny"}), "mixln_table1", MIX)
    assert "paperlm.norms.mix_ln.MixLN (src/paperlm/norms/mix_ln.py)" in text
    assert "its wiring is applied by src/paperlm/models/layers.py, Residual" in text
    assert "paperlm.jobs.pretrain.run (src/paperlm/jobs/pretrain.py)" in text
    assert "paperlm.tables.jobs.contents (src/paperlm/tables/jobs.py)" in text
    for path in re.findall(r"\b(?:src|workflow)/[\w/]+\.(?:py|smk)\b", text):
        assert (ROOT / path).is_file(), path
    source = (ROOT / "src/paperlm/models/layers.py").read_text()
    assert any(isinstance(n, ast.ClassDef) and n.name == "Residual" for n in ast.parse(source).body)


def test_show_of_an_evaluated_cell_walks_the_whole_chain_of_jobs(said):
    text = said(Project({"scale": "tiny"}), "mixln_table2", "LLaMA-1B, Mix-LN,Avg.")
    for kind in ("lm_eval", "sft", "pretrain"):
        assert f"rule {kind} (workflow/rules/jobs.smk) -> paperlm.jobs.{kind}.run" in text
    for settings in ("settings of tasks", "settings of sft", "settings of pretrain"):
        assert settings in text
    assert "mean of MMLU, BoolQ, ARC-e, PIQA, Hellaswag, OBQA, Winogrande printed at scale tiny" in text
    assert "published 44.66" in text and "departure" in text


def test_show_of_a_cell_says_what_its_record_says_and_whether_its_rules_are_earlier_ones(said, tmp_path):
    root = edited(tmp_path, "mixln", lambda p: None)
    project = Project({"scale": "gpu"}, root)
    cell = next(c for c in project.cells("mixln_table1") if (c.row, c.column) == ("Mix-LN", "LLaMA-130M"))
    job = cell.jobs[0]
    assert f"record none yet; it will be {project.places.made(job)}" in said(project, "mixln_table1", MIX)
    write_record(root / project.places.committed(job), pretrained(job, 26.5, behaviour={"pretrain": 0}))
    text = said(Project({"scale": "gpu"}, root), "mixln_table1", MIX)
    assert f"record {project.places.committed(job)} trained: ppl_true 26.5" in text
    assert f"earlier rules: pretrain 0 -> {job.behaviour}" in text


def test_show_gives_the_jobs_as_json_that_run_reads(capsys):
    from paperlm.jobs import parse_job

    project = Project({"scale": "tiny", "seeds": [0, 1]})
    show(project, "mixln_table1", MIX, as_json=True)
    jobs = [parse_job(value) for value in json.loads(capsys.readouterr().out)]
    cell = next(c for c in project.cells("mixln_table1") if (c.row, c.column) == ("Mix-LN", "LLaMA-130M"))
    assert [job.job_id for job in jobs] == [job.job_id for job in cell.jobs]


@pytest.mark.parametrize("scale", ["tiny", "gpu"])
def test_show_works_for_every_exhibit_and_its_first_and_last_cell(said, scale):
    project = Project({"scale": scale})
    for name in project.exhibits:
        assert said(project, name, None)
        cells = project.cells(name)
        for cell in (cells[0], cells[-1]) if cells else ():
            assert said(project, name, f"{cell.row},{cell.column}")


def test_sources_in_brackets_are_printed_whole_and_only_the_cells_own_proxy(said):
    """Rich takes a bracket before a small letter for markup and drops it."""
    project = Project({"scale": "tiny"})
    text = said(project, "mixln_table1", MIX)
    assert f"[{project.diverged_rule('mixln_table1').source}]" in text
    assert "[Mix-LN (arXiv 2412.13795)" in text and "[P] Table 7" in text
    assert text.count("a proxy of ") == 1 and "a proxy of 130M: hidden_size 64" in text


def test_a_row_that_counts_is_told_from_a_job(said):
    text = said(Project({"scale": "tiny"}), "mixln_table1", "Training Tokens,LLaMA-71M")
    assert "mean of tokens_nonpad over the column's jobs" in text and "published 1.1B" in text


# -- the page ----


def page_of(project: Project, name: str, records: list, folder) -> str:
    write_table(project, name, records, folder / f"{name}.csv", folder / "html")
    return html.unescape((folder / f"html/{name}.html").read_text())


def test_the_page_says_once_that_numbers_are_not_comparable(tmp_path):
    project = Project({"scale": "tiny"})
    records = write_records(project, tmp_path / "records", lambda r, c, s: 30.0)
    text = page_of(project, "mixln_table1", records, tmp_path)
    assert text.count(NOT_COMPARABLE) == 1
    assert "26.07 published" in text and "30.00" in text, "the printed number stands beside ours all the same"
    assert "differs" in text, "an outcome that differs is said in its cell"
    diff = (tmp_path / "mixln_table1.diff.csv").read_text()
    assert diff.count(NOT_COMPARABLE) > 10, "the file has it in each row"


def test_the_page_of_a_measured_table_says_it_once_too(paper, tmp_path):
    bench = Bench(paper, "tiny_cpu", "cpu (a processor, 1 thread)")
    for name in ("eager", "torch.compile", "ours"):
        bench.add(name, "time", 9.0, measure="both").add(name, "peak_memory", 100.0, measure="both")
    text = page_of(Project({"scale": "tiny"}), "cce_table1", bench.write(tmp_path), tmp_path)
    assert text.count(NOT_COMPARABLE) == 1 and "on a CPU, 1024 tokens, 32768 ids, width 128" in text


def test_the_page_of_the_paper_scale_gives_each_cell_its_verdict(tmp_path):
    project = Project({"scale": "paper"})
    records = write_records(project, tmp_path / "records", lambda r, c, s: 26.07)
    text = page_of(project, "mixln_table1", records, tmp_path)
    assert NOT_COMPARABLE not in text
    assert '<span class="good">match</span>' in text and '<span class="bad">differs</span>' in text


def test_the_page_shows_labels_that_cells_share_below_the_table_and_its_own_in_a_cell(tmp_path):
    project = Project({"scale": "gpu"})
    folder = tmp_path / "records"
    files = write_records(project, folder, lambda r, c, s: 30.0 if c == "LLaMA-71M" else None)
    jobs = {(c.row, c.column): c.jobs[0] for c in project.cells("mixln_table1") if c.jobs}
    for row, labels in (("Post-LN", ["shared"]), ("Pre-LN", ["shared", "its own"])):
        job = jobs[row, "LLaMA-71M"]
        write_record(folder / f"{job.job_id}.json", pretrained(job, 30.0, labels=labels))
    text = page_of(project, "mixln_table1", files, tmp_path)
    assert text.count("shared") == 1 and text.count("<small>its own</small></td>") == 1
    assert text.index("<small>its own") < text.index("</table>") < text.index("shared")


def test_the_page_has_no_script_asks_nothing_of_the_network_and_escapes_what_it_shows(tmp_path):
    title = "<script>alert(1)</script> & more"
    root = edited(tmp_path / "root", "mixln", lambda p: p["tables"]["mixln_table1"].update(title=title))
    write_table(Project({"scale": "tiny"}, root), "mixln_table1", [], tmp_path / "t.csv", tmp_path / "html")
    text = (tmp_path / "html/mixln_table1.html").read_text()
    assert "<script" not in text and "&lt;script&gt;" in text
    assert not re.search(r"https?://|src=|@import|url\(", text)


def test_the_page_names_what_the_scale_changes_of_every_kind_in_the_chain(tmp_path):
    text = page_of(Project({"scale": "tiny"}), "mixln_table2", [], tmp_path)
    for kind in ("pretrain", "sft", "lm_eval"):
        assert f"What scale tiny changes of a {kind} job" in text
    assert "of a rloo job" not in text


# -- words ----


def written(folder: str) -> set[str]:
    """Verdicts that the code spells out: arguments called verdict, verdicts on claims, and returned pairs of them."""
    found: set[str] = set()
    for path in sorted((ROOT / "src/paperlm" / folder).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            values: list[ast.AST] = []
            if isinstance(node, ast.Call):
                values += [k.value for k in node.keywords if k.arg == "verdict"]
                if isinstance(node.func, ast.Name) and node.func.id == "Verdict" and node.args:
                    values.append(node.args[0])
            elif isinstance(node, ast.Assign) and "verdict" in {getattr(t, "id", "") for t in node.targets}:
                values.append(node.value)
            elif isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) and path.name == "jobs.py":
                values.append(node.value.elts[0])
            for value in values:
                found |= _words(value)
    return found


def _words(value: ast.AST) -> set[str]:
    """Texts that an expression may be; conditions and calls are left out."""
    match value:
        case ast.Constant(value=str(text)):
            return {text}
        case ast.IfExp(body=body, orelse=orelse):
            return _words(body) | _words(orelse)
    return set()


def test_the_vocabulary_has_every_verdict_that_the_code_can_give():
    found = written("tables") | written("figures")
    cells = {"match", "differs", "within seeds", "blocked", "diverged as published", "out of memory as published"}
    assert cells <= found
    assert {HOLDS, FAILS, UNDECIDED, NOT_TESTED} <= {*MOODS, *UNCOLOURED}, "verdicts on claims"
    assert found <= set(MOODS) | set(UNCOLOURED)
    assert not set(MOODS) & set(UNCOLOURED)
    assert set(MOODS) <= found | {HOLDS, FAILS, UNDECIDED}, "a word that no code gives is dead"


def test_colours_are_those_of_the_words():
    assert [mood(w) for w in ("match", "within 1 %", "fails", "undecided", "blocked", "not run", "anything")] == [
        "good", "good", "bad", "open", "open", "", "",
    ]  # fmt: skip
    assert Text.from_markup(painted("differs", "26.07")).plain == "26.07"
    assert painted("not run", "") == "" and painted("not run") == "not run"


def test_the_summary_counts_verdicts_and_says_labels_once(tmp_path, capsys):
    project = Project({"scale": "gpu", "seeds": [0, 1]})
    records = write_records(project, tmp_path / "records", lambda r, c, s: 30.0 if s == 0 else None)
    write_table(project, "mixln_table1", records, tmp_path / "mixln_table1.csv")
    print_summary(tmp_path / "mixln_table1.csv")
    text = " ".join(capsys.readouterr().out.split())
    assert "1 of 2 seeds have a record (20 cells)" in text
    assert "30.00 (26.07)" in text and re.search(r"cells: .*\d+ not comparable at this scale", text)
    assert "mixln_table1.diff.csv" in text and "mixln_table1.claims.csv" in text
    said = (tmp_path / "mixln_table1.notes.txt").read_text().splitlines()
    departures = [f"{d.what}: {d.why}" for d in project.deviations("mixln_table1")]
    assert len(departures) > 5 and said == [*project.table("mixln_table1")[1].notes, *departures]
    assert all(" ".join(line.split()) in text for line in said), "and they are shown"
