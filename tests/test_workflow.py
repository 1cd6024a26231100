"""The workflow as a user meets it: dry runs, errors before jobs, reruns, records without a GPU, one environment."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml
from support import copy_tracked, job_environment

from paperlm.spec.project import ROOT, Project
from paperlm.spec.workflow import Jobs

TABLE = "paper_tables/mixln_table1.csv"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    return copy_tracked(tmp_path / "clone")


def snakemake(folder: Path, *arguments: str, expect: int = 0) -> str:
    """Output of a snakemake call in `folder`."""
    command = [sys.executable, "-m", "snakemake", "--cores", "2", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=job_environment(), timeout=300)
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout + done.stderr


# -- before any job ----


@pytest.mark.parametrize("scale", ["smoke", "tiny", "paper"])
def test_a_dry_run_of_everything_takes_less_than_ten_seconds(clone, scale):
    started = time.monotonic()
    out = snakemake(clone, "-n", "--config", f"scale={scale}", "run_missing=yes")
    assert time.monotonic() - started < 10
    runs = len(Project({"scale": scale}).runs)
    assert re.search(rf"pretrain +{runs}\n", out)


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


def test_only_runs_that_no_table_compares_by_their_loss_leave_it_to_the_machine(clone):
    def asked(target):
        out = snakemake(clone, target, "-n", "-p", "--config", "scale=smoke", "run_missing=yes")
        return set(re.findall(r"paperlm pretrain .* --exact-loss (\w+)", out))

    assert asked("paper_tables/cce_pretraining.csv") == {"torch"}
    assert asked(TABLE) == {"auto"}


def test_missing_local_text_is_reported_before_any_job(clone):
    out = snakemake(clone, TABLE, "--config", "scale=gpu", "run_missing=yes", expect=1)
    assert "local_data" in out and not (clone / "results").exists()


def test_a_truncated_bundled_text_is_reported_before_any_job(clone):
    text = clone / "src/paperlm/data/bundled/c4_sample.jsonl.gz"
    text.write_bytes(text.read_bytes()[:-10])
    out = snakemake(clone, TABLE, "--config", "scale=smoke", expect=1)
    assert "c4_sample.jsonl.gz: 1360231 bytes instead of 1360241" in out
    assert not (clone / "results").exists()


def test_an_altered_bundled_text_stops_the_data_job_and_its_log_says_so(clone):
    text = clone / "src/paperlm/data/bundled/c4_sample.jsonl.gz"
    content = bytearray(text.read_bytes())
    content[1000] ^= 1
    text.write_bytes(content)
    snakemake(clone, TABLE, "--config", "scale=smoke", expect=1)
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
    assert rows["Mix-LN"]["LLaMA-1B"] == "not run"
    assert "pretrain" not in re.sub("pretrain.smk", "", out), "nothing was trained"
    assert "claims" in out and "mixln_table1.diff.csv" in out, "the diff and the verdicts are shown at the end"
    started = time.monotonic()
    again = snakemake(clone, TABLE, "--config", "scale=gpu")
    assert time.monotonic() - started < 10 and "Nothing to be done" in again


def test_tables_and_figures_of_arithmetic_are_made_without_training_or_measuring(clone):
    out = snakemake(clone, "paper_tables/cce_tableA3.csv", "paper_tables/cce_figure2.svg")
    assert "rule pretrain" not in out and "rule measure" not in out
    made = {p.name for p in (clone / "paper_tables").glob("cce_*")}
    assert made == {f"cce_tableA3{s}.csv" for s in ("", ".diff", ".claims")} | {
        f"cce_figure2.{s}" for s in ("svg", "png", "csv")
    }
    assert "holds" in out and "CCE-TA3-1" in out, "the verdicts are shown at the end"


@pytest.mark.slow
def test_a_table_of_measurements_is_measured_on_a_cpu_once_and_says_so(clone):
    target, config = "paper_tables/cce_table1.csv", ("--config", "scale=smoke")
    snakemake(clone, target, *config)
    rows = {r["Method"]: r for r in csv.DictReader((clone / target).read_text().splitlines())}
    memory = "Loss+Gradient Memory (MB)"
    assert float(rows["5) Baseline"][memory]) > float(rows["Lower bound"][memory]) > 0
    # logits, their gradient and what is left of the softcap; no more than the baseline holds
    assert float(rows["5) Baseline"][memory]) > float(rows["4) torch.compile"][memory]) > 0
    assert rows["2) Liger Kernels"][memory] == "not run"
    assert rows["1b) Our default"]["scale"] == "smoke: on a CPU, 128 tokens, 4096 ids, width 16"
    assert "Nothing to be done" in snakemake(clone, target, *config)


@pytest.mark.slow
def test_figures_of_training_are_made_from_runs_and_probes_of_their_models_once(clone):
    figures = [f"paper_tables/cce_figure{n}.svg" for n in (3, 4, 5)]
    out = snakemake(clone, *figures, "--config", "scale=smoke")
    assert re.search(r"pretrain +8\n", out) and re.search(r"probe_ranks +4\n", out)
    for figure in figures:
        for suffix in (".png", ".csv", ".claims.csv"):
            assert len((clone / figure).with_suffix(suffix).read_bytes()) > 100
    assert "CCE-F4-1" in out, "the verdicts are shown at the end"
    assert "Nothing to be done" in snakemake(clone, *figures, "--config", "scale=smoke")
    (record,) = (clone / "results/smoke/runs").glob("*-pre_ln-cce_kahan-s0-*.json")
    (clone / "results/smoke/ranks" / record.name).unlink()
    (clone / figures[0]).unlink()
    again = snakemake(clone, figures[0], "--config", "scale=smoke")
    assert "rule probe_ranks" in again and "rule pretrain" not in again, "the model is still there"


def test_an_edited_declaration_rebuilds_the_table_and_an_edited_comment_does_not(clone):
    snakemake(clone, "paper_tables/mixln_table7.csv")
    (clone / "src/paperlm/train/loop.py").open("a").write("# a comment\n")
    assert "Nothing to be done" in snakemake(clone, "paper_tables/mixln_table7.csv")
    paper = clone / "workflow/papers/mixln.yaml"
    paper.write_text(paper.read_text().replace('title: "Hyper-parameters', 'title: "All hyper-parameters'))
    assert "Nothing to be done" not in snakemake(clone, "paper_tables/mixln_table7.csv")


def test_a_stored_record_is_never_trained_again_whatever_is_edited(clone):
    run = next(run for run in Project({"scale": "smoke"}).runs if "mix_ln" in run)
    target = f"results/smoke/runs/{run}.json"
    assert re.search(r"pretrain +1\n", snakemake(clone, "-n", target, "--config", "scale=smoke"))
    (clone / target).parent.mkdir(parents=True)
    (clone / target).write_text("{}")
    rule = clone / "workflow/rules/pretrain.smk"
    rule.write_text(rule.read_text().replace("python -m paperlm pretrain", "python  -m paperlm pretrain"))
    out = snakemake(clone, "-n", TABLE, "--config", "scale=smoke", "checkpoint_seconds=7")
    assert re.search(r"pretrain +15\n", out) and f"output: {target}" not in out


def test_show_leads_from_a_printed_number_to_run_rule_function_and_sources(paperlm):
    out = paperlm("show", "mixln_table1", "--cell", "Mix-LN,LLaMA-130M", "--config", "scale=paper").stdout
    run = next(iter(r for r in Project({"scale": "paper"}).runs if r.startswith("llama_130m-mix_ln-s0")))
    for expected in ("26.07", run, "workflow/rules/pretrain.smk", "paperlm.train.loop.pretrain", "mix_ln.MixLN"):
        assert expected in out
    assert re.search(r"peak_lr +0.001 +\[P\] Table 7", out)
    for path in ("workflow/rules/pretrain.smk", "src/paperlm/train/loop.py"):
        assert (ROOT / path).is_file()


def test_show_names_the_nearest_cell(paperlm):
    done = paperlm("show", "mixln_table1", "--cell", "Mix-LN,LLaMA-13M")
    assert done.returncode == 2 and "did you mean 'Mix-LN,LLaMA-130M'" in done.stderr


def test_every_verb_explains_itself(paperlm):
    verbs = re.findall(r"^    ([a-z-]+)\b", paperlm("--help").stdout, re.MULTILINE)
    known = {"prepare-data", "pretrain", "table", "curves", "figure", "measure", "summary", "show", "bench"}
    known |= {"probe-ranks"}
    assert known == set(verbs)


# -- cards and threads ----


def test_on_gpus_a_job_claims_so_many_threads_that_jobs_never_outnumber_cards(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    jobs = Jobs(Project({"scale": "gpu", "run_missing": "no"}))
    assert [jobs.threads_per_run(cores) for cores in (8, 2, 1, None)] == [4, 1, 1, 1]
    assert Jobs(Project({"scale": "tiny"})).threads_per_run(8) == 1


def test_two_jobs_take_two_cards_and_a_third_waits(monkeypatch, tmp_path):
    import os

    from paperlm.train.gpu_lock import one_gpu

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    for name in ("RANK", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    with one_gpu(folder=tmp_path) as first:
        assert first == os.environ["CUDA_VISIBLE_DEVICES"] == "4"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
        with one_gpu(folder=tmp_path) as second:
            assert second == "7"
            code = (
                "import pathlib, sys; from paperlm.train.gpu_lock import one_gpu\n"
                "with one_gpu(folder=pathlib.Path(sys.argv[1])) as card: print(card)"
            )
            environment = job_environment(CUDA_VISIBLE_DEVICES="4,7")
            third = subprocess.Popen(
                [sys.executable, "-c", code, tmp_path], env=environment, stdout=subprocess.PIPE, text=True
            )
            time.sleep(2.5)
            assert third.poll() is None, "no card is free"
        assert third.communicate(timeout=30)[0].strip() == "7"


# -- one environment ----


def pins(lines: list[str]) -> dict[str, str]:
    found = (re.fullmatch(r"([\w.-]+)==([\w.]+)", line.strip()) for line in lines)
    return {m[1].lower().replace("_", "-"): m[2] for m in found if m}


def test_conda_environment_package_metadata_and_lock_name_the_same_versions():
    lock = pins((ROOT / "requirements.lock").read_text().splitlines())
    conda = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    pip = pins(next(d["pip"] for d in conda if isinstance(d, dict)))
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = metadata["optional-dependencies"]
    bounds = dict(re.split(">=", d) for d in [*metadata["dependencies"], *extras["tables"], *extras["dev"]])
    bounds = {name.lower(): tuple(map(int, version.split("."))) for name, version in bounds.items()}
    assert pip.keys() == bounds.keys()
    for name, version in pip.items():
        assert lock[name] == version, f"{name}: environment.yml and requirements.lock differ"
        assert tuple(int(p) for p in re.findall(r"\d+", version)) >= bounds[name], f"{name} is below pyproject's bound"
    card = {"torch", "triton", "snakemake", "datasets", "lm-eval", "trl", "pandas", "seaborn"}
    assert card <= pip.keys()


def test_the_lock_holds_exact_versions_and_nothing_else():
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines) and len(lines) > 100


def test_this_interpreter_runs_the_locked_versions():
    import importlib.metadata

    lock = pins((ROOT / "requirements.lock").read_text().splitlines())
    for name in ("torch", "transformers", "snakemake", "datasets", "pydantic", "tokenizers"):
        assert importlib.metadata.version(name).partition("+")[0] == lock[name]


def test_the_folder_of_kernels_is_not_importable_as_a_package_inside_a_job(tmp_path):
    code = (
        "import importlib.util as u; s = u.find_spec('kernels'); print(list(s.submodule_search_locations) if s else [])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=job_environment(), cwd=ROOT, check=True
    )
    assert str(ROOT) not in out.stdout


def test_what_a_job_is_told_is_what_the_specification_says():
    project = Project({"scale": "smoke"})
    for run_id, run in project.runs.items():
        assert type(run).model_validate(json.loads(json.dumps(run.canonical()))).run_id == run_id
