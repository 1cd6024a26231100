"""How long jobs of scale paper take, of which no record is: by those of scale gpu."""

from __future__ import annotations

import gzip
import json

import pytest
from tokenizers import Tokenizer

from paperlm.data.registry import registry
from paperlm.evaluate.tasks import TASKS
from paperlm.jobs import Job, parse_job
from paperlm.models.sizes import SIZES
from paperlm.plan.costs import Costs
from paperlm.plan.estimate import estimate
from paperlm.plan.project import ROOT, Project
from paperlm.plan.workflow import Workflow


def test_a_fine_tuning_at_paper_goes_at_the_pace_of_its_kind_at_scale_gpu():
    """Records of trl count no operations: those of the job stand for them, all texts being as long as they may."""
    project = Project({"scale": "paper", "run_missing": "yes"})
    costs, jobs = Costs(project, "stored"), project.jobs_of("mixln_table2")
    tunings = [job.of for job in jobs if job.of.kind == "sft" and job.of.of.kind == "pretrain"]
    small, large = (next(job for job in tunings if job.of.size == size) for size in ("250M", "1B"))
    per_token = [job.flops() / (job.updates(job.examples) * job.batch * job.block) for job in (small, large)]
    weights = [job.of.flops() / (job.of.steps * job.of.global_batch * job.of.seq_len) for job in (small, large)]
    assert per_token == pytest.approx(weights, rel=0.02), "as pre-training counts a token, with another length"
    (path,) = (project.root / "paper_tables/records/gpu/sft").glob("*_250m-pre_ln-*.json")
    record = json.loads(path.read_bytes())
    assert record["outcome"] == "trained"
    expected = record["cost"]["wall_seconds"] * small.flops() / parse_job(record["job"]).flops()
    assert costs.of_job(small) == pytest.approx(expected, rel=0.2), "not that of one that diverged and stopped early"
    assert costs.of_job(large) == pytest.approx(costs.of_job(small) * large.flops() / small.flops(), rel=0.5)


def test_what_nobody_counts_takes_as_long_as_the_longest_there_in_proportion_to_the_model():
    project = Project({"scale": "paper", "run_missing": "yes"})
    costs = Costs(project, "stored")
    size = lambda job: job.of.of.size if job.of.kind == "sft" else job.of.size  # noqa: E731
    jobs = {size(job): job for job in project.jobs_of("mixln_table2") if job.kind == "lm_eval"}
    records = [path for path in (project.root / "paper_tables/records/gpu/lm_eval").glob("*_250m-*.json")]
    longest = max(json.loads(path.read_bytes())["cost"]["wall_seconds"] for path in records)
    assert longest <= costs.of_job(jobs["250M"]) <= 2.5 * longest, "or that of a model half as large"
    assert 3 < costs.of_job(jobs["1B"]) / costs.of_job(jobs["250M"]) < 6
    assert "lm_eval as the longest of scale gpu" in costs.basis


# -- models from elsewhere ----


@pytest.fixture(scope="module")
def open_models() -> tuple[Costs, dict[str, Job]]:
    """The costs of scale paper, and the jobs of both figures of the papers' open models by name without hash."""
    project = Project({"scale": "paper", "run_missing": "yes"})
    jobs = [job for name in ("mixln_figure2ab", "lns_figure2") for job in project.jobs_of(name)]
    every = {one.slug(): one for job in jobs for one in (job, *job.ancestors())}
    return Costs(project, "stored"), every


def test_a_removal_of_blocks_takes_as_many_operations_as_it_reads_tokens_with_and_without_each_block(open_models):
    costs, jobs = open_models
    seven, thirteen = (jobs[f"block_removal-llama-2-{size}-hf-mmlu"] for size in ("7b", "13b"))
    parameters, blocks = (thirteen.weight_count() / seven.weight_count()), 41 / 33
    assert thirteen.flops() / seven.flops() == pytest.approx(parameters * blocks, rel=1e-6)
    questions = 14_042 * 6 * 102  # of MMLU, behind five examples each
    texts = seven.documents * seven.text_tokens
    assert seven.flops() == pytest.approx(33 * 2 * 6_738_415_616 * (questions + texts), rel=1e-6)
    assert costs.of_job(thirteen) / costs.of_job(seven) == pytest.approx(parameters * blocks, rel=1e-6)
    fewer = seven.model_copy(update={"items": 57})
    assert fewer.flops() < seven.flops() / 100


