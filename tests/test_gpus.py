"""GPUs of each job: how many by kind and size and for what reason, what is refused, and how long jobs take on them."""

from __future__ import annotations

import json
import re

import pytest
from support_declarations import edit, refused
from support_workflow import snakemake

from paperlm.errors import SpecError
from paperlm.jobs import job_kinds
from paperlm.models.sizes import ALL_SIZES
from paperlm.plan.costs import Costs
from paperlm.plan.estimate import estimate, expectation, print_plan
from paperlm.plan.project import Project
from paperlm.plan.workflow import Workflow

PAPER = "workflow/scales/paper.yaml"
BYTES = {"pure_bf16": 2, "fp32_master": 4}
"Of a weight, its gradient and each of Adam's two moments."


@pytest.fixture(scope="module")
def paper() -> Workflow:
    return Workflow(Project({"scale": "paper", "run_missing": "yes"}))


@pytest.fixture(scope="module")
def costs(paper) -> Costs:
    return Costs(paper.project, "none")


def trainings(plan: Workflow) -> dict[str, list]:
    """Size -> pre-trainings of scale paper with Adam, which keep all their state on each card."""
    found: dict[str, list] = {}
    for job in plan.state.todo().values():
        if job.kind == "pretrain" and job.optimizer in ("adam", "adamw"):
            found.setdefault(job.size, []).append(job)
    return found


# -- how many, and why ----


def test_kinds_that_compute_on_a_processor_have_no_card_and_kinds_of_one_process_at_most_one(paper):
    asked: dict[str, set[int]] = {}
    for job_id, job in paper.state.todo().items():
        asked.setdefault(job.kind, set()).add(paper.job_size(job_id).gpus.value)
    none = {kind for kind, counts in asked.items() if counts == {0}}
    assert none == {"hub_model", "normal_entropy", "stored_bytes", "weight_entropy"}
    several = {kind for kind, counts in asked.items() if max(counts) > 1}
    assert several == {"pretrain", "continue_pretrain"}
    assert all(asked[kind] == {1} for kind in asked.keys() - none - several) and "lm_eval" in asked


@pytest.mark.parametrize(("scale", "on_card"), [("smoke", 0), ("tiny", 0), ("gpu", 1)])
def test_at_scales_of_one_machine_a_job_has_at_most_one_card(scale, on_card):
    resources = Project({"scale": scale}).scale.resources
    for kind, cls in job_kinds().items():
        for size in ("", *ALL_SIZES):
            assert resources.of(kind, size).gpus.value == (on_card if cls.on_card else 0), (kind, size)


@pytest.mark.parametrize(("size", "printed"), [("130M", 200), ("250M", 200), ("1B", 200)])
def test_cards_of_a_published_launch_are_those_by_which_the_authors_batches_are_counted(paper, size, printed):
    """They evaluate on 10M tokens, 195.5 a sequence, in batches of all cards: so many are printed."""
    cell = next(cell for cell in paper.project.cells("mixln_table1") if (cell.row, cell.size) == ("Mix-LN", size))
    assert cell.values["published_batches"] == printed
    (job,) = cell.jobs
    gpus = paper.job_size(job.job_id).gpus
    assert gpus.source and 10e6 / (195.5 * job.loss_group * gpus.value) == pytest.approx(printed, rel=0.03)


def test_what_is_said_of_memory_and_days_is_so(paper, costs):
    """`108 GB on each` card: weights, gradients and moments; `120 days on one card`: by operations."""
    said = {"memory": 0, "time": 0}
    for size, jobs in trainings(paper).items():
        words = paper.job_size(jobs[0].job_id).gpus.why
        state = max(4 * BYTES[job.numerics] * ALL_SIZES[size].parameters for job in jobs) / 1e9
        if found := re.search(r"(\d+) GB (?:on each|of one)", words):
            said["memory"] += 1
            assert float(found[1]) == pytest.approx(state, abs=0.5), (size, state)
        longest = max(costs.of_job(job) for job in jobs) / 60
        if found := re.search(r"(\d+) (minutes|hours|days) (?:of one|on one|and)", words):
            said["time"] += 1
            unit = {"minutes": 1, "hours": 60, "days": 1440}[found[2]]
            assert float(found[1]) * unit == pytest.approx(longest, rel=0.15), (size, longest)
    assert said == {"memory": 6, "time": 7}


def test_the_state_of_every_training_fits_on_each_of_its_cards_and_in_main_memory(paper):
    """Cards hold all of it, in main memory each process makes the weights in float32, and one writes the state."""
    for size, jobs in trainings(paper).items():
        parameters = ALL_SIZES[size].parameters
        for job in jobs:
            asked = paper.job_size(job.job_id)
            weights = BYTES[job.numerics] * parameters
            assert 4 * weights < 120e9, "an H200 has 141 GB, and activations need some"
            processes = asked.gpus.value * (4 * parameters + 5e9)
            assert processes + 3 * weights < 1e6 * asked.mem_mb, size


