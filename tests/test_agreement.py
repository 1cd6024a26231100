"""A job that is made again against its committed record: what rounding explains passes, what it does not is named."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from paperlm.plan.project import ROOT
from paperlm.record.agreement import disagreements
from paperlm.record.record import Record, read_record
from paperlm.result import Answers, Series

PRETRAIN = ROOT / "paper_tables/records/gpu/pretrain"


def committed(start: str) -> Record:
    """Of the run that is called so, with the settings of the papers' tables."""
    drawn = {path for path in PRETRAIN.glob(f"{start}-????????.json") if '"embed_init_std": 0.6325' in path.read_text()}
    (path,) = {*PRETRAIN.glob(f"{start}-????????.json")} - drawn
    return read_record(Path(path))


@pytest.fixture(scope="module")
def base() -> Record:
    """A record of a CPU."""
    record = committed("llama_71m-mix_ln-s0")
    return record.model_copy(update={"environment": record.environment.model_copy(update={"device": "CPU"})})


def saying(base: Record, **changes: object) -> Record:
    return base.model_copy(update={"metrics": {}, "standard_errors": {}, "series": {}, **changes})


def elsewhere(record: Record, **environment: object) -> Record:
    changed = environment or {"cpu": "another"}
    return record.model_copy(update={"environment": record.environment.model_copy(update=changed)})


def values(base: Record, value: float | None, error: float | None = None) -> Record:
    return saying(base, metrics={"x": value}, standard_errors={} if error is None else {"x": error})


def curve(base: Record, column: list, name: str = "y") -> Record:
    rows = [list(row) for row in enumerate(column)]
    return saying(base, series={"curve": Series(columns=["update", name], rows=rows)})


def noise(seed: int, size: float, start: float = 4.0, count: int = 40) -> list[float]:
    draw = random.Random(seed)
    return [start + draw.gauss(0, size) for _ in range(count)]


# -- the same kind of machine ----


@pytest.mark.parametrize("make", [values, lambda base, v: curve(base, [1.0, v])], ids=["metric", "series"])
def test_on_the_same_kind_of_cpu_the_last_bit_counts(base, make):
    one, other = make(base, 0.5), make(base, math.nextafter(0.5, 1))
    assert disagreements(one, one) == []
    (said,) = disagreements(one, other)
    assert "0.5, now 0.5000000000000001" in said
    assert disagreements(one, elsewhere(other)) == []


def test_on_the_same_kind_of_cpu_standard_errors_are_equal_too(base):
    assert disagreements(values(base, 1.0, 0.1), values(base, 1.0, 0.2)) == ["standard error of x 0.1, now 0.2"]


@pytest.mark.parametrize("environment", [{"threads": 99}, {"packages": {"torch": "0.1"}}, {"cpu": "x"}])
def test_another_number_of_threads_or_another_torch_may_round_otherwise(base, environment):
    assert disagreements(values(base, 1.0), elsewhere(values(base, 1.001), **environment)) == []


def test_two_runs_on_one_kind_of_gpu_may_round_otherwise(base):
    on_gpu = elsewhere(values(base, 1.0), device="NVIDIA H200")
    assert disagreements(on_gpu, on_gpu.model_copy(update={"metrics": {"x": 1.001}})) == []


# -- metrics elsewhere ----


@pytest.mark.parametrize(
    ("then", "now", "agree"),
    [
        (100.0, 104.9, True),
        (100.0, 106.0, False),
        (0.0002, 0.0009, True),  # 350 % of nearly nothing
        (-0.0004, 0.0004, True),
        (0.0, 0.0011, False),
        (0.02, 0.022, False),
        (None, 1.0, False),
        (1.0, None, False),
        (None, None, True),
    ],
)
def test_a_number_without_a_standard_error_is_within_five_percent_or_a_thousandth(base, then, now, agree):
    found = disagreements(values(base, then), elsewhere(values(base, now)))
    assert found == ([] if agree else [f"x {then}, now {now}"])


