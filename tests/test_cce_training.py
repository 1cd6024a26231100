"""Cut Cross-Entropy's figures 4 and 5: what a run keeps for them, their statistics, verdicts on made-up runs."""

from __future__ import annotations

import csv
import math
import statistics

import numpy as np
import pytest
import scipy.stats
from support import smoke_run
from support_cce_training import CONTROL, ROWS, made_up, records, trained, verdicts
from tokenizers import Tokenizer

from paperlm.data.prepare import prepare
from paperlm.data.registry import HERE
from paperlm.data.sources import documents
from paperlm.data.tokenizer import TextTokenizer
from paperlm.errors import DataError, Interrupted, SpecError
from paperlm.evaluate.perplexity import ValidationLosses
from paperlm.figures import paired
from paperlm.figures.base import Drawing, labels_of, notes, statistics_rows
from paperlm.figures.training_loss import BEYOND, DEVIATION, EQUIVALENCE, loss_samples
from paperlm.plan.project import Project
from paperlm.record.record import write_record
from paperlm.result import Series
from paperlm.tables.claims import CellSamples
from paperlm.tables.terminal import print_summary

GPT2 = {"tokenizer": "gpt2", "vocab_size": 50257, "example": "packed"}
# -- text ----


def test_gpt2_gives_the_ids_that_it_is_known_for_and_every_text_back():
    tokenizer = TextTokenizer("gpt2")
    assert tokenizer.encode(["Hello world", " the", ""]) == [[15496, 995, 50256], [262, 50256], [50256]]
    text = "naïve\r\n\t 漢字 👩‍👩‍👧 don't  {\\<|>} \x00"
    assert tokenizer.inner.decode(tokenizer.encode([text])[0][:-1], skip_special_tokens=False) == text


def test_a_tokenizer_without_padding_makes_full_examples_and_refuses_others(tmp_path):
    settings = smoke_run(**GPT2).token_data().model_dump(mode="json")
    rows = np.load(prepare(settings, tmp_path / "packed").parent / "train-00000.npy")
    raw = Tokenizer.from_file(str(HERE / "tokenizers/gpt2/tokenizer.json"))
    texts = [text for text, _ in zip(documents("bundled:c4_sample", "train"), range(40), strict=False)]
    row = [i for text in texts for i in (*raw.encode(text).ids, 50256)]
    assert rows.shape == (256, 32) and rows.ravel().tolist() == row[: rows.size] and 50256 in row[: rows.size]
    for example in ("truncate", "split"):
        with pytest.raises(DataError, match=r"'gpt2' has no padding token.*use example: packed"):
            prepare({**settings, "example": example}, tmp_path / example)


def test_every_label_of_packed_text_counts_the_end_token_too(tmp_path):
    job = smoke_run(**GPT2, steps=1, global_batch=64, loss_group=64, hidden_size=8, n_heads=2)
    data = prepare(job.token_data().model_dump(mode="json"), tmp_path / "data")
    metrics = trained(job, data, tmp_path / "work").metrics
    assert metrics["tokens_nonpad"] == metrics["tokens_slots"] == 64 * 32
    assert metrics["validation_tokens"] % 31 == 0


# -- what a run keeps ----


def test_a_run_that_keeps_every_update_has_each_loss_and_both_perplexities(manifest, tmp_path):
    settings = {"steps": 170, "eval_every": 85, "global_batch": 2, "norm": {"name": "pre_ln"}}
    whole = trained(smoke_run(**settings, curve="every_update"), manifest, tmp_path / "whole")
    thinned = trained(smoke_run(**settings), manifest, tmp_path / "thinned")
    every, few = whole.series["train"], thinned.series["train"]
    assert every.columns == few.columns == ["update", "tokens", "loss"]
    assert every.column("update") == [*range(1, 171)] and len(few.rows) == 85
    for index, (update, tokens, loss) in enumerate(few.rows):
        pair = every.rows[2 * index : 2 * index + 2]
        assert [update, tokens] == pair[1][:2] and loss == pytest.approx((pair[0][2] + pair[1][2]) / 2, abs=1.1e-6)
    assert [row[:3] for row in whole.series["eval"].rows] == thinned.series["eval"].rows
    assert whole.series["eval"].columns == ["update", "tokens", "ppl_true", "ppl_sequences"]
    assert whole.series["eval"].rows[-1][3] == whole.metrics["ppl_sequences"] > 1
    assert "ppl_sequences" not in thinned.metrics