def test_every_training_ends_in_its_minutes_with_half_as_much_to_spare(paper, costs):
    for job_id, job in paper.state.todo().items():
        if job.kind in ("pretrain", "continue_pretrain"):
            asked = paper.job_size(job_id)
            # As 9 cards are as fast as 10 at that scale.
            seconds = costs.of_job(job) / (1 if asked.gpus.value == 1 else 0.9 * asked.gpus.value)
            assert 1.5 * seconds < 60 * asked.runtime, (job_id, seconds / 60, asked.runtime)


def test_cards_of_every_training_share_its_batch_evenly(paper):
    for job_id, job in paper.state.todo().items():
        if job.kind == "pretrain":
            assert job.global_batch % paper.job_size(job_id).gpus.value == 0
            assert not job.unshared(paper.job_size(job_id).gpus.value)


# -- what is refused before any job ----

SIZE = {"mem_mb": 1000, "runtime": 10}


def jobs_with(**changed: dict) -> object:
    return lambda scale: scale["resources"]["jobs"].update({k.replace("__", "/"): SIZE | v for k, v in changed.items()})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (jobs_with(sft={"gpus": {"value": 2, "why": "a test"}}), "sft: a sft job runs in one process, .* not on 2"),
        (jobs_with(hub_model={"gpus": {"value": 1, "why": "a test"}}), "hub_model: .* computes on a processor"),
        (jobs_with(pretrain={"gpus": {"value": 2}}), "pretrain.gpus: say where so many GPUs are published"),
        (jobs_with(pretrain={"gpus": 2}), "pretrain.gpus"),
        (lambda s: s["resources"].pop("scaling"), "scaling is missing: it tells how fast the GPUs of pretrain/250M"),
        (lambda s: s["resources"]["gpus"].update(value=2), "gpus: 2 for all kinds: most run in one process"),
        (lambda s: s["resources"]["default"].update(gpus={"value": 1, "why": "a test"}), "default: .* leave them out"),
        (lambda s: s.update(device="cpu"), "resources.gpus: the scale computes on a cpu, so it is 0"),
    ],
)
def test_gpus_that_a_kind_cannot_use_or_that_have_no_reason_are_refused(root, change, message):
    edit(root, PAPER, change)
    refused(root, rf"paper\.yaml: .*{message}", "paper")


@pytest.mark.parametrize(
    ("key", "gpus", "message"),
    [
        ("pretrain__250M", 3, r"3 GPUs for pretrain/250M, .*: global_batch 512 does not split over 3 processes"),
        ("pretrain__neuzip_8B", 2, r"2 GPUs for pretrain/neuzip_8B, .*: (weights raw lie in stores|optimizer lomo)"),
        ("continue_pretrain__bitnet_3B", 5, r"5 GPUs for continue_pretrain/bitnet_3B, .*: global_batch 512"),
    ],
)
def test_gpus_that_cannot_share_a_job_are_refused_when_the_jobs_are_planned(root, key, gpus, message):
    edit(root, PAPER, jobs_with(**{key: {"gpus": {"value": gpus, "why": "a test"}}}))
    with pytest.raises(SpecError, match=rf"paper\.yaml: resources\.jobs: {message}.*; give it another number"):
        Workflow(Project({"scale": "paper", "run_missing": "yes"}, root))


# -- on this machine, and how long ----


@pytest.mark.parametrize(
    ("cards", "most"), [("", 8), ("0", 1), ("0,1,2", 2), ("0,1,2,3,4,5,6", 4), ("0,1,2,3,4,5,6,7,8", 8)]
)
def test_a_machine_of_fewer_cards_gives_a_job_the_most_of_them_that_share_its_batch(monkeypatch, cards, most):
    """512 sequences do not split over 3 or 7. A cluster is asked for all eight from every machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", cards)
    plan = Workflow(Project({"scale": "paper", "run_missing": "yes"}))
    job = next(job for job in plan.project.jobs_of("mixln_table1") if job.size == "1B")
    assert plan.gpus(job.job_id) == most and plan.gpus(job.job_id, here=False) == 8


def test_of_cards_that_are_granted_a_job_takes_the_most_that_can_share_it(paper):
    """However they were granted: by --set-resources, or what --resources left of the scale's number."""
    shared = next(job for job in paper.project.jobs_of("mixln_table1") if job.size == "1B")
    alone = next(job for job in paper.project.jobs_of("neuzip_table1") if job.kind == "pretrain")
    assert [paper.processes(shared.job_id, cards) for cards in (0, 1, 3, 4, 12)] == [1, 1, 2, 4, 8]
    assert [paper.processes(alone.job_id, cards) for cards in (0, 4)] == [1, 1]