def test_a_removal_at_paper_goes_at_the_best_pace_of_its_kind_at_scale_gpu(open_models):
    costs, jobs = open_models
    heads = [
        json.loads(path.read_bytes())
        for path in (Project({"scale": "gpu"}).root / "paper_tables/records/gpu/block_removal").glob("*.json")
    ]
    rate = min(head["cost"]["wall_seconds"] / parse_job(head["job"]).flops() for head in heads)
    job = jobs["block_removal-llama-2-7b-hf-mmlu"]
    assert costs.of_job(job) == pytest.approx(rate * job.flops())
    spans = jobs["block_removal-bert-large-uncased-whole-word-masking-finetuned-squad-squad"]
    assert 600 < costs.of_job(spans) < 7200, "10,570 questions, 25 times, through a third of a billion weights"


def test_angles_and_reading_of_a_model_from_elsewhere_take_time_in_proportion_to_its_weights(open_models):
    costs, jobs = open_models
    large, small = (jobs[f"angular_distance-{name}"] for name in ("llama-2-7b-hf", "bert-large-uncased"))
    assert large.flops() / small.flops() == pytest.approx(6_738_415_616 / 335_174_458)
    read = [costs.of_job(jobs[name]) for name in ("llama-2-7b-hf", "llama-2-13b-hf")]
    assert read[1] / read[0] == pytest.approx(13_015_864_320 / 6_738_415_616)
    assert 60 < read[0] < 3600 * 4, "as a model of 135M is read, not one of 260,000 weights"


def test_a_job_on_a_model_that_is_never_read_is_over_at_once(open_models):
    costs, jobs = open_models
    assert "never" in jobs["qwen-7b"].never()
    assert costs.of_job(jobs["qwen-7b"]) == costs.of_job(jobs["block_removal-qwen-7b-mmlu"]) == 0


def test_every_model_from_elsewhere_that_can_be_read_says_how_large_it_is():
    for name, entry in registry().models.items():
        assert entry.unreadable or entry.size, f"{name}: give its parameters and blocks, with their source"
    of_ours = {"meta-llama/Llama-2-7b-hf": "7B", "meta-llama/Llama-2-13b-hf": "neuzip_13B"}
    for name, size in of_ours.items():
        found = registry().models[name].size
        assert (found.parameters, found.blocks) == (SIZES[size].parameters, SIZES[size].n_layers)


def test_tokens_of_a_task_are_those_of_its_items_in_the_package():
    """About: T5's tokenizer stands for that of every model."""
    path = ROOT / "src/paperlm/data/bundled/eval/arc_easy.test.jsonl.gz"
    items = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    tokenizer = Tokenizer.from_file(str(ROOT / "src/paperlm/data/tokenizers/t5/tokenizer.json"))
    asked = [f"Question: {i['question']}\nAnswer: {option}" for i in items for option in i["choices"]["text"]]
    found = sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in asked)
    task = TASKS["arc_easy"]
    assert len(items) == task.bundled
    assert found == pytest.approx(task.bundled * task.passes * task.tokens, rel=0.02)


def test_no_removal_of_blocks_is_planned_longer_than_it_is_granted():
    plan = Workflow(Project({"scale": "paper", "run_missing": "yes"}))
    needs = [need for need in estimate(plan, ["mixln", "lns"], "none").needs if need.kind == "block_removal"]
    assert max(need.seconds for need in needs) > 100 * 3600 and all(need.seconds < 60 * need.granted for need in needs)
