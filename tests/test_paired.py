"""Two cells on the same items: the bootstrap against every resample written out, McNemar's test against scipy's, and
what stands beside a claim."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import binomtest
from support_tables import record_of

from paperlm.checks import open_project
from paperlm.plan.project import ROOT, Project
from paperlm.plan.workflow import Workflow
from paperlm.record.record import DataUsed, read_record, write_record
from paperlm.result import Answers, Series
from paperlm.tables.build import table_contents
from paperlm.tables.claims import paired, paired_gap
from paperlm.tables.claims.paired import ItemSet, Scores
from paperlm.tables.metrics import scores_of
from paperlm.tables.verdicts import claim_rows

ITEMS = "0123456789abcdef"


def answered(*sets: str, factor: float = 1.0) -> Scores:
    """Sets of answers, each written `1101`."""
    return Scores(tuple(ItemSet(ITEMS, tuple(map(float, one))) for one in sets), factor)


def every_gap(left: list[str], right: list[str]) -> list[float]:
    """Of the mean over sets, for each way to draw as many items again."""
    draws = [list(itertools.product(range(len(one)), repeat=len(one))) for one in left]
    share = [
        [statistics.fmean(int(a[i]) - int(b[i]) for i in draw) for draw in of_set]
        for of_set, a, b in zip(draws, left, right, strict=True)
    ]
    return [statistics.fmean(parts) for parts in itertools.product(*share)]


def inside(value: float, exact: list[float], share: float) -> bool:
    """Whether a value is a quantile of a discrete distribution, give or take what 10,000 draws of it miss."""
    low, high = np.quantile(exact, [share - 0.006, share + 0.006], method="inverted_cdf")
    return low - 1e-9 <= value <= high + 1e-9


@pytest.mark.parametrize("few", [64, 0], ids=["counts of pairs", "item by item"])
@pytest.mark.parametrize(
    ("left", "right"), [(["110101"], ["100011"]), (["1101", "01101"], ["0001", "11100"]), (["1111"], ["0101"])]
)
def test_the_interval_is_that_of_every_resample(left, right, few, monkeypatch):
    monkeypatch.setattr(paired, "FEW", few)
    exact = every_gap(left, right)
    found = paired_gap({0: answered(*left)}, {0: answered(*right)}, "x")
    whole = statistics.fmean(a.count("1") / len(a) - b.count("1") / len(b) for a, b in zip(left, right, strict=True))
    assert found.gap == pytest.approx(whole, abs=1e-12)
    assert inside(found.low, exact, 0.025) and inside(found.high, exact, 0.975)
    assert (found.items, found.sets) == (sum(map(len, left)), len(left))


def test_a_perplexity_is_drawn_by_chunks_with_their_tokens():
    """Six chunks of unequal length: every resample written out, the exponential of each."""
    tokens, left, right = (3.0, 5.0, 8.0, 2.0, 9.0), (7.0, 11.0, 15.0, 6.0, 30.0), (6.5, 12.0, 14.0, 5.0, 29.0)
    exact = []
    for draw in itertools.product(range(5), repeat=5):
        n = sum(tokens[i] for i in draw)
        exact.append(math.exp(sum(left[i] for i in draw) / n) - math.exp(sum(right[i] for i in draw) / n))
    one, other = (Scores((ItemSet(ITEMS, x, tokens, "chunks"),), 1.0, np.exp) for x in (left, right))
    found = paired_gap({0: one}, {0: other}, "x")
    assert found.gap == pytest.approx(math.exp(69 / 27) - math.exp(66.5 / 27), rel=1e-12)
    assert inside(found.low, exact, 0.025) and inside(found.high, exact, 0.975)
    assert found.p is None and "on the same 5 chunks" in str(found)


def test_what_both_models_find_hard_drops_out_of_the_gap():
    """1,000 items, of which two models answer the same half, but 40 that one has right alone: the interval is that of
    40 coins and not that of two shares of a half."""
    left = "1" * 500 + "0" * 500
    right = "1" * 460 + "0" * 540
    found = paired_gap({0: answered(left)}, {0: answered(right)}, "x")
    error = math.sqrt(0.04 * 0.96 / 1000)
    assert found.low == pytest.approx(0.04 - 1.96 * error, abs=0.001)
    assert found.high == pytest.approx(0.04 + 1.96 * error, abs=0.0015)
    assert found.high - found.low < 0.6 * 2 * 1.96 * math.sqrt(2 * 0.25 / 1000)


@pytest.mark.parametrize(("gains", "losses"), [(0, 0), (1, 0), (9, 2), (2, 9), (30, 30), (70, 40)])
def test_mcnemars_test_is_the_sign_test_of_the_items_that_one_model_has_right_alone(gains, losses):
    left, right = "1" * gains + "0" * losses + "1100", "0" * gains + "1" * losses + "1100"
    found = paired_gap({0: answered(left)}, {0: answered(right)}, "x")
    expected = binomtest(gains, gains + losses).pvalue if gains + losses else 1.0
    assert found.p == pytest.approx(expected, rel=1e-9)


def test_seeds_are_averaged_item_by_item_and_only_those_that_both_have():
    left = {0: answered("1100"), 1: answered("1010"), 2: answered("0000")}
    right = {0: answered("0100"), 1: answered("1000"), 3: answered("1111")}
    found = paired_gap(left, right, "x")
    assert found.gap == pytest.approx(0.25) and found.p is None
    assert paired_gap(left, {3: answered("1111")}, "x") is None
    twice = paired_gap({0: answered("1100"), 1: answered("1100")}, {0: answered("0100"), 1: answered("0100")}, "x")
    once = paired_gap({0: answered("1100")}, {0: answered("0100")}, "x")
    assert (twice.low, twice.high) == (once.low, once.high), "a seed that says the same adds nothing about items"


def test_models_on_different_items_are_not_compared():
    other = Scores((ItemSet("fedcba9876543210", (1.0, 0.0)),))
    assert paired_gap({0: answered("10")}, {0: other}, "x") is None
    assert paired_gap({0: answered("10")}, {0: answered("101")}, "x") is None
    assert paired_gap({0: answered("10")}, {}, "x") is None


def test_a_percentage_has_its_gap_in_points_and_the_same_seed_the_same_interval():
    pair = {0: answered("1100" * 10, factor=100)}, {0: answered("1000" * 10, factor=100)}
    found = paired_gap(*pair, "x")
    assert found.gap == pytest.approx(25) and found == paired_gap(*pair, "x")
    low, high = f"{found.low:+.3g}", f"{found.high:+.3g}"
    assert str(found) == f"+25 on the same 40 items, 95 % from {low} to {high}, McNemar's p 0.002"


# -- beside a claim ----

FLAGS = {"BitNet a4.8, 700M": "1101101101", "BitNet b1.58, 700M": "1001101001"}
TASKS = {"arc_challenge/acc_norm", "arc_easy/acc_norm", "hellaswag/acc_norm", "piqa/acc_norm", "winogrande/acc"}


def reasons(project: Project, folder, kept: bool) -> dict[tuple[str, str], str]:
    """Of Table 1 with two models, whose records have the answers or are older than the field."""
    paths = []
    for cell in project.cells("bitnet_table1"):
        if cell.row not in FLAGS or cell.mean_of:
            continue
        flags = FLAGS[cell.row]
        losses = [40.0, 61.0, 35.5] if "b1.58" in cell.row else [40.5, 61.5, 35.0]
        if cell.column == "PPL↓":
            series = {"chunks": Series(columns=["chunk", "tokens", "summed_loss"], rows=[])}
            series["chunks"].rows.extend([n, 10 + n, loss] for n, loss in enumerate(losses))
            ppl = math.exp(sum(losses) / 33)
            used = DataUsed(data_id="text", dataset="x", licence="y", checksums={})
            fields = {"series": series if kept else {}, "data": [used], "standard_errors": {"perplexity": 0.1}}
            record = record_of(cell.jobs[0], {"perplexity": ppl}, **fields)
        else:
            share = flags.count("1") / len(flags)
            answers = {name: Answers.of((f == "1" for f in flags), ITEMS) for name in TASKS} if kept else {}
            errors = dict.fromkeys(TASKS, 0.1)
            record = record_of(cell.jobs[0], dict.fromkeys(TASKS, share), standard_errors=errors, answers=answers)
        paths.append(folder / f"{record.job_id}.json")
        write_record(paths[-1], record)
    paths = list(dict.fromkeys(paths))
    contents = table_contents(project, "bitnet_table1", paths)
    return {(row["claim"], row["part"]): row["reason"] for row in claim_rows(project, "bitnet_table1", contents)}


def test_beside_a_claim_on_two_cells_stands_their_gap_on_the_same_items(tmp_path, tiny):
    found = reasons(tiny, tmp_path, kept=True)
    points = "BitNet a4.8, 700M less BitNet b1.58, 700M: +20 on the same 50 items of 5 sets, 95 % from "
    assert points in found["BIT-T1-1", "700M"], "also where the scale cannot judge it: the noise is what it shows"
    assert "so small models answer about as chance does" in found["BIT-T1-1", "700M"]
    gap = math.exp(137 / 33) - math.exp(136.5 / 33)
    assert f"BitNet a4.8, 700M less BitNet b1.58, 700M: {gap:+.3g} on the same 3 chunks" in found["BIT-T1-3p", "700M"]
    others = {key for key, reason in found.items() if "on the same" in reason}
    assert others == {(claim, "700M") for claim in ("BIT-T1-1", "BIT-T1-3", "BIT-T1-3p")}, "no whole, no other size"


KEPT = [*(ROOT / "paper_tables/records/gpu").glob("stored_perplexity/*.json")]


@pytest.mark.parametrize("metric", ["word_perplexity", "perplexity", "loss"])
def test_a_metric_of_a_committed_record_follows_from_what_it_keeps_of_each_window(metric):
    assert len(KEPT) > 20
    for path in KEPT:
        record = read_record(path)
        (one,) = (scores := scores_of(record, [metric], 1.0)).sets
        found = float(scores.form(np.array(statistics.fmean(one.scores))))
        assert found == pytest.approx(record.metrics[metric], rel=1e-6) and one.called == "windows"


def test_models_of_one_size_stored_in_several_ways_are_compared_on_the_windows_that_all_read():
    """The proxies of Tables 3a and 4 that are in the repository read one text by one tokenizer."""
    scores = [scores_of(read_record(path), ["word_perplexity"], 1.0) for path in KEPT]
    assert len({one.sets[0].items for one in scores}) == 1
    assert paired_gap({0: scores[0]}, {0: scores[1]}, "x").called == "windows"


def test_windows_are_the_same_of_one_text_by_one_tokenizer_whichever_models_and_stages_are_behind_it():
    def items(data="d", words=9, slug="m", **tokenizer):
        base = SimpleNamespace(slug=lambda: slug, **tokenizer)
        stored = SimpleNamespace(of=SimpleNamespace(of=base))
        kept = {"windows": Series(columns=["window", "mean_loss"], rows=[[0, 1.0], [1, 2.0]])}
        record = SimpleNamespace(
            answers={}, series=kept, metrics={"tokens": 6, "words": words}, data=[SimpleNamespace(data_id=data)],
            value=lambda: stored,
        )  # fmt: skip
        return scores_of(record, ["loss"], 1.0).sets[0].items

    assert items(tokenizer="t5", slug="a") == items(tokenizer="t5", slug="b")
    others = [items(), items(data="e"), items(words=8), items(slug="n"), items(tokenizer="t5"), items(tokenizer="c")]
    assert len(set(others)) == len(others)


def test_beside_a_claim_on_perplexities_stands_their_gap_on_the_same_windows():
    project = open_project({"scale": "gpu", "run_missing": "no"})
    files = [ROOT / path for path in Workflow(project).inputs("neuzip_table4")]
    contents = table_contents(project, "neuzip_table4", files)
    (reason,) = (r["reason"] for r in claim_rows(project, "neuzip_table4", contents) if r["claim"] == "NEU-T4-6")
    cells = [contents.cells["NeuZip 0-bit", f"Block {n} PPL"] for n in (32, 512)]
    gap = float(cells[0].regenerated) - float(cells[1].regenerated)
    said = re.search(r"Block 32 PPL less Block 512 PPL: (\S+) on the same ([\d,]+) windows, 95 % from (\S+) to", reason)
    assert float(said[1]) == pytest.approx(gap, rel=5e-3, abs=5e-3) and said[2] == "1,322"


def test_batches_of_answers_count_alike_and_are_told_apart_by_their_tokens(tiny):
    (job, *_) = (cell.jobs[0] for cell in tiny.cells("neuzip_table3b") if cell.jobs and not cell.jobs[0].timed)
    losses, other = [1.0, 2.0, 4.5], [1.5, 2.0, 3.5]

    def record(losses, tokens):
        rows = [[n, *pair] for n, pair in enumerate(zip(losses, tokens, strict=True))]
        series = {"batches": Series(columns=["batch", "mean_loss", "tokens"], rows=rows)}
        return record_of(job, {"perplexity": math.exp(statistics.fmean(losses))}, series=series)

    left, right = (scores_of(record(found, [5, 6, 7]), ["perplexity"], 1.0) for found in (losses, other))
    found = paired_gap({0: left}, {0: right}, "x")
    assert found.gap == pytest.approx(math.exp(2.5) - math.exp(7 / 3)) and "on the same 3 batches" in str(found)
    assert paired_gap({0: left}, {0: scores_of(record(other, [5, 6, 8]), ["perplexity"], 1.0)}, "x") is None


def test_records_without_items_say_what_they_said_before(tmp_path, tiny):
    assert not any("on the same" in reason for reason in reasons(tiny, tmp_path, kept=False).values())


@pytest.mark.parametrize("values", [[0.0, 1.0], list(range(300))])
def test_items_are_drawn_again_ten_thousand_times_few_and_many_values_alike(values):
    table = np.array([[value, 2.0 * value, 1.0] for value in values])
    sums = paired._resampled(np.random.default_rng(1), table)
    assert sums.shape == (10_000, 3) and (sums[:, 2] == len(values)).all()
    assert sums[:, 0].mean() == pytest.approx(sum(values), rel=0.02)
