"""BLEU and its noise: sacrebleu's number, and how far other questions of the kind would move it."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from sacrebleu import corpus_bleu
from sacrebleu.metrics import BLEU
from support_tables import record_of

from paperlm.evaluate.bleu import bleu
from paperlm.jobs.pretrain import OF_WEIGHTS
from paperlm.plan.project import Project
from paperlm.record.record import write_record
from paperlm.tables.build import table_contents
from paperlm.tables.verdicts import claim_rows

WORDS = [f"word{i}" for i in range(40)]


def texts(count: int, right: float, seed: int) -> tuple[list[str], list[str]]:
    """Random sentences, and what a model wrote of them that has a share of the words right."""
    rng = np.random.default_rng(seed)
    true = [rng.choice(WORDS, rng.integers(5, 16)) for _ in range(count)]
    share = rng.beta(4 * right, 4 * (1 - right), count)  # some are easy, some hard
    mine = [[w if rng.random() < p else rng.choice(WORDS) for w in t] for t, p in zip(true, share, strict=True)]
    return [" ".join(t) for t in mine], [" ".join(t) for t in true]


def test_the_number_is_sacrebleus_and_the_error_a_half_of_its_own_confidence_interval():
    written, true = texts(300, 0.8, 1)
    score, error = bleu(written, true)
    assert score == corpus_bleu(written, [true]).score
    theirs = BLEU().corpus_score(written, [true], n_bootstrap=1000)
    assert error == pytest.approx(theirs._ci / 1.96, rel=0.1)


def test_the_error_is_the_spread_of_bleu_over_sets_that_are_drawn_afresh():
    scores = [bleu(*texts(100, 0.8, seed))[0] for seed in range(40)]
    errors = [bleu(*texts(100, 0.8, seed))[1] for seed in range(5)]
    # a standard deviation of 40 numbers is known within 11 %
    assert statistics.fmean(errors) == pytest.approx(statistics.stdev(scores), rel=0.3)


def test_of_a_few_draws_the_deviation_is_that_of_a_sample(monkeypatch):
    scores = [10.0, 20.0, 60.0]
    drawn = iter(scores)
    monkeypatch.setattr("paperlm.evaluate.bleu.RESAMPLES", len(scores))
    monkeypatch.setattr("paperlm.evaluate.bleu._of_sums", lambda sums: next(drawn))
    assert bleu(*texts(5, 0.8, 3))[1] == pytest.approx(statistics.stdev(scores))


def test_it_is_the_same_each_time_and_a_single_text_has_none():
    written, true = texts(50, 0.6, 2)
    assert bleu(written, true) == bleu(written, true)
    assert bleu(true, true) == (pytest.approx(100.0), pytest.approx(0.0, abs=1e-9))
    assert bleu(written[:1], true[:1])[1] is None


@pytest.mark.parametrize(("gap", "verdict"), [(0.1, "undecided"), (5.0, "holds")])
def test_a_tenth_of_a_point_of_bleu_decides_no_claim_and_ten_standard_errors_do(tmp_path, gap, verdict):
    project, paths = Project({"scale": "paper"}), []
    for cell in project.cells("neuzip_table2"):
        for job in cell.jobs:
            path = tmp_path / f"{job.job_id}.json"
            if cell.metric == "bleu" and path not in paths:
                value = 70.0 + (gap if job.adapter == "none" else 0.0)
                numbers = dict.fromkeys(job.metrics(), 1.0) | {"exact": 0.5, "bleu": value}
                errors = dict.fromkeys(OF_WEIGHTS, 0.0) | {"bleu": 0.5}
                write_record(path, record_of(job, numbers, outcome="trained", standard_errors=errors))
                paths.append(path)
    rows = claim_rows(project, "neuzip_table2", table_contents(project, "neuzip_table2", paths))
    assert {r["verdict"] for r in rows if r["claim"] == "NEU-T2-4" and r["part"]} == {verdict}


def test_a_cell_of_a_record_without_a_standard_error_has_no_spread_the_scales_noise_and_a_note_that_says_so(tmp_path):
    project = Project({"scale": "gpu"})
    (job, *_) = next(c.jobs for c in project.cells("neuzip_table2") if (c.row, c.column) == ("LOMO", "T5 1B BLEU"))
    numbers = dict.fromkeys(job.metrics(), 1.0) | {"bleu": 9.0}
    write_record(tmp_path / "one.json", record_of(job, numbers, outcome="trained"))
    contents = table_contents(project, "neuzip_table2", [tmp_path / "one.json"])
    (row,) = (r for r in contents.diff if (r.row, r.column) == ("LOMO", "T5 1B BLEU"))
    assert (row.regenerated, row.spread) == ("9.0", "")
    noise = project.seed_noise("neuzip_table2").value
    assert contents.samples["LOMO", "T5 1B BLEU"].deviation == pytest.approx(9.0 * noise)
    assert any("BLEU without a standard error" in d.what for d in project.deviations("neuzip_table2"))


@pytest.mark.parametrize(("other", "verdict"), [(0, "holds"), (1, "fails")])
def test_weights_are_the_same_bits_if_they_are_with_every_seed_and_a_cell_shows_all_their_hashes_in_one(
    tmp_path, other, verdict
):
    project, paths = Project({"scale": "paper"}), []
    hashes = [2**40 + 5, 2**41 + 3, 2**42 + 9]
    for cell in project.cells("neuzip_table2"):
        for seed, job in enumerate(cell.jobs):
            if cell.metric != "weights_hash" or cell.row not in ("LOMO", "+ NeuZip Lossless"):
                continue
            mine = hashes[seed] + (other if seed == 1 and cell.row != "LOMO" else 0)
            numbers = dict.fromkeys(job.metrics(), 1.0) | {"weights_hash": mine}
            paths.append(tmp_path / f"{job.job_id}.json")
            errors = dict.fromkeys(OF_WEIGHTS, 0.0)
            write_record(paths[-1], record_of(job, numbers, outcome="trained", standard_errors=errors))
    contents = table_contents(project, "neuzip_table2", paths)
    rows = claim_rows(project, "neuzip_table2", contents)
    assert {r["verdict"] for r in rows if r["claim"] == "NEU-T2-1"} == {verdict}
    shown = {r.row: r for r in contents.diff if r.column == "T5 3B Weights"}
    assert shown["LOMO"].regenerated == str(hashes[0] ^ hashes[1] ^ hashes[2]) and shown["LOMO"].spread == ""
    assert (shown["LOMO"].regenerated == shown["+ NeuZip Lossless"].regenerated) == (other == 0)
