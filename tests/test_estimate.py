"""How long a plan takes: what counts, on how many cores or cards, and by which machine's costs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import job_environment

from paperlm.errors import RecordError
from paperlm.evidence import ranked
from paperlm.files import write_sealed
from paperlm.plan.costs import WHAT as COSTS
from paperlm.plan.costs import Costs, like, write_costs
from paperlm.plan.estimate import estimate, expectation, print_plan, stated_cores
from paperlm.plan.project import ROOT, Project
from paperlm.plan.workflow import Workflow
from paperlm.record import calibration
from paperlm.record.calibration import Calibration, calibrated, step_seconds, stored
from paperlm.record.environment import cpu_name
from paperlm.record.places import CALIBRATION
from paperlm.tables.claims import Verdict
from paperlm.tables.needs import Evidence

OTHER = "a processor of another machine"
TABLE = "mixln_table1"


def plan_of(root: Path, scale: str = "tiny") -> Workflow:
    return Workflow(Project({"scale": scale}, root))


def record(
    root: Path, job_id: str, kind: str, seconds: float, device="CPU", scale="tiny", flops: float | None = None, **head
) -> None:
    path = root / f"results/{scale}/{kind}/{job_id}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    environment = {"cpu": head.pop("cpu", cpu_name()), "device": device}
    cost = {"wall_seconds": seconds, "flops": flops}
    path.write_text(json.dumps({"kind": kind, "job_id": job_id, "cost": cost, "environment": environment, **head}))


def reference(root: Path, cpu: str = OTHER, step: float = 0.05, **seconds: dict[str, float]) -> Path:
    path = root / "docs/reference/tiny/costs.json"
    path.parent.mkdir(parents=True)
    machine = Calibration(cpu=cpu, date="2026-11-23", step_seconds=step)
    write_sealed(path, COSTS, {"machine": machine.model_dump(), "seconds": seconds})
    return path


def calibrate(root: Path, step: float, cpu: str | None = None) -> None:
    found = Calibration(cpu=cpu or cpu_name(), date="2026-11-24", step_seconds=step)
    write_sealed(root / CALIBRATION, calibration.WHAT, found.model_dump())


# -- what counts, and side by side ----


def test_jobs_on_a_cpu_are_divided_by_the_cores_that_are_given(root):
    plan = plan_of(root)
    record(root, "llama_9m-x-s0-00000000", "pretrain", 60.0)
    assert len(plan.project.jobs_of(TABLE)) == 20
    found = [expectation(plan, [TABLE], cores, None) for cores in (1, 2, 4)]
    assert all(f"about {minutes} minutes on" in line for minutes, line in zip((20, 10, 5), found, strict=True))
    assert "20 jobs to make" in found[0] and "on 1 core by recorded costs (20 pretrain)" in found[0]


def test_more_cores_than_jobs_do_not_shorten_the_longest_job(root):
    record(root, "llama_9m-x-s0-00000000", "pretrain", 180.0)
    assert "about 3 minutes on 64 cores" in expectation(plan_of(root), [TABLE], 64, None)


def test_a_chain_of_jobs_takes_as_long_as_its_links_together(root):
    for kind, minutes in (("pretrain", 3), ("sft", 4), ("lm_eval", 5)):
        record(root, "llama_9m-x-s0-00000000", kind, 60.0 * minutes)
    assert "about 12 minutes on 99 cores" in expectation(plan_of(root), ["mixln_table2"], 99, None)


@pytest.mark.parametrize(("cards", "minutes", "on"), [("0,1", 9, "2 GPUs"), ("0", 18, "1 GPU"), ("", 18, "1 GPU")])
def test_jobs_that_need_a_gpu_share_the_gpus_whatever_cores_there_are(root, monkeypatch, cards, minutes, on):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", cards)
    plan = Workflow(Project({"scale": "gpu", "run_missing": "yes"}, root))
    count = len(plan.project.jobs_of(TABLE))
    record(root, "llama_9m-x-s0-00000000", "pretrain", 60.0 * 18 / count, device="NVIDIA H200", scale="gpu")
    assert f"about {minutes} minutes on {on} by recorded costs" in expectation(plan, [TABLE], 8, None)


def test_a_plan_without_a_job_says_that_a_card_or_a_word_is_missing_and_what_is_made_elsewhere(root, monkeypatch):
    monkeypatch.setattr("paperlm.plan.state.visible_gpus", lambda: [])
    asked = Workflow(Project({"scale": "paper", "run_missing": "yes"}, root))
    jobs = expectation(asked, ["bitnet_table1"], 1, None)
    assert re.search(r"^\d+ jobs to make; ", jobs)
    assert re.search(r"\n  \d+ pretrain of .*: \d+ GPUs each, \d+ GB of memory, .* hours", jobs)
    for config, why in (({}, "no GPU is seen on this machine"), ({"run_missing": "no"}, "run_missing=no")):
        plan = Workflow(Project({"scale": "paper", **config}, root))
        line, _, more = expectation(plan, ["bitnet_table1"], 1, None).partition("\n")
        assert line == f"nothing to make at scale paper, since {why}; elsewhere, or with --config run_missing=yes:"
        assert more == jobs


def test_the_nodes_of_a_cluster_count_in_place_of_this_machines_cores(root):
    record(root, "llama_9m-x-s0-00000000", "pretrain", 60.0)
    assert "about 5 minutes with 4 jobs at a time" in expectation(plan_of(root), [TABLE], 1, 4)


def test_measurements_are_counted_and_what_they_took_is_read_from_their_rows(root):
    plan = plan_of(root)
    cases = plan.to_measure("cce_table1")
    assert cases and estimate(plan, ["cce_table1"], "stored").kinds == {"measure": [None] * len(cases)}
    assert "no record says how long measure takes" in expectation(plan, ["cce_table1"], 2, None)
    (op, case), *rest = cases
    rows = root / f"results/tiny/bench/{op}/another.jsonl"
    rows.parent.mkdir(parents=True)
    row = {"op": op, "case": "another", "device": f"cpu ({cpu_name()}, 1 thread)", "case_seconds": 120.0}
    rows.write_text(json.dumps(row) + "\n")
    assert estimate(plan, ["cce_table1"], "stored").kinds == {"measure": [120.0] * len(cases)}
    rows.rename(rows.with_name(f"{case}.jsonl"))
    assert plan_of(root).to_measure("cce_table1") == rest, "what is measured is not measured again"


def test_figures_of_measurements_need_those_of_their_table(root):
    plan = plan_of(root)
    (figure,) = (n for n, (_, f) in plan.project.figures.items() if f.table == "cce_table1")
    assert plan.to_measure(figure) == plan.to_measure("cce_table1")
    assert set(plan.to_measure()) == {pair for name in plan.project.exhibits for pair in plan.to_measure(name)}


def test_a_run_on_a_cpu_is_never_timed_by_a_card(root):
    shutil.copytree(ROOT / "paper_tables/records/gpu/pretrain", root / "paper_tables/records/gpu/pretrain")
    project = Project({"scale": "tiny"}, root)
    branch = next(job.of for job in project.jobs_of("bitnet_switch") if job.of.kind == "continue_pretrain")
    assert Costs(project, "none").of_job(branch) is None
    at_paper = Project({"scale": "paper", "run_missing": "yes"}, root)
    branch = next(job.of for job in at_paper.jobs_of("bitnet_switch") if job.of.kind == "continue_pretrain")
    assert Costs(at_paper, "none").of_job(branch) > 3600, "at the pace of pre-trainings on a card"


def test_jobs_of_the_like_come_before_others_of_the_kind(root):
    plan = plan_of(root)
    first, *others = plan.project.jobs_of(TABLE)
    record(root, first.job_id, "pretrain", 10.0)
    record(root, "llama_9m-x-s0-00000000", "pretrain", 1000.0)
    record(root, "llama_9m-x-s1-00000000", "pretrain", 2000.0)
    costs = Costs(plan.project, "stored")
    assert costs.of_job(first) == 10.0 and costs.of_job(others[0]) == 1000.0


def test_a_job_that_was_blocked_says_nothing_of_what_one_takes(root):
    plan = plan_of(root)
    record(root, "llama_9m-x-s0-00000000", "pretrain", 0.1, outcome="blocked")
    assert Costs(plan.project, "stored").of_job(plan.project.jobs_of(TABLE)[0]) is None


# -- the reference's costs, and this machine ----


def test_costs_of_another_machine_are_taken_times_the_ratio_of_the_calibrations(root):
    plan = plan_of(root)
    job = plan.project.jobs_of(TABLE)[0]
    reference(root, pretrain={like(job.job_id): 30.0})
    calibrate(root, step=0.15)
    costs = Costs(plan.project, "stored")
    assert costs.of_job(job) == pytest.approx(90.0)
    assert costs.basis == f"by those of {OTHER} on 2026-11-23, times 3 for this machine"


def test_the_processor_is_asked_for_its_name_once(monkeypatch):
    """Costs are compared with it a hundred thousand times in a ranking."""
    name = cpu_name()
    monkeypatch.setattr(Path, "read_text", lambda *of: pytest.fail("it was asked again"))
    assert cpu_name() == name


def test_a_record_made_here_wins_over_the_reference_and_is_not_scaled(root):
    plan = plan_of(root)
    job = plan.project.jobs_of(TABLE)[0]
    reference(root, pretrain={like(job.job_id): 30.0})
    calibrate(root, step=0.15)
    record(root, job.job_id, "pretrain", 50.0)
    costs = Costs(plan.project, "stored")
    assert costs.of_job(job) == 50.0 and costs.basis == "by recorded costs"


def test_the_references_job_of_the_like_says_more_than_any_of_the_kind_made_here(root):
    plan = plan_of(root)
    job = plan.project.jobs_of(TABLE)[0]
    reference(root, cpu=cpu_name(), pretrain={like(job.job_id): 30.0})
    record(root, "llama_9m-x-s0-00000000", "pretrain", 999.0)
    assert Costs(plan.project, "stored").of_job(job) == 30.0


def test_a_record_that_came_from_the_references_machine_is_scaled_like_the_reference(root):
    plan = plan_of(root)
    job = plan.project.jobs_of(TABLE)[0]
    reference(root, pretrain={"another": 1.0})
    calibrate(root, step=0.1)
    record(root, job.job_id, "pretrain", 50.0, cpu=OTHER)
    assert Costs(plan.project, "stored").of_job(job) == pytest.approx(100.0)


def test_a_dry_run_measures_nothing_and_names_the_machine_whose_costs_it_shows(root, monkeypatch):
    monkeypatch.setattr(calibration, "step_seconds", lambda: pytest.fail("measured"))
    reference(root, pretrain={"another": 60.0})
    line = expectation(plan_of(root), [TABLE], 2, None)
    assert f"about 10 minutes on 2 cores by those of {OTHER} on 2026-11-23, as they are: python -m paperlm plan" in line
    assert not (root / CALIBRATION).exists()


def test_paperlm_plan_measures_this_machine_once_and_keeps_it(root, monkeypatch, capsys):
    found = []
    monkeypatch.setattr(calibration, "step_seconds", lambda: found.append(1) or 0.1)
    reference(root, pretrain={"another": 60.0})
    for _ in range(2):
        print_plan(Project({"scale": "tiny"}, root), [TABLE], cores=4)
        assert "about 10 minutes on 4 cores" in capsys.readouterr().out.replace("\n", " ")
    assert found == [1] and stored(root).step_seconds == 0.1


def test_this_machine_is_not_measured_where_records_of_its_own_say_enough(root, monkeypatch):
    monkeypatch.setattr(calibration, "step_seconds", lambda: pytest.fail("measured"))
    reference(root, cpu=cpu_name(), pretrain={"another": 60.0})
    assert estimate(plan_of(root), [TABLE], "measured").kinds == {"pretrain": [60.0] * 20}


@pytest.mark.parametrize("kept", ["", "{", '{"cpu": "x"}', "another machine's"])
def test_a_calibration_that_is_none_or_another_machines_is_made_again(root, monkeypatch, kept):
    monkeypatch.setattr(calibration, "step_seconds", lambda: 0.25)
    calibrate(root, 0.5, cpu=OTHER)
    if kept != "another machine's":
        (root / CALIBRATION).write_text(kept)
    assert stored(root) is None and calibrated(root).step_seconds == 0.25 == stored(root).step_seconds


def test_the_calibration_leaves_threads_and_random_numbers_as_they_were(monkeypatch):
    import torch

    monkeypatch.setattr(calibration, "STEPS", 2)
    torch.manual_seed(5)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    assert 0 < step_seconds() < 5
    assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == threads


def test_the_costs_that_are_taken_are_medians_of_the_records_of_this_processor(root, monkeypatch):
    monkeypatch.setattr(calibration, "step_seconds", lambda: 0.1)
    project = Project({"scale": "tiny"}, root)
    for seed, seconds in enumerate((10.0, 50.0, 20.0)):
        record(root, f"llama_9m-x-s{seed}-0000000{seed}", "pretrain", seconds)
    record(root, "llama_8m-x-s0-00000000", "pretrain", 7.0, cpu=OTHER)
    record(root, "sft-llama_9m-x-s0-00000000", "sft", 5.0)
    write_costs(project)
    written = json.loads((root / "docs/reference/tiny/costs.json").read_text())
    assert written["seconds"] == {"pretrain": {"llama_9m-x": 20.0}, "sft": {"sft-llama_9m-x": 5.0}}
    assert written["machine"] == {"cpu": cpu_name(), "date": stored(root).date, "step_seconds": 0.1}


def test_costs_of_jobs_that_were_not_made_here_are_kept_as_this_machine_would_take_them(root, monkeypatch):
    monkeypatch.setattr(calibration, "step_seconds", lambda: 0.1)
    project = Project({"scale": "tiny"}, root)
    here, other = sorted({like(job) for job in project.jobs if job.startswith("llama_71m-")})[:2]
    path = reference(
        root, step=0.4, pretrain={here: 99.0, other: 8.0, "llama_9m-declared_no_more": 8.0}, measure={"op/x": 2.0}
    )
    record(root, f"{here}-s0-00000000", "pretrain", 7.0)
    write_costs(project)
    written = json.loads(path.read_text())
    assert written["seconds"] == {"measure": {"op/x": 0.5}, "pretrain": {here: 7.0, other: 2.0}}
    assert written["machine"]["step_seconds"] == 0.1
    record(root, f"{other}-s0-00000000", "pretrain", 3.0)
    write_costs(project)
    written = json.loads(path.read_text())["seconds"]
    assert written == {"measure": {"op/x": 0.5}, "pretrain": {here: 7.0, other: 3.0}}, (
        "of this CPU they stay as they are"
    )


def test_no_costs_are_taken_where_a_card_made_the_records(root):
    project = Project({"scale": "gpu"}, root)
    record(root, "llama_9m-x-s0-00000000", "pretrain", 7.0, device="NVIDIA H200", scale="gpu")
    write_costs(project)
    assert not (root / "docs/reference/gpu").exists() and not (root / CALIBRATION).exists()


@pytest.mark.parametrize("content", [{"machine": {}, "seconds": {}}, {"machine": {}, "seconds": {"kind": {"x": "y"}}}])
def test_costs_of_a_reference_that_are_none_are_named_with_the_remedy(root, content):
    write_sealed(reference(root, pretrain={"x": 1.0}), COSTS, content)
    with pytest.raises(RecordError, match=r"costs\.json: no costs of a reference .*git checkout"):
        Costs(Project({"scale": "tiny"}, root), "stored")


@pytest.mark.parametrize(("change", "said"), [("{", "truncated or altered"), ("1.5", "truncated or altered")])
def test_damaged_costs_of_a_reference_are_named_with_the_remedy(root, change, said):
    path = reference(root, pretrain={"x": 1.0})
    path.write_text(change if change == "{" else path.read_text().replace("1.0", change))
    with pytest.raises(RecordError, match=rf"costs\.json: {said}; restore it with git checkout"):
        Costs(Project({"scale": "tiny"}, root), "stored")


def test_no_exhibit_is_built_from_the_references_costs(root):
    def asked():
        plan = plan_of(root)
        return {name: (plan.inputs(name), plan.exhibit_digest(name)) for name in plan.project.exhibits}

    verdict = Verdict("undecided", missing=(("M1", ("Pre-LN", "LLaMA-71M")),))
    said = lambda: Evidence(plan_of(root).project).sentence({"M1": TABLE}, verdict)  # noqa: E731
    before, sentence = asked(), said()
    reference(root, pretrain={"another": 60.0})
    assert asked() == before and not any("reference" in path for inputs, _ in before.values() for path in inputs)
    assert said() == sentence == "1 job, no record says how long", "nor is what a claim says would decide it"


def test_what_to_make_next_is_ranked_by_the_references_costs_where_no_record_says(root):
    project = plan_of(root).project
    assert ranked(project, hours=10.0)[0] == []
    reference(root, cpu=cpu_name(), pretrain={"another": 60.0})
    steps, _ = ranked(project, hours=10.0)
    assert steps and steps[0].hours == pytest.approx(len(steps[0].jobs) / 60)


def test_an_estimate_from_the_reference_loads_no_torch(root):
    reference(root, pretrain={"another": 60.0})
    code = (
        "import sys, pathlib; from paperlm.plan.estimate import expectation; from paperlm.plan.project import Project; "
        "from paperlm.plan.workflow import Workflow; "
        "print(expectation(Workflow(Project({'scale': 'tiny'}, pathlib.Path(sys.argv[1]))), [], 2, None)); "
        "assert 'torch' not in sys.modules"
    )

    done = subprocess.run([sys.executable, "-c", code, root], env=job_environment(), capture_output=True, text=True)
    assert done.returncode == 0 and OTHER in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "cores", "stated"),
    [
        (["-n"], 1, None),
        (["-n", "--cores", "1"], 1, 1),
        (["-n", "--cores=1"], 1, 1),
        (["-n", "-c1"], 1, 1),
        (["-n", "--profile", "p"], 6, 6),
        (["-n", "--config", "scale=tiny"], 1, None),
    ],
)
def test_a_dry_run_without_cores_is_about_all_cores_of_this_machine(words, cores, stated):
    assert stated_cores(words, cores) == stated


def test_a_size_without_a_record_takes_time_in_proportion_to_its_operations():
    """At scale gpu 71M and 130M have records, 1B has none: its operations are what its time follows from."""
    project = Project({"scale": "gpu", "run_missing": "yes"})
    costs = Costs(project, "none")
    jobs = {cell.column: cell.jobs[0] for cell in project.cells("mixln_table1") if cell.row == "Pre-LN"}
    seconds = {size: costs.of_job(job) for size, job in jobs.items()}
    record = json.loads((project.root / project.places.committed(jobs["LLaMA-130M"])).read_bytes())
    assert jobs["LLaMA-130M"].flops() == pytest.approx(record["cost"]["flops"]), "as the record counts them"
    assert seconds["LLaMA-130M"] == pytest.approx(record["cost"]["wall_seconds"], rel=0.2)
    ratio = jobs["LLaMA-1B"].flops() / jobs["LLaMA-130M"].flops()
    assert seconds["LLaMA-1B"] == pytest.approx(ratio * seconds["LLaMA-130M"], rel=0.3) and ratio > 4


def test_runs_that_shared_a_card_with_others_do_not_make_the_estimate_longer(root):
    plan = plan_of(root)
    job = next(job for job in plan.project.jobs.values() if job.kind == "pretrain")
    for seed, seconds in enumerate((10.0, 11.0, 20.0, 21.0, 30.0)):
        record(root, f"llama_9m-x-s{seed}-0000000{seed}", "pretrain", seconds, flops=job.flops())
    assert Costs(plan.project, "none").of_job(job) == pytest.approx(11.0)


def test_a_branch_without_a_record_of_its_name_goes_at_the_pace_of_pre_training(root):
    """Its own updates are too few to tell a pace by."""
    plan = plan_of(root)
    branch = next(job for job in plan.project.jobs.values() if job.kind == "continue_pretrain")
    record(root, "of-another-s0-00000001", "continue_pretrain", 90.0, flops=branch.flops() / 10)
    record(root, "llama_9m-x-s0-00000000", "pretrain", 12.0, flops=3e12)
    assert Costs(plan.project, "none").of_job(branch) == pytest.approx(branch.flops() * 12.0 / 3e12)


def test_what_is_said_in_place_of_a_plan_is_plain_text_on_a_terminal_too(root, monkeypatch, capsys):
    monkeypatch.setattr("paperlm.plan.state.visible_gpus", lambda: [])
    monkeypatch.setenv("FORCE_COLOR", "1")
    print_plan(Project({"scale": "paper"}, root), ["bitnet_table1"], 1)
    said = capsys.readouterr().out
    assert said.startswith("nothing to make at scale paper, since ") and "\x1b" not in said.partition("\n")[0]


def test_a_kind_that_computes_on_no_card_asks_for_none_and_one_without_records_says_what_it_is_granted():
    plan = Workflow(Project({"scale": "paper", "run_missing": "yes"}))
    found = estimate(plan, ["neuzip_table4", "neuzip_table3b_speed"], "stored")
    lines = {line.split()[1].rstrip(":"): line for line in found.asks()}
    assert lines["hub_model"].startswith(f"{len(found.kinds['hub_model'])} hub_model: no GPU, 96 GB")
    assert "1 GPU each" in lines["drawn_speed"]
    (asked,) = {plan.job_size(n.name).runtime for n in found.needs if n.kind == "drawn_speed"}
    said = f"no record says how long, at most {asked / 60:,.0f} hours each are asked for"
    assert lines["drawn_speed"].endswith(said)
