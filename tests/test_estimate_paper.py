"""How long jobs of scale paper take, of which no record is: by those of scale gpu."""

from __future__ import annotations

import json

import pytest

from paperlm.jobs import parse_job
from paperlm.plan.costs import Costs
from paperlm.plan.project import Project


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
