"""The judge: each comparison alone, three-valued logic, outcomes as posterior, parts; and its calibration."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom, norm, t
from support_claims import cell, verdict

from paperlm.tables.claims.decide import ALPHA, PAIRED

LESS = "M['a'] < M['b']"

# -- limits, from both sides ----


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize(
    ("factor", "word"), [(1.001, "holds"), (0.999, "undecided"), (-0.999, "undecided"), (-1.001, "fails")]
)
def test_a_known_deviation_decides_a_gap_beyond_the_normal_quantile_and_none_below(n, factor, word):
    gap = factor * norm.ppf(1 - ALPHA) * math.sqrt(2 / n) * 0.5
    cells = {"a": cell(*[10.0] * n, deviation=0.5), "b": cell(*[10.0 + gap] * n, deviation=0.5)}
    found = verdict(LESS, cells)
    assert found.verdict == word
    assert found.margin == pytest.approx(-gap)
    assert found.detectable == pytest.approx(norm.ppf(1 - ALPHA) * math.sqrt(2 / n) * 0.5)


@pytest.mark.parametrize(("factor", "word"), [(1.001, "holds"), (0.999, "undecided"), (-1.001, "fails")])
def test_few_seeds_alone_decide_by_students_t_of_their_pooled_deviation(factor, word):
    """Two cells of three seeds: 4 degrees of freedom, pooled."""
    spread = np.array([-1.0, 0.0, 1.0])
    gap = factor * t.ppf(1 - ALPHA, 4) * math.sqrt(2 / 3)
    cells = {"a": cell(*(10 + spread), pool="p"), "b": cell(*(10 + gap + spread), pool="p")}
    assert verdict(LESS, cells).verdict == word


@pytest.mark.parametrize(("factor", "word"), [(1.001, "holds"), (0.999, "undecided"), (-1.001, "fails")])
def test_from_five_common_seeds_on_the_gaps_of_the_seeds_decide(factor, word):
    """Seeds move both sides alike, so that a gap is told that deviations of single runs would hide."""
    shared = np.array([-5.0, 3.0, 8.0, -1.0, 2.0])
    wobble = np.array([0.1, -0.2, 0.05, 0.15, -0.1])
    gaps = wobble - wobble.mean()
    gaps += factor * t.ppf(1 - ALPHA, 4) * gaps.std(ddof=1) / math.sqrt(5)
    cells = {"a": cell(*(20 + shared), deviation=4.0), "b": cell(*(20 + shared + gaps), deviation=4.0)}
    assert verdict(LESS, cells).verdict == word
    four = {key: cell(*c.values[:4], deviation=4.0) for key, c in cells.items()}
    assert verdict(LESS, four).verdict == "undecided" and PAIRED == 5


def test_seeds_are_matched_by_number_and_not_by_position():
    base = np.array([0.0, 10.0, 20.0, 30.0, 40.0])
    a = cell(*base, seeds=(0, 1, 2, 3, 4), deviation=15.0)
    b = cell(*(base + 1 + 0.01 * np.arange(5))[::-1], seeds=(4, 3, 2, 1, 0), deviation=15.0)
    assert verdict(LESS, {"a": a, "b": b}).verdict == "holds"
    other = cell(*b.values, seeds=(5, 6, 7, 8, 9), deviation=15.0)
    assert verdict(LESS, {"a": a, "b": other}).verdict == "undecided"


def test_seeds_that_agree_by_chance_do_not_get_below_the_known_deviation():
    cells = {"a": cell(10.0, 10.0, deviation=0.5), "b": cell(10.2, 10.2, deviation=0.5)}
    assert verdict(LESS, cells).verdict == "undecided"


def test_the_standard_error_of_a_ratio_is_that_of_the_delta_method():
    found = verdict("1 - M['a']/M['b'] >= 0.02", {"a": cell(96.0, deviation=1.0), "b": cell(100.0, deviation=2.0)})
    error = math.sqrt((1 / 100) ** 2 + (96 / 100**2 * 2) ** 2)
    assert found.detectable == pytest.approx(norm.ppf(1 - ALPHA) * error, rel=1e-3)
    assert found.margin == pytest.approx(-0.02)


def test_a_cell_on_both_sides_counts_once():
    cells = {"a": cell(10.0, deviation=5.0), "b": cell(1.0, deviation=0.1)}
    assert verdict("M['a'] < M['a'] + M['b']", cells).verdict == "holds"


def test_numbers_without_noise_are_compared_as_they_are():
    cells = {"a": cell(4.0), "b": cell(1.0)}
    assert verdict("M['a'] <= 4 * M['b']", cells).verdict == "holds"
    assert verdict("M['a'] < 4 * M['b']", cells).verdict == "fails"
    assert verdict("M['a'] == 4 * M['b']", cells).verdict == "holds"


@pytest.mark.parametrize(
    ("expression", "other", "word"),
    [
        ("M['a'] == M['b']", cell(7, 9, hashes=True), "holds"),
        ("M['a'] == M['b']", cell(9, 7, hashes=True), "fails"),
        ("M['a'] == M['b']", cell(7, 8, hashes=True), "fails"),
        ("M['a'] != M['b']", cell(8, 10, hashes=True), "holds"),
        ("M['a'] == M['b']", cell(7, 9, hashes=True, seeds=(2, 3)), "undecided"),
        ("M['a'] == M['b']", cell(9, hashes=True, seeds=(1,)), "holds"),
        ("M['a'] == M['b']", cell(math.inf, math.inf, hashes=True), "undecided"),
        ("M['a'] == M['b']", cell(7, 9, deviation=1.0), "undecided"),
    ],
)
def test_hashes_are_compared_seed_by_seed_and_one_that_differs_refutes_equality(expression, other, word):
    assert verdict(expression, {"a": cell(7, 9, hashes=True), "b": other}).verdict == word


def test_two_trainings_that_left_no_hash_are_not_the_same_bits():
    both = {name: cell(math.inf, hashes=True) for name in "ab"}
    assert verdict("M['a'] == M['b']", both).verdict == "undecided"
    apart = {"a": cell(7, hashes=True), "b": cell(7, hashes=True, seeds=(1,))}
    found = verdict("M['a'] == M['b']", apart)
    assert found.verdict == "undecided" and found.per_seed == ()


def test_equality_of_noisy_numbers_can_be_refuted_and_never_shown():
    near = {"a": cell(10.0, deviation=1.0), "b": cell(10.0, deviation=1.0)}
    far = {"a": cell(10.0, deviation=1.0), "b": cell(20.0, deviation=1.0)}
    assert [verdict("M['a'] == M['b']", cells).verdict for cells in (near, far)] == ["undecided", "fails"]
    assert [verdict("M['a'] != M['b']", cells).verdict for cells in (near, far)] == ["undecided", "holds"]


def test_one_value_whose_noise_nobody_measured_decides_nothing():
    cells = {"a": cell(1.0, measured=False), "b": cell(9.0, measured=False)}
    found = verdict(LESS, cells)
    assert (found.verdict, found.per_seed) == ("undecided", (True,)) and "was not measured" in found.reason


def test_a_comparison_of_many_needs_a_wider_gap():
    """Bonferroni: the quantile is that of 0.025 over the number of comparisons."""
    gap = norm.ppf(1 - ALPHA / 2) * math.sqrt(2) * 1.01
    cells = {"a": cell(0.0, deviation=1.0), "b": cell(gap, deviation=1.0), "c": cell(50.0, deviation=1.0)}
    both = f"{LESS} and M['a'] < M['c']"
    assert verdict(both, cells).verdict == "holds"
    less = {**cells, "b": cell(gap * 0.97, deviation=1.0)}
    assert verdict(LESS, less).verdict == "holds" and verdict(both, less).verdict == "undecided"


# -- three-valued logic ----

OPEN = {"a": cell(1.0, deviation=1.0), "b": cell(1.1, deviation=1.0)}
SOLID = {"c": cell(0.0, deviation=0.1), "d": cell(9.0, deviation=0.1)}


@pytest.mark.parametrize(
    ("expression", "word"),
    [
        ("M['a'] < M['b'] and M['c'] < M['d']", "undecided"),
        ("M['a'] < M['b'] and M['d'] < M['c']", "fails"),
        ("M['a'] < M['b'] or M['c'] < M['d']", "holds"),
        ("M['a'] < M['b'] or M['d'] < M['c']", "undecided"),
        ("not (M['d'] < M['c'])", "holds"),
        ("not (M['a'] < M['b'])", "undecided"),
        ("M['c'] < min(M['d'], M['zz'])", "not tested"),
        ("M['d'] < min(M['c'], M['zz'])", "fails"),
        ("M['c'] < max(M['d'], M['zz'])", "holds"),
        ("mean([M['c'], M['zz']]) < M['d']", "not tested"),
        ("all(M['d'] < M[x] for x in ['c', 'zz'])", "fails"),
        ("argmin({'c': M['c'], 'd': M['d']}) == 'c'", "holds"),
        ("argmin({'c': M['c'], 'd': M['d'], 'zz': M['zz']}) == 'd'", "fails"),
        ("argmin({'c': M['c'], 'd': M['d'], 'zz': M['zz']}) in ['c', 'zz']", "not tested"),
    ],
)
def test_what_is_solid_settles_what_is_open_cannot_and_what_was_not_run_is_unknown(expression, word):
    found = verdict(expression, {**OPEN, **SOLID})
    assert found.verdict == word
    if word == "not tested":
        assert "M[zz]" in found.reason and [key for _, key in found.missing] == ["zz"]


def test_only_what_a_claim_hangs_on_is_named_as_what_would_decide_it():
    """The open gap does not matter where a solid one already settles the alternative."""
    found = verdict("(M['a'] < M['b'] or M['c'] < M['d']) and M['zz'] < 1", {**OPEN, **SOLID})
    assert found.verdict == "not tested" and found.open_cells == {}
    found = verdict("M['a'] < M['b'] and M['c'] < M['d']", {**OPEN, **SOLID})
    assert {key for _, key in found.open_cells} == {"a", "b"}


@pytest.mark.parametrize(
    "expression",
    [
        "(M['a'] < M['b'] and M['zz'] < 1) or (M['yy'] < 1 and M['a'] < M['b'])",
        "not ((M['a'] >= M['b'] or M['zz'] >= 1) and (M['yy'] >= 1 or M['a'] >= M['b']))",
    ],
)
def test_what_a_claim_hangs_on_is_found_where_no_single_answer_would_settle_it(expression):
    """Alternatives of two parts each: with all else true or all else false no part makes a difference."""
    found = verdict(expression, {**OPEN, **SOLID})
    assert found.verdict == "not tested" and {key for _, key in found.missing} == {"yy", "zz"}
    assert {key for _, key in found.open_cells} == {"a", "b"} and abs(found.margin) == pytest.approx(0.1)


def test_a_row_that_is_compared_with_itself_asks_for_no_seeds_and_takes_no_level_from_the_others():
    cells = {"a": cell(1.0, deviation=0.1), "b": cell(1.3, deviation=0.1)}
    alone, looped = (verdict(text, cells) for text in (LESS, "all(M['a'] <= M[o] for o in ['a', 'b'])"))
    assert (looped.verdict, looped.comparisons) == ("holds", 1) and looped.detectable == alone.detectable
    assert verdict("M['a'] < M['a']", cells).verdict == "fails"
    assert verdict("M['a'] <= M['a'] or M['a'] < M['b']", {}).verdict == "not tested"
    # Pareto-optimal: no other row is as good in both and better in one
    rows = {(r, k): cell(v, deviation=d) for r, x, y in (("p", 1.0, 2.0), ("q", 2.0, 1.0), ("o", 2.0, 2.5))
            for k, v, d in (("Mem", x, 0.0), ("PPL", y, 0.01))}  # fmt: skip
    optimal = (
        "all(M[o,'Mem'] > M[r,'Mem'] or M[o,'PPL'] > M[r,'PPL'] or (M[o,'Mem'] >= M[r,'Mem'] and "
        "M[o,'PPL'] >= M[r,'PPL']) for o in ['p', 'q', 'o'])"
    )
    found = verdict(optimal, rows, for_each={"r": ["p", "q", "o"]})
    assert [part.verdict for part in found.parts] == ["holds", "holds", "fails"]


def test_an_undecided_gap_names_the_seeds_that_would_decide_it_if_it_stayed():
    found = verdict(LESS, {"a": cell(0.0, deviation=1.0), "b": cell(1.0, deviation=1.0)})
    seeds = set(found.open_cells.values())
    assert seeds == {8}, "2 x 1.96^2 = 7.7"
    assert (
        verdict(LESS, {"a": cell(*[0.0] * 8, deviation=1.0), "b": cell(*[1.0] * 8, deviation=1.0)}).verdict == "holds"
    )


# -- outcomes ----


@pytest.mark.parametrize(
    ("runs", "word"),
    [
        ((True,) * 3, "undecided"),
        ((True,) * 4, "holds"),
        ((False,) * 3, "undecided"),
        ((False,) * 4, "fails"),
        ((True, False) * 4, "undecided"),
    ],
)
def test_four_agreeing_seeds_decide_an_outcome(runs, word):
    assert verdict("div(M['a'])", {"a": cell(*[9.0] * len(runs), diverged=runs)}).verdict == word


@pytest.mark.parametrize(("n", "word"), [(6, "undecided"), (7, "holds")])
def test_seven_agreeing_seeds_decide_eight_outcomes_at_once(n, word):
    cells = {str(i): cell(*[9.0] * n, diverged=(False,) * n) for i in range(8)}
    assert verdict("not any(div(M[c]) for c in ['0','1','2','3','4','5','6','7'])", cells).verdict == word


def test_the_posterior_of_an_outcome_is_that_of_jeffreys_prior():
    from scipy.stats import beta

    assert beta.sf(0.5, 4.5, 0.5) >= 1 - ALPHA > beta.sf(0.5, 3.5, 0.5)
    ten = (True,) * 9 + (False,)
    assert beta.sf(0.5, 9.5, 1.5) >= 1 - ALPHA
    assert verdict("div(M['a'])", {"a": cell(*[9.0] * 10, diverged=ten)}).verdict == "holds"


def test_a_cell_keeps_the_outcome_of_all_its_seeds_in_a_comparison():
    cells = {"a": cell(40.0, deviation=0.3), "b": cell(1284.0, deviation=8.0, diverged=(True,))}
    assert verdict(LESS, cells).verdict == "holds"


def test_a_comparison_that_comes_out_alike_for_both_outcomes_is_decided_and_another_is_not():
    mixed = cell(41.3, 1280.0, 41.2, deviation=0.3, diverged=(False, True, False))
    cells = {"a": cell(40.0, 40.1, 40.0, deviation=0.3), "b": mixed, "c": cell(60.0, 60.0, 60.0, deviation=0.3)}
    assert verdict(LESS, cells).verdict == "holds"
    found = verdict("M['b'] < M['c']", cells)
    assert found.verdict == "undecided" and "end differently" in found.reason
    assert found.per_seed == (True, False, True)


def test_two_outcomes_are_never_averaged():
    mixed = cell(40.0, 1280.0, deviation=0.1, diverged=(False, True))
    found = verdict("M['b'] < 700 and M['b'] > 600", {"b": mixed})
    assert found.verdict != "holds", "660 is a number that no run had"


def test_an_infinite_loss_is_above_every_number_and_two_of_them_are_not_compared():
    cells = {
        "a": cell(40.0, deviation=1.0),
        "b": cell(math.inf, diverged=(True,)),
        "c": cell(math.inf, diverged=(True,)),
    }
    assert verdict(LESS, cells).verdict == "holds"
    assert verdict("M['b'] < M['c']", cells).verdict == "undecided"


# -- parts, redraws, tests ----


def test_parts_have_verdicts_of_their_own_and_the_whole_says_how_far_it_got():
    cells = {"a1": cell(0.0, deviation=0.1), "b1": cell(9.0, deviation=0.1), "a2": cell(1.0, deviation=1.0),
             "b2": cell(1.1, deviation=1.0)}  # fmt: skip
    found = verdict("M['a' + c] < M['b' + c]", cells, for_each={"c": ["1", "2", "3"]})
    assert [(p.part, p.verdict) for p in found.parts] == [("1", "holds"), ("2", "undecided"), ("3", "not tested")]
    assert found.verdict == "not tested"
    assert found.reason.startswith("holds in 1 of 3, 1 undecided, 1 not tested")
    refuted = verdict("M['b' + c] < M['a' + c]", cells, for_each={"c": ["1", "3"]})
    assert refuted.verdict == "fails" and "fails in 1" in refuted.reason


def test_parts_go_through_every_combination():
    cells = {f"{a}{b}": cell(1.0) for a in "xy" for b in "pq"}
    found = verdict("M[a + b] < 2", cells, for_each={"a": ["x", "y"], "b": ["p", "q"]})
    assert [part.part for part in found.parts] == ["x, p", "x, q", "y, p", "y, q"] and found.verdict == "holds"


def test_a_rank_is_decided_by_redraws_that_the_claims_name_makes_the_same():
    steep = {str(i): cell(float(i), deviation=0.1) for i in range(6)}
    flat = {str(i): cell(0.1 * i, deviation=1.0) for i in range(6)}
    claim = "rank_correlation([M['0'], M['1'], M['2'], M['3'], M['4'], M['5']], [1, 2, 3, 4, 5, 6]) > 0.8"
    assert verdict(claim, steep).verdict == "holds"
    found = [verdict(claim, flat, seed=seed) for seed in ("A", "A", "B")]
    assert {f.verdict for f in found} == {"undecided"}
    assert found[0].reason == found[1].reason != found[2].reason and "20,000 redraws" in found[0].reason


def test_redraws_move_means_and_not_single_runs():
    """Of nine seeds a mean moves by a third: P(x > 0) is Phi(3 x 0.7) = 0.982, not Phi(0.7) = 0.758."""
    claim = "round(M['a'], 9) > 0"
    assert verdict(claim, {"a": cell(*[0.7] * 9, deviation=1.0)}).verdict == "holds"
    assert verdict(claim, {"a": cell(0.7, deviation=1.0)}).verdict == "undecided"


def test_a_test_and_its_opposite_that_are_both_not_significant_decide_nothing():
    for p, q, word in ((0.01, 0.9, "holds"), (0.9, 0.01, "fails"), (0.2, 0.3, "undecided")):
        assert verdict("significant(M['a'], M['b'])", {"a": cell(p), "b": cell(q)}).verdict == word


def test_the_comparison_that_is_shown_is_the_one_that_a_verdict_hangs_on():
    cells = {"a": cell(0.0, deviation=1.0), "b": cell(5.0, deviation=1.0), "c": cell(50.0, deviation=1.0)}
    assert verdict("M['a'] < M['b'] and M['a'] < M['c']", cells).margin == -5.0, "the narrow one"
    assert verdict("M['b'] < M['a'] and M['c'] < M['a']", cells).margin == 50.0, "the clearest refutation"
    assert verdict("M['a'] < M['c'] or M['b'] < M['a']", cells).margin == -50.0, "the one that makes it true"


# -- calibration ----

TABLES = 1500


def rates(make, expression: str) -> tuple[float, float]:
    """Shares of `holds` and `fails` over made-up tables."""
    rng = np.random.default_rng(11)
    words = [verdict(expression, make(rng)).verdict for _ in range(TABLES)]
    return words.count("holds") / TABLES, words.count("fails") / TABLES


def allowed(rate: float = ALPHA) -> float:
    """What a binomial of that rate exceeds once in a thousand times."""
    return binom.isf(1e-3, TABLES, rate) / TABLES


def noisy(rng, mean: float, n: int, first: int = 0, known: float = 1.0):
    values = mean + rng.standard_normal(n)
    return cell(*values, deviation=known, pool="p", seeds=tuple(range(first, first + n)))


@pytest.mark.parametrize(
    ("n", "known"), [(1, 1.0), (2, 1.0), (3, 1.0), (5, 1.0), (7, 1.0), (2, 0.01), (3, 0.01), (5, 0.01), (7, 0.01)]
)
def test_a_gap_of_zero_is_called_true_or_false_at_most_at_the_level(n, known):
    """With the deviation of a run known, and with nothing but the seeds to tell it (from two on)."""
    wrong = rates(lambda rng: {"a": noisy(rng, 0, n, known=known), "b": noisy(rng, 0, n, known=known)}, LESS)
    assert max(wrong) <= allowed()


@pytest.mark.parametrize("n", [1, 3, 5])
@pytest.mark.parametrize("false", [1, 8])
def test_conjunctions_of_eight_are_wrongly_held_or_failed_at_most_at_the_level(n, false):
    """Eight gaps at once: one or all of them zero makes a wrong `holds` rare; all just above zero, a wrong `fails`."""
    claim = "all(M['a' + c] < M['b' + c] for c in ['0','1','2','3','4','5','6','7'])"

    def table(gap_of):
        return lambda rng: {
            key: value
            for i in range(8)
            for key, value in ((f"a{i}", noisy(rng, 0, n)), (f"b{i}", noisy(rng, gap_of(i), n)))
        }

    holds, _ = rates(table(lambda i: 0.0 if i < false else 9.0), claim)
    assert holds <= allowed()
    _, fails = rates(table(lambda i: 1e-9), claim)
    assert fails <= allowed()


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.7, 0.95])
@pytest.mark.parametrize("n", [1, 3, 4, 6, 10])
def test_outcomes_are_wrongly_called_at_most_at_the_level(rate, n):
    def table(rng):
        runs = rng.random(n) < rate
        return {"a": cell(*np.where(runs, 1280.0, 40.0), deviation=0.3, diverged=tuple(map(bool, runs)))}

    holds, fails = rates(table, "div(M['a'])")
    assert (holds if rate < 0.5 else fails) <= allowed(), "called what most runs are not"


@pytest.mark.parametrize(("n", "power"), [(5, 0.80), (7, 0.90)])
def test_a_gap_of_two_deviations_of_one_run_is_found(n, power):
    """Unpaired: the two sides have no seed in common. Deviations are pooled over four rows, as in Table 1 of Mix-LN."""

    def table(rng):
        sides = {"a": noisy(rng, 0, n), "b": noisy(rng, 2, n, first=100)}
        return {**sides, "c": noisy(rng, 5, n), "d": noisy(rng, 9, n)}

    holds, fails = rates(table, LESS)
    assert holds >= power and fails == 0