@pytest.mark.parametrize(("then", "now"), [(1000, 1001), (0, 1), (5, 6)])
def test_counts_are_equal_on_every_machine(base, then, now):
    assert disagreements(values(base, then), elsewhere(values(base, now))) == [f"x {then}, now {now}"]
    assert disagreements(values(base, then), elsewhere(values(base, then))) == []


@pytest.mark.parametrize(
    ("then", "now", "error", "agree"),
    [
        (0.30, 0.49, 0.04, True),
        (0.30, 0.51, 0.04, False),
        (-0.01, 0.02, 0.01, True),
        (100.0, 100.5, 0.01, False),  # half a percent, and fifty standard errors
        (0.0, 0.0005, 0.0, True),  # an error of none measured nothing
    ],
)
def test_a_metric_with_a_standard_error_is_within_five_of_them(base, then, now, error, agree):
    found = disagreements(values(base, then, error), elsewhere(values(base, now, error)))
    assert (found == []) == agree
    assert agree or found == [f"x {then}, now {now} (standard error {error:.3g})"]


def test_a_metric_that_only_the_new_record_has_contradicts_nothing_and_one_that_it_lacks_does(base):
    one, none = values(base, 1.0), saying(base)
    assert disagreements(none, one) == [] and disagreements(one, none) == ["x 1.0, now None"]


def test_another_outcome_is_all_that_is_said(base):
    assert disagreements(base, base.model_copy(update={"outcome": "not_finite"})) == ["outcome trained, now not_finite"]


def test_when_a_loss_overflows_is_a_matter_of_rounding(base):
    then, now = (values(base, update).model_copy(update={"outcome": "not_finite"}) for update in (310, 355))
    assert disagreements(then, elsewhere(now)) == [] and disagreements(then, now) == ["x 310, now 355"]


# -- series ----


def test_a_series_with_other_columns_or_rows_is_another_one(base):
    long, short = curve(base, [1.0, 2.0, 3.0]), curve(base, [1.0, 2.0])
    assert disagreements(long, elsewhere(short)) == ["series curve: 3 rows of update, y, now 2 rows of update, y"]
    named = curve(base, [1.0, 2.0], "z")
    assert disagreements(short, elsewhere(named)) == ["series curve: 2 rows of update, y, now 2 rows of update, z"]
    assert disagreements(short, saying(base)) == ["series curve: 2 rows of update, y, now missing"]
    assert disagreements(saying(base), short) == []


@pytest.mark.parametrize("column", [[1, 2, 4], ["a", "b", "c"], [1.0, 2.0, None]])
def test_words_counts_and_missing_numbers_of_a_series_are_equal_row_by_row(base, column):
    other = [1, 2, 5] if column[0] == 1 else ["a", "b", "d"] if column[0] == "a" else [1.0, 2.0, 3.0]
    (said,) = disagreements(curve(base, column), elsewhere(curve(base, other)))
    assert said == f"series curve: y {column[2]}, now {other[2]} (row 3, the first)"


def test_two_curves_of_one_noisy_quantity_agree_and_one_that_is_shifted_by_three_deviations_does_not(base):
    around_zero = curve(base, noise(0, 0.3, start=0.0))
    for seed in range(1, 30):
        assert disagreements(around_zero, elsewhere(curve(base, noise(seed, 0.3, start=0.0)))) == []
        assert disagreements(around_zero, elsewhere(curve(base, noise(seed, 0.3, start=0.9))))


def test_a_smooth_curve_that_is_a_tenth_higher_is_another_one_and_one_single_row_is_not(base):
    smooth = [4 + 3 * math.exp(-i / 10) for i in range(60)]
    higher, spike = [1.1 * y for y in smooth], [*smooth[:30], 40.0, *smooth[31:]]
    (said,) = disagreements(curve(base, smooth), elsewhere(curve(base, higher)))
    assert said.startswith("series curve: y 7.0, now 7.7")
    assert disagreements(curve(base, smooth), elsewhere(curve(base, spike))) == []


