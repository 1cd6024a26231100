"""Noise on weights, Pareto-optimal rows and lifetimes of tensors: Figures 2, 3, 7 and 9 of NeuZip."""

from __future__ import annotations

import itertools
import random

import pandas
import pytest
import torch
from pydantic import ValidationError
from support import smoke_run
from support_figures import record_of

from paperlm.figures.base import write_figure
from paperlm.figures.noise_grid import COLUMNS, called
from paperlm.figures.resident_tensors import BACKWARD, BLOCK, LAYER, LIFETIMES, METHODS, RUN, UPDATE
from paperlm.figures.trade_off import Point, frontier, points_of
from paperlm.jobs.base import Inputs, Machine
from paperlm.jobs.hub_model import run as read_from_hub
from paperlm.jobs.perturbed_perplexity import PerturbedPerplexity
from paperlm.plan.project import Project
from paperlm.probe.noise import disturbed
from paperlm.record.record import write_record
from paperlm.result import Series
from paperlm.tables.claims import CellSamples


def test_figure_six_is_blocked_with_its_reason_and_stands_for_no_other_model(tmp_path):
    jobs = Project({"scale": "paper"}).jobs_of("neuzip_figure6")
    assert len(jobs) == 4, "text encoder, denoiser, autoencoder, safety checker"
    for job in jobs:
        assert job.of.data() == [], "nothing is fetched"
        result = read_from_hub(job.of, Inputs(work=tmp_path), Machine(device="cpu", progress=False))
        assert result.outcome == "blocked" and "diffusers" in result.reason
    write_figure(Project({"scale": "tiny"}), "neuzip_figure6", [], tmp_path / "six.svg")
    claims = pandas.read_csv(tmp_path / "six.claims.csv").to_dict("records")
    assert {(claim["verdict"], claim["reason"]) for claim in claims} == {("not tested", "no model has been measured")}


@pytest.mark.parametrize("scale", ["tiny", "gpu"])
def test_claims_of_figure_six_say_at_every_scale_why_it_is_blocked(tmp_path, scale):
    project, files = Project({"scale": scale}), []
    for job in project.jobs_of("neuzip_figure6"):
        files.append(tmp_path / f"{job.job_id}.json")
        write_record(files[-1], record_of(job, {}, outcome="blocked", reason=f"{job.of.slug()} is of a pipeline"))
    assert len(files) == 4
    write_figure(project, "neuzip_figure6", files, tmp_path / "six.svg")
    claims = pandas.read_csv(tmp_path / "six.claims.csv")
    assert set(claims["verdict"]) == {"not tested"}
    for job in project.jobs_of("neuzip_figure6"):
        assert all(f"blocked: {job.of.slug()} is of a pipeline" in reason for reason in claims["reason"])


def weights() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    return {"a": torch.randn(7, 5, generator=g), "b": torch.randn(4, 6, generator=g) * 1e-3}


def change(absolute: int | None, relative: int | None, seed: int = 0) -> dict[str, torch.Tensor]:
    found = weights()
    with disturbed(found, absolute, relative, seed):
        return {name: found[name] - weight for name, weight in weights().items()}


def test_noise_is_within_the_larger_of_its_absolute_and_relative_size_and_fills_it():
    for absolute, relative in [(-3, None), (None, -2), (-8, -2), (-8, -20)]:
        for name, weight in weights().items():
            size = torch.zeros_like(weight) if absolute is None else torch.full_like(weight, 2.0**absolute)
            if relative is not None:
                size = torch.maximum(size, weight.abs() * 2.0**relative)
            share = change(absolute, relative)[name] / size
            assert share.abs().max() <= 1 + 1e-4
            assert share.max() > 0.5 and share.min() < -0.5, "of both signs, and not a small part of it"


def test_sizes_of_noise_differ_in_nothing_else_and_seeds_do():
    small, large, other = change(-4, None), change(-2, None), change(-4, None, seed=1)
    for name in small:
        torch.testing.assert_close(large[name], 4 * small[name], rtol=1e-3, atol=1e-6)
        assert not torch.allclose(other[name], small[name])


def test_no_noise_of_either_kind_changes_nothing():
    assert all(not part.any() for part in change(None, None).values())