def record(root, job, seconds: float, processes: int) -> None:
    path = root / f"results/paper/pretrain/{job.job_id.rpartition('-')[0]}-00000000.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    made = {"cpu": "a processor", "device": "NVIDIA H200"}
    cost = {"wall_seconds": seconds, "flops": job.flops(), "world_size": processes}
    path.write_text(json.dumps({"kind": "pretrain", "job_id": path.stem, "cost": cost, "environment": made}))


def test_two_cards_take_ten_eighteenths_of_the_time_of_one_and_a_record_of_two_says_the_same(root):
    edit(root, PAPER, lambda scale: scale["resources"]["scaling"].update(value=0.9))
    plan = Workflow(Project({"scale": "paper", "run_missing": "yes"}, root))
    job = next(job for job in plan.project.jobs_of("mixln_table1") if job.size == "250M")

    def needed() -> object:
        return next(need for need in estimate(plan, ["mixln_table1"], "none").needs if need.name == job.job_id)

    record(root, job, 18_000.0, 1)
    assert (needed().gpus, needed().seconds) == (2, pytest.approx(10_000.0))
    record(root, job, 10_000.0, 2)
    assert needed().seconds == pytest.approx(10_000.0)
    assert Costs(plan.project, "none").of_job(job) == pytest.approx(18_000.0), "on one card"


def test_jobs_of_several_cards_take_the_machine_for_themselves_in_the_time_of_the_whole(root, monkeypatch):
    """Each job takes an hour here. On nodes of a cluster those of 1B have eight cards, and a quarter of an hour."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    plan = Workflow(Project({"scale": "paper", "run_missing": "yes"}, root))
    for job in plan.project.jobs_of("mixln_table1"):
        record(root, job, 3600.0 * plan.project.scale.resources.speed(plan.gpus(job.job_id)), 1)
    needs = estimate(plan, ["mixln_table1"], "none").needs
    assert {round(need.seconds) for need in needs} == {3600}
    both = {need.size for need in needs if need.gpus == 2}
    alone = [need for need in needs if need.gpus == 1]
    assert both == {"250M", "1B"} and {need.size for need in alone} == {"71M", "130M"}
    hours = len(needs) - len(alone) + len(alone) / 2
    assert f"about {hours:.1f} hours on 2 GPUs" in expectation(plan, ["mixln_table1"], 8, None)
    large = sum(need.size == "1B" for need in needs)
    hours = (len(needs) - large + large / 4) / 4
    assert f"about {hours:.1f} hours with 4 jobs at a time" in expectation(plan, ["mixln_table1"], 8, 4)


def test_the_plan_lists_cards_memory_and_hours_of_every_job_by_name(paper, capsys):
    print_plan(paper.project, ["bitnet_table1"], 1, each=True)
    said = capsys.readouterr().out
    (line,) = re.findall(r"(?m)^llama_bitnet_7b-pre_ln-b158-s0-\w+: .*$", said)
    seconds = next(n.seconds for n in estimate(paper, ["bitnet_table1"], "none").needs if n.name in line)
    held = "at least 106 GB on each GPU without activations"
    assert line.endswith(f": 8 GPUs, 400 GB of memory, {held}, {seconds / 3600:,.1f} hours")
    assert 300 < seconds / 3600 < 500
    assert len(re.findall(r"(?m)GB of memory", said)) == len(paper.state.todo("bitnet_table1"))


# -- in the workflow ----


def blocks(out: str) -> dict[str, str]:
    """Name of each pre-training of a dry run -> what Snakemake prints of it."""
    return {b.split("wildcards: job=")[1].split()[0]: b for b in re.split(r"(?m)^\[", out) if "\nrule pretrain:" in b}


@pytest.mark.parametrize("more", [[], ["--set-resources=pretrain:gpu=4"]])
def test_a_job_of_several_cards_is_started_by_torchrun_with_as_many_processes_as_it_is_granted(more, paper):
    asked = ("-n", "-p", "--nolock", "paper_tables/mixln_table1.csv", *more)
    words = ("--config", "scale=paper", "run_missing=yes")
    out = snakemake(paper.project.root, *asked, *words, CUDA_VISIBLE_DEVICES="")
    found = blocks(out)
    assert found.keys() == {job.job_id for job in paper.project.jobs_of("mixln_table1")}
    for job_id, block in found.items():
        gpus = 4 if more else paper.job_size(job_id).gpus.value
        assert f" gpu={gpus}, " in block and " nodes=1, " in block
        several = re.search(
            r"python -m torch\.distributed\.run --standalone --nproc-per-node (\d+) -m paperlm run", block
        )
        assert (int(several[1]) if several else 1) == gpus
    assert {paper.job_size(job_id).gpus.value for job_id in found} == {1, 2, 8}
