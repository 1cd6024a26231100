"""Cut Cross-Entropy's figure 3: softmax probabilities by rank, the probe of a trained model, and the verdicts."""

from __future__ import annotations

import csv
import dataclasses

import numpy as np
import pytest
import torch
from support import smoke_run
from support_cce_training import ENVIRONMENT, ROWS, verdicts

from paperlm.errors import JobError
from paperlm.jobs import Inputs, Machine, run_job
from paperlm.jobs.rank_probability import RankProbability
from paperlm.plan.project import Project
from paperlm.plan.workflow import Workflow
from paperlm.probe.ranks import THRESHOLD, log_ranks, rank_curve
from paperlm.record.places import Places
from paperlm.record.record import Record, write_record
from paperlm.result import Cost, Series
from paperlm.train.distributed import World
from paperlm.train.language_model import LanguageModelling

CPU = Machine(device="cpu", progress=False)


def test_the_curve_of_ranks_is_that_of_each_softmax_sorted_by_itself():
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(333, 16, generator=generator), torch.randn(1500, 16, generator=generator)
    targets = torch.randint(1500, (333,), generator=generator)
    parts = iter([(hidden[:50], targets[:50]), (hidden[50:51], targets[50:51]), (hidden[51:], targets[51:])])
    curve, tokens = rank_curve(parts, weight, chunk=128)
    logits = (hidden.double() @ weight.double().T).numpy()
    softmax = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    means = np.sort(softmax, axis=1)[:, ::-1].mean(0)
    assert tokens == 333 and curve.ranks[0] == 1 and curve.ranks[-1] == 1500
    np.testing.assert_allclose(curve.mean_probability, means[np.array(curve.ranks) - 1], rtol=1e-4)
    large = softmax >= 2**-12
    assert curve.share_above == pytest.approx(large.mean(), abs=3 / large.size)
    assert curve.mass_above == pytest.approx(softmax[large].sum() / 333, rel=1e-4)
    assert curve.first_rank_below == np.flatnonzero(means < 2**-12)[0] + 1
    assert curve.loss == pytest.approx(-np.log(softmax[np.arange(333), targets]).mean(), rel=1e-5)


def test_a_tile_is_alive_with_a_large_probability_or_a_target_and_nothing_else():
    weight = torch.zeros(8192, 2)  # uniform: 2^-13 everywhere
    weight[300, 0] = 1.0  # a direction in which id 300, of the third group, is likely
    hidden = torch.zeros(256, 2)
    hidden[200, 0] = 20.0
    targets = torch.full((256,), 5000)
    curve, _ = rank_curve(iter([(hidden, targets)]), weight)
    assert curve.alive_tiles == 3 / (2 * 64), "the targets' group in both blocks of tokens, group 2 in the second"
    flat, _ = rank_curve(iter([(torch.zeros(4, 2), targets[:4] % 1024)]), torch.zeros(1024, 2))
    assert (flat.first_rank_below, flat.share_above, flat.alive_tiles) == (1025, 1.0, 1.0)


def test_ranks_are_evenly_spaced_in_the_logarithm_and_end_at_the_vocabulary():
    ranks = log_ranks(50257)
    assert ranks[:5] == [1, 2, 3, 4, 5] and ranks[-1] == 50257 and ranks == sorted(set(ranks)) and len(ranks) < 120
    steps = np.diff(np.log10([r for r in ranks if r > 100]))
    assert steps.max() < 1.1 / 24