def test_a_run_that_keeps_every_update_goes_on_to_the_same_record(manifest, tmp_path):
    job = smoke_run(steps=9, eval_every=3, curve="every_update", loss="cce_kahan")
    unbroken = trained(job, manifest, tmp_path / "unbroken")
    for update in (4, 7):
        with pytest.raises(Interrupted):
            trained(job, manifest, tmp_path / "run", stop_after=update)
    resumed = trained(job, manifest, tmp_path / "run")
    assert (resumed.series, resumed.metrics) == (unbroken.series, unbroken.metrics)
    assert resumed.cost.resumed_from == [4, 7]


def test_the_perplexity_of_sequences_is_the_mean_of_each_ones():
    losses = ValidationLosses(np.array([4 * math.log(8), 2 * math.log(2), 0.0]), np.array([4, 2, 0]))
    assert losses.ppl_sequences() == pytest.approx((8 + 2) / 2)
    assert math.exp(losses.loss_true()) == pytest.approx((8**4 * 2**2) ** (1 / 6))
    assert ValidationLosses(np.array([900.0, 1.0]), np.array([1, 1])).ppl_sequences() is None


# -- statistics ----


def test_tests_over_seeds_are_those_of_scipy():
    values, less = [0.004, -0.001, 0.0035], [-0.03, -0.02, -0.029]
    for bound in (0.0, 0.01, -0.01):
        truth = scipy.stats.ttest_1samp(values, bound, alternative="greater").pvalue
        assert paired.p_greater(values, bound) == pytest.approx(truth, rel=1e-9)
    for differences in (values, less):
        above, below = (scipy.stats.ttest_1samp(differences, b, alternative=a).pvalue
                        for b, a in ((-0.01, "greater"), (0.01, "less")))  # fmt: skip
        assert paired.p_equivalent(differences, 0.01) == pytest.approx(max(above, below), rel=1e-9)
    assert paired.p_equivalent(values, 0.01) < 0.05 < paired.p_equivalent(less, 0.01)


def test_seeds_that_agree_to_the_bit_decide():
    assert paired.p_equivalent([0.0, 0.0], 0.01) == 0.0 and paired.p_equivalent([0.02, 0.02], 0.01) == 1.0
    assert paired.p_greater([0.0, 0.0]) == 1.0 and paired.p_greater([0.5, 0.5]) == 0.0


def test_a_band_is_the_interval_of_the_mean_and_one_seed_has_none():
    curves = np.array([[1.0, 2.0], [2.0, 2.5], [4.0, 2.2]])
    mean, half = paired.band(curves)
    low, high = scipy.stats.t.interval(0.95, 2, loc=curves.mean(0), scale=scipy.stats.sem(curves))
    np.testing.assert_allclose([mean - half, mean + half], [low, high])
    assert np.isnan(paired.band(curves[:1])[1]).all()


def test_smoothing_looks_back_only():
    values = [5.0, 1.0, 3.0, 8.0]
    assert paired.smoothed(values, 3).tolist() == pytest.approx([3.0, 4.0])
    assert paired.smoothed(values, 9).tolist() == pytest.approx([17 / 4])


# -- figures 4 and 5, on made-up runs ----