@pytest.mark.parametrize("error", [False, True])
def test_behind_the_noise_weights_are_what_they_were_bit_for_bit_also_after_an_error(error):
    found, before = weights(), weights()
    try:
        with disturbed(found, 2, 3, seed=0):
            assert not torch.equal(found["a"], before["a"])
            if error:
                raise RuntimeError
    except RuntimeError:
        pass
    assert all(torch.equal(found[name], before[name]) for name in before)


def test_sizes_of_noise_that_are_named_twice_are_refused():
    settings = {"of": smoke_run(), "text": "bundled:c4_sample", "documents": 2, "window": 8, "relative": [None]}
    with pytest.raises(ValidationError, match="a power is named twice"):
        PerturbedPerplexity(absolute=[-3, -3], **settings)
    with pytest.raises(ValidationError, match="at least 1 item"):
        PerturbedPerplexity(absolute=[], **settings)


def test_sizes_of_noise_are_written_as_powers_of_two():
    assert [called(None), called(-12)] == ["none", "$2^{-12}$"]


def test_rows_on_the_frontier_are_those_that_no_other_one_beats():
    rng = random.Random(0)
    for _ in range(200):
        points = [Point(str(i), rng.randrange(5), rng.randrange(5)) for i in range(7)]
        beaten = {
            b for a, b in itertools.permutations(points, 2) if (a.x < b.x and a.y <= b.y) or (a.x <= b.x and a.y < b.y)
        }
        assert set(frontier(points)) == set(points) - beaten
        mirrored = [Point(p.row, p.x, -p.y) for p in points]
        assert [p.row for p in frontier(mirrored, "higher")] == [p.row for p in frontier(points)]
    assert frontier([Point("a", 1, 2), Point("b", 1, 2)]) == [Point("a", 1, 2), Point("b", 1, 2)]


def test_a_row_of_which_a_seed_diverged_stands_where_the_others_are():
    samples = {("a", "x"): CellSamples((2.0, 2.0)), ("a", "y"): CellSamples((10.0, 900.0), (False, True))}
    samples |= {("b", "x"): CellSamples((1.0, 1.0)), ("b", "y"): CellSamples((900.0, 700.0), (True, True))}
    assert points_of(samples, "x", "y") == [Point("a", 2, 10), Point("b", 1, 800)]


def test_a_seed_that_noise_breaks_is_told_and_not_averaged(tmp_path):
    project = Project({"scale": "tiny", "seeds": [0, 1]})
    files = []
    for seed, job in enumerate(dict.fromkeys(project.jobs_of("neuzip_figure7"))):
        series = Series(columns=list(COLUMNS), rows=[[-2, None, *((None, None) if seed else (2.0, 7.0))]])
        files.append(tmp_path / f"{job.job_id}.json")
        write_record(files[-1], record_of(job, {"loss": 1.0, "perplexity": 2.5 + seed}, series={"grid": series}))
    assert len(files) == 2
    write_figure(project, "neuzip_figure7", files, tmp_path / "neuzip_figure7.svg")
    found = pandas.read_csv(tmp_path / "neuzip_figure7.diff.csv").set_index("column")
    broken, whole = found.loc["Absolute 2^-2"], found.loc["Without Noise"]
    assert (broken["regenerated"], broken["judged_on"]) == ("7 (1 of 2 not finite)", 7)
    assert whole["regenerated"] == "3" and whole["spread"] == pytest.approx(0.5**0.5, rel=1e-3)


def test_what_lives_how_long_is_what_the_paper_says():
    lives = {method: {tensor: row[index] for tensor, row in LIFETIMES.items()} for index, method in enumerate(METHODS)}
    weight, gradient = "weight, 16 bits", "gradient of the weight"
    assert [lives[m][weight] for m in METHODS] == [RUN, RUN, RUN, LAYER]
    assert [lives[m]["weight, compressed"] == RUN for m in METHODS] == [False, False, False, True]
    assert [lives[m][gradient] for m in METHODS] == [UPDATE, UPDATE, LAYER, LAYER]
    assert [lives[m]["input"] for m in METHODS] == [BACKWARD, BLOCK, BLOCK, BLOCK]
    assert all(len(lifetimes) == len(METHODS) for lifetimes in LIFETIMES.values())