@pytest.fixture(scope="module")
def trained(manifest, tmp_path_factory):
    """A smoke run, its result and the folder of its model, which also holds the model before the first update."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "model").mkdir()
    job = smoke_run(steps=12, norm={"name": "pre_ln"})
    inputs = Inputs(data=(manifest,), work=folder / "work", model=folder / "model", keep=(0,))
    inputs.work.mkdir()
    return job, run_job(job, inputs, CPU), folder / "model"


def test_a_probe_sees_the_trained_model_and_the_weights_that_it_started_from(trained, manifest, tmp_path):
    job, result, model = trained
    start = LanguageModelling(job, manifest, 0, World(0, 1, torch.device("cpu"))).evaluate()["ppl_true"]
    inputs = Inputs(data=(manifest,), models={"of": model}, work=tmp_path)
    end = run_job(RankProbability(of=job, tokens=10**6), inputs, CPU)
    assert (end.metrics["tokens"], end.outcome) == (result.metrics["validation_tokens"], "measured")
    assert end.metrics["threshold"] == THRESHOLD == 2.0**-12
    assert isinstance(end.metrics["first_rank_below"], float), "measured: whole numbers of a record are counts"
    assert end.metrics["loss"] == pytest.approx(result.metrics["loss_true"], rel=1e-5)
    begin = RankProbability(of=job, at="init", tokens=10**6)
    assert begin.snapshot("of") == 0
    init = run_job(begin, dataclasses.replace(inputs, models={"of": model / "at-0"}), CPU)
    assert init.metrics["loss"] == pytest.approx(np.log(start), rel=1e-6) and init.metrics["loss"] > end.metrics["loss"]
    few = run_job(RankProbability(of=job, tokens=100), inputs, CPU)
    assert few.metrics["tokens"] == 100
    assert few.series["ranks"].column("rank") == log_ranks(1024)


def test_a_folder_without_a_model_is_named(trained, manifest, tmp_path):
    inputs = Inputs(data=(manifest,), models={"of": tmp_path}, work=tmp_path)
    with pytest.raises(JobError, match=tmp_path.name):
        run_job(RankProbability(of=trained[0], tokens=64), inputs, CPU)


def record_of(job: RankProbability, first: int, share: float, mass: float) -> Record:
    metrics = {
        "share_above": share, "mass_above": mass, "first_rank_below": first, "alive_tiles": 0.3, "loss": 3.0,
        "threshold": 2.0**-12, "tokens": 9,
    }  # fmt: skip
    ranks = Series(columns=["rank", "mean_probability"], rows=[[1, 0.1], [10, 1e-3], [50257, 1e-9]])
    return Record(
        job_id=job.job_id, kind=job.kind, behaviour=job.behaviours(), job=job.canonical(), outcome="measured",
        metrics=metrics, series={"ranks": ranks}, cost=Cost(wall_seconds=1), environment=ENVIRONMENT,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("trained_curve", "initial", "expected"),
    [
        ((60, 1.9e-4, 0.9), (1, 0.0, 0.0), "true true false true"),
        ((140, 4e-4, 0.9), (50258, 1.0, 1.0), "false false true false"),
    ],
)
def test_the_claims_of_figure_3_are_about_every_trained_model_and_the_random_one(
    tmp_path, trained_curve, initial, expected
):
    files = []
    for cell in Project({"scale": "gpu"}).cells("cce_figure3"):
        job = cell.jobs[0]
        files.append(tmp_path / f"{job.job_id}.json")
        write_record(files[-1], record_of(job, *(initial if job.at == "init" else trained_curve)))
    found = verdicts(tmp_path, "cce_figure3", files)
    true = [{"1 of 1": "true", "0 of 1": "false"}[row["true_in_seeds"]] for row in found.values()]
    assert " ".join(true) == expected
    assert {row["verdict"] for row in found.values()} == {"undecided"}, "one seed does not tell how seeds differ"
    lines = list(csv.DictReader((tmp_path / "cce_figure3.csv").read_text().splitlines()))
    assert {line["row"] for line in lines} == {*ROWS, "random weights"} and len(lines) == 15
    said = {
        (row["column"], row["verdict"]): row["reason"]
        for row in csv.DictReader((tmp_path / "cce_figure3.diff.csv").read_text().splitlines())
    }
    assert said["First Rank Below 2^-12", "see claims"] == "in the text: after about 50 ids"
    assert said["Alive Tiles", "not printed"] == "the paper prints no number of this"
    if expected.startswith("true"):
        assert "even a uniform softmax is below" in found["CCE-F3-2b"]["reason"]


def test_figure_3_takes_committed_probes_then_local_ones_and_asks_for_models_where_jobs_are_made(tmp_path):
    def workflow(run_missing: str) -> Workflow:
        project = Project({"scale": "gpu", "run_missing": run_missing})
        project.places = Places(tmp_path, "gpu")
        return Workflow(project)

    first, second, third, *_ = (cell.jobs[0] for cell in workflow("no").project.cells("cce_figure3"))
    places = Places(tmp_path, "gpu")
    assert workflow("no").inputs("cce_figure3") == []
    for path in (places.manifest(third.of), places.committed(first), places.made(first), places.made(second)):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("{}")
    found = [places.committed(first), places.made(second)]
    assert workflow("no").inputs("cce_figure3") == found, "a model at hand is not probed where nothing is made"
    asked = workflow("yes")
    makes = asked.state.todo("cce_figure3")
    trained = {places.made(job) for job in makes.values() if job.kind == "pretrain"}
    probes = [path for path in asked.inputs("cce_figure3") if path not in trained]
    assert probes[:2] == found and len(probes) == 5
    assert set(asked.inputs("cce_figure3")) == trained | set(probes), "whether a training collapsed is said beside them"
    assert sorted(job.kind for job in makes.values()) == ["pretrain"] * 3 + ["rank_probability"] * 3
    assert asked.project.keep[first.of.job_id] == (0,), "the run leaves its weights at random for the last row"
