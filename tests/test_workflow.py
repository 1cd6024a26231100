"""The workflow as a user meets it: dry runs, errors before jobs, what is made again, records without a GPU, verbs."""

from __future__ import annotations

import csv
import json
import re
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
from support import copy_tracked
from support_workflow import SMOKE, paperlm_in, slower, snakemake, toy_clone

from paperlm.plan.exhibit import ClaimSpec
from paperlm.plan.project import ROOT, Project
from paperlm.plan.state import State
from paperlm.plan.workflow import Workflow

TABLE = "paper_tables/mixln_table1.csv"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    return copy_tracked(tmp_path / "clone")


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A clone of toys, at scale smoke."""
    return toy_clone(tmp_path / "toy")


def steps(out: str) -> Counter:
    """Rule -> how many jobs of it a Snakemake call planned or did."""
    table = re.search(r"(?m)^job +count\n-+ +-+\n((?:.+\n)+)", out)
    return Counter({line.split()[0]: int(line.split()[1]) for line in table[1].splitlines()} if table else {})


# -- before any job ----


@pytest.mark.parametrize("scale", ["smoke", "tiny", "paper"])
def test_a_dry_run_of_everything_takes_less_than_ten_seconds_and_plans_every_job_once(clone, scale):
    started = time.monotonic()
    out = snakemake(clone, "-n", "--config", f"scale={scale}", "run_missing=yes")
    assert (time.monotonic() - started) / slower() < 10
    # Records of models that are not in the repository are committed, so that nothing of them is made.
    jobs = State(Project({"scale": scale, "run_missing": "yes"}, clone)).todo()
    kinds = Counter(job.kind for job in jobs.values())
    assert {name: steps(out)[name] for name in kinds} == kinds and len(kinds) > 8
    assert steps(out)["prepare_data"] == len({s.data_id for job in jobs.values() for s in job.data()})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("scale=tinny", "unknown scale 'tinny'; did you mean 'tiny'"),
        ("sead=1", "unknown key 'sead'; did you mean 'seeds'"),
        ("seeds=[0,-1]", "greater than or equal to 0"),
    ],
)
def test_a_bad_configuration_stops_before_any_job_without_a_traceback(clone, config, message):
    out = snakemake(clone, TABLE, "--config", config, expect=1)
    assert message in out and "Traceback" not in out
    assert not (clone / "results").exists()


def test_missing_local_text_is_reported_before_any_job(clone):
    out = snakemake(clone, TABLE, "--config", "scale=gpu", "run_missing=yes", expect=1)
    assert "local_data" in out and "most recent call" not in out and not (clone / "results").exists()


def test_a_truncated_bundled_text_is_reported_before_any_job(clone):
    text = clone / "src/paperlm/data/bundled/c4_sample.jsonl.gz"
    text.write_bytes(text.read_bytes()[:-10])
    out = snakemake(clone, TABLE, *SMOKE, expect=1)
    assert "c4_sample.jsonl.gz: 1360231 bytes instead of 1360241" in out
    assert not (clone / "results").exists()


def test_an_altered_bundled_text_stops_the_data_job_and_its_log_says_so(clone):
    text = clone / "src/paperlm/data/bundled/c4_sample.jsonl.gz"
    content = bytearray(text.read_bytes())
    content[1000] ^= 1
    text.write_bytes(content)
    snakemake(clone, TABLE, *SMOKE, expect=1)
    (log,) = (clone / "logs/data").glob("*.log")
    assert "altered; fetch it again" in log.read_text() and "Traceback" not in log.read_text()


# -- tables from records ----


def test_the_gpu_table_is_rebuilt_from_committed_records_without_a_gpu_in_under_a_minute(clone):
    started = time.monotonic()
    out = snakemake(clone, TABLE, "--config", "scale=gpu")
    assert time.monotonic() - started < 60
    rows = {r[""]: r for r in csv.DictReader((clone / TABLE).read_text().splitlines())}
    assert rows["Mix-LN"]["scale"] == "gpu"
    assert float(rows["Mix-LN"]["LLaMA-71M"]) < float(rows["Pre-LN"]["LLaMA-71M"])
    assert rows["Post-LN"]["LLaMA-1B"] == "not run"
    assert steps(out) == {"table": 1, "total": 1}, "nothing was trained"
    assert "claims" in out and "mixln_table1.diff.csv" in out, "the diff and the verdicts are shown at the end"
    started = time.monotonic()
    again = snakemake(clone, TABLE, "--config", "scale=gpu")
    assert time.monotonic() - started < 10 and "Nothing to be done" in again


def test_claims_on_another_table_wait_for_it_where_one_call_makes_both_and_ask_for_nothing_of_it_alone(clone):
    """A table that was built before the runs of the other said of them `not run`, and was built once more later."""

    def read(*targets: str) -> set[str]:
        out = snakemake(clone, "-n", *targets, *SMOKE)
        table = re.search(r"\n(?:local)?rule table:\n    input: (.+)\n    output: paper_tables/lns_table2\.csv", out)
        return set(table[1].split(", "))

    state = State(Project({"scale": "smoke"}, clone))
    own, others = ({state.record(job) for job in state.project.jobs_of(n)} for n in ("lns_table2", "mixln_table6"))
    alone = read("paper_tables/lns_table2.csv")
    assert others - own and others & alone <= own <= alone
    assert read("paper_tables/mixln_table6.csv", "paper_tables/lns_table2.csv") == alone | others
    assert read("paper_tables/lns_table2.diff.csv") == alone
    shared = {
        state.record(job) for name in state.project.papers["lns"].exhibits() for job in state.project.jobs_of(name)
    }
    assert shared & others - own and read("lns") == alone | (shared & others), "another table of the paper makes them"
    assert read("lns", "mixln") == read("all") == read() == alone | others
    made = min(others - own)
    (clone / made).parent.mkdir(parents=True)
    shutil.copy(next((ROOT / "paper_tables/records/gpu/pretrain").glob("*.json")), clone / made)
    assert read("paper_tables/lns_table2.csv") == alone | {made}, "what is at hand is read"


def test_training_curves_alone_are_made_without_their_table_and_end_without_an_error(clone):
    out = snakemake(clone, "paper_tables/mixln_table1.curves.svg", "--config", "scale=gpu")
    assert steps(out) == {"curves": 1, "total": 1} and "error" not in out.lower()
    suffixes = {path.name.removeprefix("mixln_table1.curves.") for path in (clone / "paper_tables").glob("*.curves.*")}
    assert suffixes == {"svg", "png", "csv", "notes.txt"}


def test_tables_and_figures_of_arithmetic_are_made_without_a_job(clone):
    out = snakemake(clone, "paper_tables/cce_tableA3.csv", "paper_tables/cce_figure2.svg")
    assert steps(out).keys() <= {"table", "figure", "judged_figure", "total"}
    made = {p.name for p in (clone / "paper_tables").glob("cce_*")}
    assert made >= {f"cce_tableA3{s}.csv" for s in ("", ".diff", ".claims")} | {
        f"cce_figure2.{s}" for s in ("svg", "png", "csv", "notes.txt")
    }
    assert "holds" in out and "CCE-TA3-1" in out, "the verdicts are shown at the end"


@pytest.mark.slow
def test_a_table_of_measurements_is_measured_on_a_cpu_once_and_says_so(clone):
    target = "paper_tables/cce_table1.csv"
    snakemake(clone, target, *SMOKE)
    rows = {r["Method"]: r for r in csv.DictReader((clone / target).read_text().splitlines())}
    memory = "Loss+Gradient Memory (MB)"
    assert float(rows["5) Baseline"][memory]) > float(rows["Lower bound"][memory]) > 0
    assert float(rows["4) torch.compile"][memory]) > 0 and rows["2) Liger Kernels"][memory] == "not run"
    assert rows["1b) Our default"]["scale"] == "smoke: on a CPU, 128 tokens, 4096 ids, width 16"
    assert "Nothing to be done" in snakemake(clone, target, *SMOKE)


@pytest.mark.slow
@pytest.mark.parametrize(("numbers", "trained"), [((3,), 4), pytest.param((3, 4, 5), 8, marks=pytest.mark.long)])
def test_figures_of_training_are_made_from_jobs_and_measurements_of_their_models_once(clone, numbers, trained):
    figures = [f"paper_tables/cce_figure{n}.svg" for n in numbers]
    out = snakemake(clone, *figures, *SMOKE)
    assert steps(out)["pretrain"] == trained and steps(out)["rank_probability"] == 5
    for figure in figures:
        for suffix in (".png", ".csv", ".claims.csv"):
            assert len((clone / figure).with_suffix(suffix).read_bytes()) > 100
    assert f"CCE-F{numbers[0]}-1" in out and f"CCE-F{numbers[-1]}-1" in out, "the verdicts are shown at the end"
    assert "Nothing to be done" in snakemake(clone, *figures, *SMOKE)


# -- what is made again ----


def test_a_toy_paper_is_made_once_with_snapshots_and_claims(toy):
    out = snakemake(toy, "toy", *SMOKE)
    exhibits = {"table": 2, "published_consistency": 1}
    assert steps(out) == {"toy_model": 1, "toy_number": 3, "toy": 1, "total": 8, **exhibits}
    rows = list(csv.DictReader((toy / "paper_tables/toy_table1.csv").open()))
    assert [(row["count"], row["early"]) for row in rows] == [("4.00", "2.00"), ("8.00", "2.00")]
    assert "TOY-1" in out
    assert "Nothing to be done" in snakemake(toy, "toy", *SMOKE), "and there is nothing to do a second time"

    # A record that is deleted is made again by the same command, from the model that is still there.
    (record, *_) = sorted((toy / "results/smoke/toy_number").glob("*.json"))
    before = json.loads(record.read_text())["metrics"]
    record.unlink()
    again = snakemake(toy, "toy", *SMOKE)
    assert steps(again) == {"toy_number": 1, "table": 1, "toy": 1, "total": 3}
    assert json.loads(record.read_text())["metrics"] == before
    assert "Nothing to be done" in snakemake(toy, "toy", *SMOKE)

    # With its model gone as well, the parent is made again for it.
    record.unlink()
    (manifest,) = (toy / "results/smoke/models").glob("*/manifest.json")
    manifest.unlink()
    third = snakemake(toy, "paper_tables/toy_table1.csv", *SMOKE)
    assert steps(third) == {"toy_model": 1, "toy_number": 1, "table": 1, "total": 3}
    assert manifest.is_file() and record.is_file()


@pytest.mark.slow
def test_a_changed_rule_of_a_kind_makes_its_jobs_and_their_children_again_and_no_word_does(toy):
    snakemake(toy, "toy", *SMOKE)
    kind = toy / "src/paperlm/jobs/toy_model.py"
    kind.write_text(kind.read_text() + "# a comment\n")
    (toy / "workflow/rules/jobs.smk").open("a").write("# a comment\n")
    assert "Nothing to be done" in snakemake(toy, "toy", *SMOKE, "checkpoint_seconds=7")
    kind.write_text(kind.read_text().replace("leaves_model: ", "behaviour: ClassVar[int] = 2\n    leaves_model: "))
    assert steps(snakemake(toy, "-n", "toy", *SMOKE))["toy_number"] == 3
    assert steps(snakemake(toy, "-n", "toy", *SMOKE, "remake=no")).keys() <= {
        "table",
        "toy",
        "published_consistency",
        "total",
    }, "marked only"
    out = snakemake(toy, "toy", *SMOKE)
    assert (steps(out)["toy_model"], steps(out)["toy_number"]) == (1, 3)
    assert "Nothing to be done" in snakemake(toy, "toy", *SMOKE)


def test_a_stored_record_is_never_made_again_whatever_is_edited(clone):
    job = next(job for job in Project({"scale": "smoke"}).jobs_of("mixln_table1") if "mix_ln" in job.job_id)
    target = f"results/smoke/pretrain/{job.job_id}.json"
    assert steps(snakemake(clone, "-n", target, *SMOKE))["pretrain"] == 1
    (clone / target).parent.mkdir(parents=True)
    (clone / target).write_text("{}")
    rule = clone / "workflow/rules/jobs.smk"
    rule.write_text(rule.read_text().replace("python -m paperlm run", "python  -m paperlm run"))
    out = snakemake(clone, "-n", TABLE, *SMOKE, "checkpoint_seconds=7")
    assert steps(out)["pretrain"] == 15 and f"output: {target}" not in out


def test_an_edited_declaration_rebuilds_the_table_and_an_edited_comment_does_not(clone):
    snakemake(clone, "paper_tables/mixln_table7.csv")
    (clone / "src/paperlm/train/engine.py").open("a").write("# a comment\n")
    assert "Nothing to be done" in snakemake(clone, "paper_tables/mixln_table7.csv")
    paper = clone / "workflow/papers/mixln.yaml"
    paper.write_text(paper.read_text().replace('title: "Hyper-parameters', 'title: "All hyper-parameters'))
    assert "Nothing to be done" not in snakemake(clone, "paper_tables/mixln_table7.csv")


def test_a_word_in_one_exhibit_changes_its_own_digest_and_that_of_what_is_drawn_from_it():
    def digests(change=None):
        project = Project({"scale": "gpu", "run_missing": "no"})
        if change:
            change(project)
        plan = Workflow(project)
        return {name: plan.exhibit_digest(name) for name in project.exhibits}

    def edit(name, **fields):
        def change(project):
            kind = project.tables if name in project.tables else project.figures
            paper, exhibit = kind[name]
            kind[name] = (paper, exhibit.model_copy(update=fields))

        return change

    before = digests()
    assert before == digests(), "and it is the same in another process"
    changed = lambda after: {name for name in before if before[name] != after[name]}  # noqa: E731
    claim = ClaimSpec(id="X", says="x", expression="True", published=None)
    assert changed(digests(edit("mixln_table1", title="Other words"))) == {"mixln_table1"}
    assert changed(digests(edit("mixln_table1", claims=[claim]))) == {"mixln_table1"}
    assert changed(digests(edit("cce_figure4", notes=["a word"]))) == {"cce_figure4"}
    assert changed(digests(edit("cce_table1", title="Other words"))) == {"cce_table1", "cce_table1_bars"}

    def deviate(project):
        # not in place: other projects of this process have the same declarations
        said, first = project.deviations, project.papers["cce"].deviations[0]
        other = first.model_copy(update={"why": "other words"})
        project.deviations = lambda name: [other if deviation == first else deviation for deviation in said(name)]

    assert changed(digests(deviate)) == {
        "cce_table1", "cce_tableA1", "cce_tableA2", "cce_figure4", "cce_figure5", "cce_table1_bars", "cce_tableA2_bars"
    }  # fmt: skip


def test_a_digest_follows_what_an_exhibit_says_of_its_records_and_not_that_one_is_being_made(tmp_path):
    root = bare_root(tmp_path)

    def digests(**config):
        plan = Workflow(Project({"scale": "smoke", **config}, root))
        return [plan.exhibit_digest(name) for name in ("mixln_table7", "mixln_table1")]

    about_to_be_made, absent = digests(), digests(run_missing="no")
    project = Project({"scale": "smoke"}, root)
    job = project.jobs_of("mixln_table1")[0]
    path = root / project.places.made(job)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"behaviour": job.behaviours(), "ancestors": {}}))
    assert digests() == about_to_be_made and digests(run_missing="no")[1] != absent[1] != about_to_be_made[1]
    path.write_text(json.dumps({"behaviour": {"pretrain": 0}, "ancestors": {}}))
    assert digests() == about_to_be_made, "it will be made again"
    assert digests(remake="no")[1] != about_to_be_made[1], "it will be marked"
    assert digests(remake="no")[0] == absent[0] == about_to_be_made[0], "another table knows nothing of it"


def bare_root(folder: Path) -> Path:
    """A root with the project's declarations, and nothing made."""
    (folder / "paper_tables").mkdir()
    for name in ("workflow", "paper_tables/published"):
        (folder / name).symlink_to(ROOT / name)
    return folder