def test_a_column_over_many_orders_of_magnitude_is_judged_in_its_own_size(base):
    ranks = [0.3 * 0.8**k for k in range(100)]
    assert disagreements(curve(base, ranks), elsewhere(curve(base, [1.03 * y for y in ranks]))) == []
    assert disagreements(curve(base, ranks), elsewhere(curve(base, [*ranks[:2], *(3 * y for y in ranks[2:])])))


def losses(base: Record, before: float, after: float) -> Record:
    rows = [[0, before, math.exp(before)], [938, after, math.exp(after)]]
    return saying(base, series={"eval": Series(columns=["update", "loss", "ppl"], rows=rows)})


def test_of_a_loss_and_its_perplexity_the_loss_is_compared(base):
    """The digits are of a Mix-LN model of 130M, fine-tuned on an H200, and made again with its model on an H100."""
    then, now = losses(base, 5.286152, 1.901093), losses(base, 5.156880, 1.900022)
    assert disagreements(then, elsewhere(now)) == []
    (said,) = disagreements(then, elsewhere(losses(base, 5.286152, 1.1 * 1.901093 + 0.3)))
    assert said.startswith("series eval: loss 1.901093, now 2.39")
    alone = curve(base, [197.58, 6.69], "ppl"), curve(base, [173.62, 6.69], "ppl")
    assert disagreements(alone[0], elsewhere(alone[1])), "without its loss a perplexity stands for itself"
    assert disagreements(then, now), "and on the same machine every digit counts"


# -- committed runs ----


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("loss", ["cce_exact", "cce_kahan", "cce_kahan_full_c"])
def test_runs_that_differ_in_the_rounding_of_their_loss_alone_agree(seed, loss):
    assert disagreements(committed(f"llama_gpt2-pre_ln-s{seed}"), committed(f"llama_gpt2-pre_ln-{loss}-s{seed}")) == []


def test_runs_of_two_methods_two_sizes_or_two_seeds_contradict_each_other():
    mix = committed("llama_71m-mix_ln-s0")
    for other in ("llama_71m-pre_ln-s0", "llama_71m-deep_norm.authors_public-s0", "llama_71m-mix_ln-s1"):
        assert disagreements(mix, committed(other)), other


# -- answers to items ----


def answering(base: Record, flags: list[bool], items: str = "0123456789abcdef") -> Record:
    return saying(base, answers={"piqa/acc": Answers.of(flags, items)})


def test_another_answer_is_named_on_the_same_machine_and_rounding_elsewhere(base):
    one, other = answering(base, [True, False, True]), answering(base, [True, True, True])
    assert disagreements(one, one) == []
    assert disagreements(one, other) == ["answers piqa/acc: another one to item 2 (the first)"]
    assert disagreements(one, elsewhere(other)) == [], "how many are right is a metric, and judged as one"


def test_answers_to_other_items_contradict_wherever_they_were_given(base):
    one, other = answering(base, [True, False]), answering(base, [True, False], "fedcba9876543210")
    assert disagreements(one, elsewhere(other)) == [
        "answers piqa/acc: to 2 items (0123456789abcdef), now to 2 (fedcba9876543210)"
    ]
    assert disagreements(one, saying(base)) == ["answers piqa/acc: to 2 items (0123456789abcdef), now missing"]
    assert disagreements(saying(base), one) == [], "a record that is older than the field contradicts nothing"


def test_answers_are_packed_a_bit_each_and_damage_is_refused():
    flags = [True, False, False, False, True, True, False, True, True, False]
    packed = Answers.of(flags, "0123456789abcdef")
    assert packed.right == "8d80" and packed.items == 10 and packed.flags() == flags, "1000 1101 | 10"
    full = Answers.of([True] * 10_042, "0123456789abcdef")
    assert len(full.right) == 2512 and full.flags() == [True] * 10_042
    for right in ("8d", "8d8000", "8d81", "8D80", "xd80"):
        with pytest.raises(ValueError, match="10 items take 4 hexadecimal digits"):
            Answers(items=10, digest="0123456789abcdef", right=right)
