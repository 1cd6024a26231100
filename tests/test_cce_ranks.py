"""Cut Cross-Entropy's figure 3: softmax probabilities by rank, the probe of a trained model, and the verdicts."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch
from support import smoke_run
from support_cce_training import ENVIRONMENT, ROWS, verdicts

from paperlm.errors import RecordError
from paperlm.evaluate.ranks import THRESHOLD, log_ranks, probe_ranks, rank_curve
from paperlm.record.ranks import RankCurve, RankRecord
from paperlm.record.record import parse_record, write_record
from paperlm.spec.project import Project
from paperlm.spec.workflow import Jobs
from paperlm.train.distributed import World
from paperlm.train.loop import Execution, Trainer, pretrain

QUIET = Execution(device="cpu", progress=False)


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
    """A smoke run, its record and the folder of its model."""
    folder = tmp_path_factory.mktemp("trained")
    run = smoke_run(steps=12, norm={"name": "pre_ln"}, curve="every_update")
    record, model = pretrain(run, manifest, folder / "ck", QUIET)
    model.save_pretrained(folder / "model")
    return run, record, folder / "model"


def test_a_probe_sees_the_trained_model_and_the_weights_that_it_started_from(trained, manifest, tmp_path):
    run, record, model = trained
    probe = probe_ranks(run, manifest, model, 10**6, torch.device("cpu"))
    assert probe.tokens == record.metrics["validation_tokens"] and probe.threshold == THRESHOLD == 2.0**-12
    assert probe.states["trained"].loss == pytest.approx(record.metrics["loss_true"], rel=1e-5)
    start = Trainer(run, manifest, tmp_path, QUIET, World(0, 1, torch.device("cpu"))).evaluate().loss_true()
    assert probe.states["initial"].loss == pytest.approx(start, rel=1e-6)
    assert probe.states["initial"].loss > probe.states["trained"].loss
    few = probe_ranks(run, manifest, model, 100, torch.device("cpu"))
    assert few.tokens == 100


def test_the_verb_writes_a_record_that_reads_back_and_names_a_missing_or_wrong_model(
    trained, manifest, tmp_path, paperlm
):
    run, _, model = trained
    common = ["probe-ranks", "--data", manifest, "--tokens", 64, "--device", "cpu", "--out", tmp_path / "ranks.json"]
    done = paperlm(*common, "--settings", run.model_dump_json(), "--model", model)
    assert done.returncode == 0, done.stderr
    assert parse_record(tmp_path / "ranks.json", RankRecord).run_id == run.run_id
    for settings, folder, message in (
        (run, tmp_path, "no trained model of llama_71m-pre_ln"),
        (smoke_run(hidden_size=32), model, "not that of llama_71m-mix_ln"),
    ):
        done = paperlm(*common, "--settings", settings.model_dump_json(), "--model", folder)
        assert done.returncode == 2 and message in done.stderr
    (tmp_path / "ranks.json").write_text('{"run_id": "x"}')
    with pytest.raises(RecordError, match=r"ranks.json: not a valid record"):
        parse_record(tmp_path / "ranks.json", RankRecord)


def curve_of(first: int, share: float, mass: float) -> RankCurve:
    ranks = [1, 10, 50257]
    return RankCurve(
        ranks=ranks, mean_probability=[0.1, 1e-3, 1e-9], share_above=share, mass_above=mass, first_rank_below=first,
        alive_tiles=0.3, loss=3.0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("trained_curve", "initial", "expected"),
    [
        (curve_of(60, 1.9e-4, 0.9), curve_of(1, 0.0, 0.0), "holds holds fails holds"),
        (curve_of(140, 4e-4, 0.9), curve_of(50258, 1.0, 1.0), "fails fails holds fails"),
    ],
)
def test_the_claims_of_figure_3_are_about_every_trained_model_and_the_random_one(
    tmp_path, trained_curve, initial, expected
):
    files = []
    for cell in Project({"scale": "gpu"}).cells("cce_pretraining"):
        run = cell.runs[0]
        states = {"trained": trained_curve, "initial": initial}
        files.append(tmp_path / f"{run.run_id}.json")
        write_record(files[-1], RankRecord(run_id=run.run_id, run=run, threshold=2**-12, tokens=9, states=states,
                                          environment=ENVIRONMENT))  # fmt: skip
    found = verdicts(tmp_path, "cce_figure3", files)
    assert " ".join(row["verdict"] for row in found.values()) == expected
    lines = list(csv.DictReader((tmp_path / "cce_figure3.csv").read_text().splitlines()))
    assert {line["row"] for line in lines} == {*ROWS, "random weights"} and len(lines) == 15
    said = {
        (row["column"], row["verdict"]): row["reason"]
        for row in csv.DictReader((tmp_path / "cce_figure3.diff.csv").read_text().splitlines())
    }
    assert said["First Rank Below 2^-12", "see claims"] == "in the text: after about 50 ids"
    assert said["Alive Tiles", "not printed"] == "the paper prints no number of this"
    if expected.startswith("holds"):
        assert "even a uniform softmax is below" in found["CCE-F3-2b"]["reason"]


def test_figure_3_takes_committed_probes_then_local_ones_then_models_that_are_at_hand(tmp_path, monkeypatch):
    project = Project({"scale": "gpu", "run_missing": "no"})
    first, second, third, _ = (cell.runs[0].run_id for cell in project.cells("cce_pretraining"))
    monkeypatch.setattr(project, "root", tmp_path)
    asked = lambda: Jobs(project).figure_records("cce_figure3")  # noqa: E731
    assert asked() == []
    for path in (f"results/gpu/models/{third}/config.json", f"paper_tables/records/gpu/ranks/{first}.json",
                 f"results/gpu/ranks/{first}.json", f"results/gpu/ranks/{second}.json"):  # fmt: skip
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("{}")
    found = [f"paper_tables/records/gpu/ranks/{first}.json", f"results/gpu/ranks/{second}.json"]
    assert asked() == found, "a model without its local record is not probed"
    (tmp_path / "results/gpu/runs").mkdir()
    (tmp_path / f"results/gpu/runs/{third}.json").write_text("{}")
    assert asked() == [*found, f"results/gpu/ranks/{third}.json"]
    project.config = project.config.model_copy(update={"run_missing": "yes"})
    for path in (tmp_path / "results/gpu").rglob("*.json"):
        path.unlink()
    assert len(asked()) == 4, "runs that will be trained leave their models"