# -- the report ----


def test_a_report_holds_what_is_built_and_nothing_else(toy):
    snakemake(toy, "paper_tables/toy_table2.csv", *SMOKE)
    snakemake(toy, *SMOKE, "--report", "report.html")
    page = (toy / "report.html").read_text()
    assert "toy_table2.diff.csv" in page and "toy_table1.csv" not in page and "toy_table1.html" not in page
    snakemake(toy, "toy", *SMOKE, "--report=paper.html")
    assert "toy_table2.diff.csv" in (toy / "paper.html").read_text()


# -- verbs ----


def test_a_job_is_made_by_name_planned_explained_and_shown_to_differ(toy):
    scale = ("--config", "scale=smoke")
    plan = paperlm_in(toy, "plan", "toy_table1", *scale)
    assert re.search(r"toy_model .* 1 ", plan) and re.search(r"toy_number .* 3 ", plan) and "4 jobs to make" in plan
    assert "did you mean 'toy_table1'" in paperlm_in(toy, "run", "toy_tabel1", *scale, expect=2)

    listed = paperlm_in(toy, "show", "toy_table1", *scale)
    ids = sorted(set(re.findall(r"number-toy-s0-[0-9a-f]{8}", listed)))
    assert len(ids) == 3
    refused = paperlm_in(toy, "run", ids[0], *scale, expect=2)
    assert "no finished model of toy-s0-" in refused and "Traceback" not in refused
    paperlm_in(toy, "run", ids[0], "--with-parents", *scale)
    assert (toy / f"results/smoke/toy_number/{ids[0]}.json").is_file()
    assert "has a record" in paperlm_in(toy, "run", ids[0], *scale)
    assert "no record yet" in paperlm_in(toy, "why", ids[0], ids[1], *scale)

    paperlm_in(toy, "run", "toy_table1", "--with-parents", *scale)
    assert {p.stem for p in (toy / "results/smoke/toy_number").glob("*.json")} == set(ids)
    assert "nothing to make" in paperlm_in(toy, "plan", "toy_table1", *scale)
    said = "".join(paperlm_in(toy, "why", ids[0], other, *scale) for other in ids[1:])
    assert re.search(r"setting .* (at|factor) ", said) and re.search(r"result .* value ", said)
    assert "no difference" in paperlm_in(toy, "why", ids[0], ids[0], *scale)
    assert "unknown job 'number'" in paperlm_in(toy, "why", "number", ids[0], *scale, expect=2)
    out = snakemake(toy, "paper_tables/toy_table1.csv", *SMOKE)
    assert steps(out) == {"table": 1, "total": 1}, "what was made by hand is there for Snakemake too"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run",), "give one of them"),
        (("run", "--job", "{"), "not JSON"),
        (("run", "--job", '{"kind": "pretran"}', "--scale", "smoke"), "did you mean 'pretrain'"),
        (("run", "--job", '{"kind": "pretran"}'), "--job needs --scale"),
        (("run", "mixln_tabel1"), "did you mean 'mixln_table1'"),
        (("run", "mixln_table1", "--config", "scale"), "--config takes KEY=VALUE"),
        (("run", "mixln_table1", "--micro-batch", "0"), "is no whole number of 1 or more"),
        (("plan", "mixln_tabel1"), "did you mean 'mixln_table1'"),
        (("why", "x", "y.json"), "unknown job 'x'"),
        (("why", "y.json", "y.json"), "y.json: no such record"),
        (("show", "mixln_table1", "--cell", "Mix-LN,LLaMA-13M"), "did you mean 'Mix-LN,LLaMA-130M'"),
    ],
)
def test_a_verb_that_is_called_wrongly_says_how_to_call_it(paperlm, arguments, message):
    done = paperlm(*arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_every_verb_explains_itself(paperlm):
    verbs = set(re.findall(r"^    ([a-z-]+)\b", paperlm("--help").stdout, re.MULTILINE))
    assert verbs == {
        "prepare-data", "run", "why", "plan", "watch", "table", "curves", "figure", "measure", "summary", "results",
        "documents", "evidence", "show", "bench", "lm-eval", "consistency",
    }  # fmt: skip


def test_a_target_that_no_rule_makes_stops_with_the_nearest_one(toy):
    out = snakemake(toy, "paper_tables/toy_tabel1.csv", "-n", *SMOKE, expect=1)
    assert "did you mean 'paper_tables/toy_table1.csv'?" in out
    assert "Traceback" not in out and "MissingRuleException" not in out and "jobs to make" not in out


def test_a_clone_works_in_a_folder_with_a_space_and_a_quote(tmp_path):
    toy = toy_clone(tmp_path / "it's a clone")
    (tmp_path / "it's here").mkdir()
    snakemake(toy, "paper_tables/toy_table2.csv", *SMOKE, f"local_data={tmp_path}/it's here")
    assert (toy / "paper_tables/toy_table2.csv").is_file()