SAME = [0.0, 0.0, 0.0]
CLOSE = [1e-3, -1e-3, 2e-3]
APART = [0.01, -0.01, 0.01]
FAR = [0.01, 0.0095, 0.0105]
CASES = {
    "full_c_is_equal_and_cce_worse": (
        {"torch.compile": SAME, "CCE-Kahan-FullC": CLOSE, "CCE": [0.051, 0.049, 0.052], CONTROL: FAR},
        "F4-1 fails F4-1b holds F4-2 fails F4-2b holds F4-3 fails F4-3b holds F5-1 holds F5-1b holds F5-2 holds",
    ),
    "cce_is_better": (
        {"torch.compile": SAME, "CCE-Kahan-FullC": [0.08, 0.081, 0.079], "CCE": [0.001, -0.001, 0.001], CONTROL: APART},
        "F4-1 holds F4-1b fails F4-2 holds F4-2b fails F4-3 holds F4-3b fails F5-1 fails F5-1b fails F5-2 fails",
    ),
    "the_seeds_disagree": (
        {
            "torch.compile": SAME, "CCE-Kahan-FullC": [0.03, -0.004, 0.012], "CCE": [-0.02, 0.03, 0.001],
            CONTROL: APART,
        },
        "F4-1 undecided F4-1b undecided F4-2 undecided F4-2b undecided F4-3 undecided F4-3b undecided "
        "F5-1 undecided F5-1b undecided F5-2 undecided",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_claims_of_figures_4_and_5_are_judged_seed_by_seed(case, tmp_path):
    above, expected = CASES[case]
    files = records(tmp_path, above)
    found = verdicts(tmp_path, "cce_figure4", files) | verdicts(tmp_path, "cce_figure5", files)
    assert " ".join(f"{c.removeprefix('CCE-')} {row['verdict']}" for c, row in found.items()) == expected
    assert "p of Equivalence: " in found["CCE-F4-2"]["reason"] and found["CCE-F4-2"]["scale"] == "gpu"


def test_seeds_that_differ_much_do_not_hide_what_is_the_same_in_each(tmp_path):
    above = dict.fromkeys(ROWS, SAME) | {"CCE": [0.02, 0.021, 0.019]}
    files = records(tmp_path, above, between=0.4)
    assert verdicts(tmp_path, "cce_figure5", files)["CCE-F5-2"]["verdict"] == "holds"
    assert verdicts(tmp_path, "cce_figure4", files)["CCE-F4-2"]["verdict"] == "fails"


def test_equal_ends_do_not_hide_curves_that_part_on_the_way(tmp_path):
    files = records(tmp_path, dict.fromkeys(ROWS, SAME), wobble=0.05)
    assert verdicts(tmp_path, "cce_figure4", files)["CCE-F4-1"]["verdict"] == "fails"


def test_only_the_last_tenth_decides_whether_the_losses_end_equal():
    runs = {cell.row: cell.jobs for cell in Project({"scale": "gpu"}).cells("cce_figure4")}
    by_row: dict[str, dict] = {"torch.compile": {}, "CCE": {}}
    for seed in range(3):
        noise = np.random.default_rng(seed).normal(3, 0.01, 1500)
        by_row["torch.compile"][seed] = made_up(runs["torch.compile"][seed], noise, 20.0)
        late = noise + 0.3 * (np.arange(1500) < 1350) + 1e-4 * seed
        by_row["CCE"][seed] = made_up(runs["CCE"][seed], late, 20.0)
    options = {"reference": "torch.compile", "window": 25, "margin": 0.01}
    tenth, fifth = (loss_samples(by_row, **options, last=last) for last in (0.1, 0.2))
    assert tenth["CCE", EQUIVALENCE].values == (pytest.approx(tenth["CCE", EQUIVALENCE].values[0]),) * 3
    assert tenth["CCE", EQUIVALENCE].values[0] < 1e-3 < 0.9 < fifth["CCE", EQUIVALENCE].values[0]
    assert fifth["CCE", BEYOND].values[0] < 1e-3 < 0.9 < tenth["CCE", BEYOND].values[0]


def test_the_deviation_between_seeds_is_that_of_the_smoothed_last_half(tmp_path):
    runs = {job.seed: job for job in Project({"scale": "gpu"}).cells("cce_figure4")[0].jobs}
    curves = {seed: np.random.default_rng(seed).normal(seed, 1, 1500) for seed in runs}
    by_seed = {seed: made_up(run, curves[seed], 20.0) for seed, run in runs.items()}
    found = loss_samples({"torch.compile": by_seed}, reference="torch.compile", window=25, margin=0.01, last=0.1)
    means = np.array([[c[u - 25 : u].mean() for u in range(751, 1501)] for c in curves.values()])
    assert found["torch.compile", DEVIATION].values[0] == pytest.approx(np.sqrt(means.var(0, ddof=1).mean()), rel=1e-6)


def test_figure_4_has_a_row_a_step_and_figure_5_both_perplexities(tmp_path):
    files = records(tmp_path, dict.fromkeys(ROWS, CLOSE))
    for name in ("cce_figure4", "cce_figure5"):
        verdicts(tmp_path, name, files)
        assert (tmp_path / f"{name}.png").stat().st_size > 20_000 and (tmp_path / f"{name}.svg").is_file()
    steps = list(csv.DictReader((tmp_path / "cce_figure4.csv").read_text().splitlines()))
    assert len(steps) == 12 * 1500 and {(s["row"], s["seed"]) for s in steps} == {(r, s) for r in ROWS for s in "012"}
    window = [float(s["loss"]) for s in steps[10:35]]
    assert float(steps[34]["smoothed"]) == pytest.approx(sum(window) / 25, rel=1e-6) and steps[23]["smoothed"] == ""
    ends = list(csv.DictReader((tmp_path / "cce_figure5.csv").read_text().splitlines()))
    last = next(e for e in ends if (e["row"], e["seed"], e["update"]) == ("CCE", "1", "1500"))
    assert float(last["ppl_true"]) == pytest.approx(20 * math.exp(-1e-3), rel=1e-6)
    assert float(last["ppl_sequences"]) == pytest.approx(22 * math.exp(-1e-3), rel=1e-6)


def test_the_statistics_that_claims_read_are_written_and_shown(tmp_path, capsys):
    above = [0.1, 0.2, 0.4]
    verdicts(tmp_path, "cce_figure5", records(tmp_path, dict.fromkeys(ROWS, [0.0] * 3) | {"CCE": above}))
    rows = list(csv.DictReader((tmp_path / "cce_figure5.diff.csv").read_text().splitlines()))
    ratio = next(row for row in rows if (row["row"], row["column"]) == ("CCE", "Perplexity Ratio"))
    ratios = [math.exp(nats) for nats in above]
    assert float(ratio["judged_on"]) == pytest.approx(statistics.fmean(ratios), rel=1e-6)
    assert float(ratio["spread"]) == pytest.approx(statistics.stdev(ratios), rel=1e-3) and ratio["seeds"] == "3"
    assert {row["verdict"] for row in rows} == {"not printed"} and {row["published"] for row in rows} == {""}
    proxy = "a proxy of phi3.5-mini: the shape of gpt2, vocab_size 50257"
    assert {row["labels"] for row in rows} == {proxy}
    print_summary(tmp_path / "cce_figure5.csv")
    shown = capsys.readouterr().out
    assert "Perplexity Ratio" in shown and ratio["regenerated"] in shown and "cce_figure5.diff.csv" in shown
    assert proxy in " ".join(shown.split())


def test_words_about_a_statistic_that_the_figure_lacks_are_refused(monkeypatch):
    project = Project({"scale": "gpu"})
    _, spec = project.figure("cce_figure4")
    drawing = Drawing(None, None, {("CCE", "p of Equivalence"): CellSamples((0.5,), (False,), 0.0)})
    assert [row.regenerated for row in statistics_rows(project, "cce_figure4", drawing)] == ["0.5"]
    monkeypatch.setitem(spec.in_words, "p of Equivalent", "small")
    with pytest.raises(SpecError, match="unknown statistic 'p of Equivalent'; did you mean 'p of Equivalence'"):
        statistics_rows(project, "cce_figure4", drawing)


def test_one_seed_decides_nothing_and_a_figure_without_runs_says_so(tmp_path):
    one = verdicts(tmp_path, "cce_figure4", records(tmp_path, {row: [0.0] for row in ROWS}))
    assert {row["verdict"] for row in one.values()} == {"not tested"}
    assert "fewer than two seeds have a record: torch.compile, CCE, CCE-Kahan-FullC" in one["CCE-F4-1"]["reason"]
    three = {row: SAME for row in ROWS if row != CONTROL}
    found = verdicts(tmp_path, "cce_figure4", records(tmp_path / "three", three))
    assert found["CCE-F4-1"]["verdict"] == "holds" and found["CCE-F4-3"]["verdict"] == "not tested"
    assert f"not run: F4[{CONTROL}, Mean Absolute Difference]" in found["CCE-F4-3"]["reason"]
    for name in ("cce_figure3", "cce_figure4", "cce_figure5"):
        assert {row["verdict"] for row in verdicts(tmp_path, name, []).values()} == {"not tested"}
        assert len((tmp_path / f"{name}.csv").read_text().splitlines()) == 1
        assert len((tmp_path / f"{name}.diff.csv").read_text().splitlines()) == 1
        print_summary(tmp_path / f"{name}.csv")


@pytest.mark.parametrize(
    ("scale", "label"), [("gpu", "a proxy of phi3.5-mini: the shape of gpt2, vocab_size 50257"), ("paper", "")]
)
def test_a_model_of_another_size_than_its_column_names_is_labelled_a_proxy(scale, label, tmp_path):
    project = Project({"scale": scale})
    job = project.cells("cce_figure5")[0].jobs[0]
    write_record(tmp_path / "record.json", made_up(job, np.full(job.steps, 3.0), 20.0))
    found = labels_of(project, "cce_figure5", [tmp_path / "record.json"])
    assert [line for line in found if "proxy" in line] == ([label] if label else [])
    assert f"torch.compile: 1 of {len(project.cells('cce_figure5')[0].jobs)} seeds have a record" in found


def test_a_run_that_ended_early_is_left_out_of_the_curves(tmp_path):
    files = records(tmp_path, dict.fromkeys(ROWS, SAME))
    job = Project({"scale": "gpu"}).cells("cce_figure4")[1].jobs[0]
    broken = made_up(job, np.full(40, 3.0), 20.0)
    rows = [*broken.series["train"].rows[:-1], [40, 39 * 64, None]]
    series = broken.series | {"train": Series(columns=broken.series["train"].columns, rows=rows)}
    write_record(tmp_path / f"{job.job_id}.json", broken.model_copy(update={"outcome": "not_finite", "series": series}))
    verdicts(tmp_path, "cce_figure4", files)
    steps = list(csv.DictReader((tmp_path / "cce_figure4.csv").read_text().splitlines()))
    assert len(steps) == 11 * 1500


def test_what_the_paper_did_instead_is_printed_under_each_figure():
    for scale, figure, words in (
        ("gpu", "cce_figure4", ("fine-tunes the instruct checkpoints", "sums its gradients in float32", "162M")),
        ("gpu", "cce_figure5", ("four architectures", "as a cosine", "Wikipedia")),
        ("tiny", "cce_figure5", ("filter drops nothing",)),
        ("paper", "cce_figure5", ("OpenWebText",)),
        ("gpu", "cce_figure3", ("published checkpoints on Alpaca",)),
    ):
        text = " ".join(notes(Project({"scale": scale}), figure, Drawing(None, None)))
        assert all(word in text for word in words), (figure, scale)