BITS = {0: 3.7, 1: 4.7, 3: 6.7, 7: 10.7}
PERPLEXITY = {0: 13.6, 1: 10.9, 3: 10.04, 7: 10.0}


def test_memory_against_perplexity_shows_the_rows_that_have_both_and_marks_those_that_are_beaten(tmp_path):
    project = Project({"scale": "tiny"})
    files = []
    for job in {job.job_id: job for job in project.jobs_of("neuzip_table3a")}.values():
        if job.kind == "stored_perplexity" and job.store in ("plain", "packed"):
            bits, ppl = (16, 10.0) if job.store == "plain" else (BITS[job.mant_bits], PERPLEXITY[job.mant_bits])
            metrics = dict.fromkeys(job.metrics(), 1) | {"word_perplexity": ppl, "weight_bytes": int(bits * 1e7)}
            files.append(tmp_path / f"{job.job_id}.json")
            write_record(files[-1], record_of(job, metrics))
    write_figure(project, "neuzip_figure3", files, tmp_path / "neuzip_figure3.svg")
    claims, diff = (pandas.read_csv(tmp_path / f"neuzip_figure3.{part}.csv") for part in ("claims", "diff"))
    assert set(claims["claim"]) == {"NEU-F3-1", "NEU-F3-2"} and set(diff["row"]) >= {"Vanilla", "NeuZip 0-bit"}
    said = diff.set_index(["row", "column"])["reason"]
    assert said["Vanilla", "Llama-3 8B PPL"] == "the figure prints no number; Table 3a compares its own"
    found = pandas.read_csv(tmp_path / "neuzip_figure3.csv")
    rows = {"Vanilla": False, **{f"NeuZip {k}-bit" + " (lossless)" * (k == 7): True for k in BITS}}
    for _, panel in found.groupby("panel"):
        assert dict(zip(panel["row"], panel["pareto_optimal"], strict=True)) == rows
    assert len(found) == 3 * len(rows)


def test_memory_against_accuracy_prefers_higher_numbers_and_its_claims_read_them(tmp_path):
    project = Project({"scale": "tiny"})
    files = []
    for job in {job.job_id: job for job in project.jobs_of("neuzip_table3a")}.values():
        if job.kind in ("stored_perplexity", "stored_lm_eval") and job.store in ("plain", "packed"):
            bits = 16 if job.store == "plain" else BITS[job.mant_bits]
            accuracy = 0.5 if bits == 16 else {0: 0.3, 1: 0.4, 3: 0.35, 7: 0.5}[job.mant_bits]
            metrics = dict.fromkeys(job.metrics(), 1) | {"weight_bytes": int(bits * 1e7)}
            errors = {}
            if job.kind == "stored_lm_eval":
                hash_ = 2 if bits == 10.7 and job.of.size == "350M" else 1
                metrics |= {"mmlu/acc": accuracy, "likelihoods_hash": hash_}
                errors = {"likelihoods_hash": 0.0}
            files.append(tmp_path / f"{job.job_id}.json")
            write_record(files[-1], record_of(job, metrics, standard_errors=errors))
    write_figure(project, "neuzip_figure9", files, tmp_path / "neuzip_figure9.svg")
    found = pandas.read_csv(tmp_path / "neuzip_figure9.csv")
    (proxies,) = set(found["proxies"])
    assert proxies.split("; ")[1].startswith("a proxy of Llama-2-13b-hf: trained here, ")
    best = {"NeuZip 0-bit": 30.0, "NeuZip 1-bit": 40.0, "NeuZip 7-bit (lossless)": 50.0}
    for _, panel in found[found["pareto_optimal"]].groupby("panel"):
        assert dict(zip(panel["row"], panel["accuracy on MMLU (%)"], strict=True)) == best
    claims = pandas.read_csv(tmp_path / "neuzip_figure9.claims.csv").set_index(["claim", "part"])["verdict"]
    assert claims["NEU-F9-2", "Llama-3 8B"] == "holds" and claims["NEU-F9-2", "Llama-2 13B"] == "fails"
