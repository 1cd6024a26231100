"""Exhibits of the two normalization papers: jobs that they share, both budgets of a table, diagrams, curves, growth."""

from __future__ import annotations

import csv
import itertools

import numpy as np
import pytest
import scipy.stats
import yaml
from matplotlib.colors import to_hex
from support_figures import drawn, measured, records_of
from support_tables import edited, record_of

from paperlm.checks import open_project
from paperlm.data.registry import HERE
from paperlm.errors import SpecError
from paperlm.figures.base import write_figure
from paperlm.figures.block_diagrams import formula, structures
from paperlm.figures.depth import (
    AT_MOST_ONE,
    BEHIND_FIRST,
    DEEP_BUT_LAST,
    EXPONENTIAL,
    FIRST,
    HIGH_BUT_LAST,
    LARGEST_BEHIND_FIRST,
    LARGEST_BEHIND_THREE,
    LARGEST_OF_THREE,
    LAST,
    POWER,
    SHALLOW,
    UNEVENNESS,
    depth_samples,
    growth_statistics,
    removal_statistics,
)
from paperlm.figures.options import check_options
from paperlm.figures.series_curves import (
    END,
    HIGHEST_GAP,
    LATER_MEAN,
    SAME,
    curve_samples,
    curve_statistics,
    tokens_of_an_update,
)
from paperlm.figures.style import METHODS, method_color, row_styles
from paperlm.jobs.hub_model import HubModel
from paperlm.norms import build_method, norm_methods
from paperlm.norms.base import Learned
from paperlm.plan.project import Project
from paperlm.plan.state import State
from paperlm.record.record import write_record
from paperlm.result import Series
from paperlm.tables.claims import judge


@pytest.fixture(scope="module")
def tiny() -> Project:
    return Project({"scale": "tiny"})


def ids(project: Project, name: str) -> dict[tuple[str, str], str]:
    return {(cell.row, cell.column): cell.jobs[0].job_id for cell in project.cells(name) if cell.jobs}


# -- jobs that exhibits share ----


@pytest.mark.parametrize("scale", ["smoke", "tiny", "gpu", "paper"])
def test_the_same_run_has_the_same_name_in_both_papers(scale):
    """Else it is made twice: a setting that one paper file has and the other has not."""
    project = Project({"scale": scale})
    one, other = ids(project, "mixln_table1"), ids(project, "lns_table1")
    for method, size in itertools.product(("Post-LN", "DeepNorm", "Pre-LN", "Mix-LN"), ("130M", "250M")):
        assert one[method, f"LLaMA-{size}"] == other[method, f"LLaMA-{size}"]
    for method in ("Post-LN", "DeepNorm", "Pre-LN", "Mix-LN"):
        assert one[method, "LLaMA-1B"] == other[method, "LLaMA-1B (half the tokens)"]
    tuned, again = ids(project, "mixln_table2"), ids(project, "lns_table3")
    assert tuned["LLaMA-250M, Pre-LN", "MMLU"] == again["LLaMA-250M, Pre-LN", "MMLU"]
    drops, shown = ids(project, "mixln_figure6b"), ids(project, "lns_figure4")
    assert drops["Pre-LN", ""] == shown["Pre-LN", ""]
    assert ids(project, "mixln_figure3cd")["Post-LN", ""] == drops["Post-LN", ""]
    assert ids(project, "mixln_table6")["LLaMA-250M", "Pre-LN"] == one["Pre-LN", "LLaMA-250M"]
    table8, table2 = ids(project, "mixln_table8"), ids(project, "lns_table2")
    assert table8["Pre-LN", "Perplexity"] == one["Pre-LN", "LLaMA-130M"] == table2["", "Pre-LN"]
    scaled = ids(project, "lns_table4")["+ Scaled Initialization", "LLaMA-130M"]
    assert table8["Pre-LN, ✓", "Perplexity"] == scaled
    open_models = [set(ids(project, name).values()) for name in ("mixln_figure2cd", "lns_figure2")]
    assert open_models[0] <= open_models[1]


@pytest.mark.parametrize("scale", ["smoke", "tiny", "gpu", "paper"])
def test_the_one_billion_rows_of_table_three_are_there_at_both_budgets(scale):
    """The printed baselines are models of half the tokens, so that a gap to them is one of the budget, too."""
    project = Project({"scale": scale})
    jobs = {(c.row, c.column): c.jobs[0] for c in project.cells("lns_table3") if not c.mean_of}
    columns = {column for _, column in jobs}
    for method in ("Post-LN", "DeepNorm", "Mix-LN", "Pre-LN", "Pre-LN + LayerNorm Scaling"):
        for column in columns:
            long, short = (jobs[f"LLaMA-1B, {method}{budget}", column] for budget in ("", " (half the tokens)"))
            assert (long.few_shot, long.tasks) == (short.few_shot, short.tasks)
            assert long.of.of.steps > short.of.of.steps and long.of.of.norm == short.of.of.norm
    in_mixln = ids(project, "mixln_table2")
    for (row, column), job_id in in_mixln.items():
        if row.startswith("LLaMA-1B") and column not in ("Avg.", "Avg. (5-shot)"):
            assert jobs[f"{row} (half the tokens)", column].job_id == job_id


def test_authors_presets_stand_in_the_printed_columns_and_the_definitions_beside_them(tiny):
    found = {c.column: c.jobs[0].norm.get("preset") for c in tiny.cells("mixln_table6")}
    assert (found["Admin"], found["Admin (as defined)"]) == ("authors_scalar_0p015", "profiled")
    assert (found["Group-LN"], found["Group-LN (as defined)"]) == ("authors_sequence", "causal")
    rows = {c.row: c.jobs[0].norm.get("preset") for c in tiny.cells("mixln_table8")}
    assert {rows[f"{m}, ✓, ✓"] for m in ("Pre-LN", "Mix-LN")} == {"init_only"}
    assert {rows[f"{m}, ✓, ✓ (as defined)"] for m in ("Pre-LN", "Mix-LN")} == {"multiplier"}
    scaled = {c.row: c.jobs[0].norm.get("preset") for c in tiny.cells("lns_table4") if c.jobs}
    assert (scaled["+ LayerScale"], scaled["+ LayerScale (as defined)"]) == ("authors_shared", "separate")


# -- another job in place of one ----


@pytest.mark.parametrize(
    ("instead", "message"),
    [
        ({"pretrain": "pretrain_shrot"}, r"instead: unknown job 'pretrain_shrot'; did you mean 'pretrain_short'"),
        ({"pretrian": "pretrain_short"}, r"instead: unknown job 'pretrian'; did you mean 'pretrain'"),
        ({"drops": "open_drops"}, r"instead: tasks does not work on what 'open_drops' stands for; leave it out"),
        ({"pretrain": "variance"}, r"'variance' is a job of kind 'output_variance'; in place of 'pretrain' it has"),
    ],
)
def test_a_job_in_place_of_another_has_to_fit(tmp_path, instead, message):
    row = "LLaMA-1B, Pre-LN (half the tokens)"
    edit = lambda p: p["tables"]["lns_table3"]["rows"][row].update(instead=instead)  # noqa: E731
    root = edited(tmp_path, "lns", edit)
    with pytest.raises(SpecError, match=message):
        open_project({"scale": "tiny"}, root).cells("lns_table3")


@pytest.mark.parametrize(
    ("instead", "message"),
    [
        ({"neuzip_table3": {}}, r"instead: unknown exhibit 'neuzip_table3'; did you mean 'neuzip_table3"),
        ({"neuzip_table4": {"model": "sq"}}, r"instead.neuzip_table4: unknown job 'sq'; did you mean 'sql'"),
        (
            {"neuzip_table4": {"model": "sql"}},
            r"'sql' is a job of kind 'text_to_sql'; in place of 'model' it has to be",
        ),
        (
            {"neuzip_table2": {"model": "open_model"}},
            r"instead.neuzip_table2: no cell works on what 'open_model' stands for; leave 'model' out",
        ),
    ],
)
def test_a_job_in_place_of_another_at_one_scale_has_to_fit(tmp_path, instead, message):
    given = {e: {one: {"job": job, "why": "a test"} for one, job in jobs.items()} for e, jobs in instead.items()}
    root = edited(tmp_path, "neuzip", lambda p: p["scales"]["paper"].update(instead=given))
    with pytest.raises(SpecError, match=message):
        open_project({"scale": "paper"}, root).cells("neuzip_table2")


@pytest.mark.parametrize(("scale", "kind"), [("tiny", "pretrain"), ("gpu", "pretrain"), ("paper", "hub_model")])
def test_published_checkpoints_are_read_at_scale_paper_and_compared_with_the_print_there_alone(scale, kind):
    project = Project({"scale": scale})
    own = {"hub_model": {"hub_model"}, "pretrain": {"text_to_sql", "NoneType"}}[kind]
    for name, of in {
        "neuzip_table3a": {kind},
        "neuzip_table4": {kind},
        "neuzip_table2": own,
        "neuzip_table3b": own,
    }.items():
        jobs = [job for cell in project.cells(name) for job in cell.jobs]
        assert {getattr(job.of, "kind", "NoneType") for job in jobs} <= of
        table = project.table(name)[1]
        assert (scale in table.incomparable_at) == (kind == "pretrain")
    if scale == "paper":
        read = {c.column.removesuffix(" PPL"): c.jobs[0].of.name for c in project.cells("neuzip_table3a")}
        assert read["Yi-1.5 34B"] == "hub:01-ai/Yi-1.5-34B" and read["Llama-3 8B"].endswith("/Meta-Llama-3-8B")


# -- diagrams ----


def test_a_diagram_has_a_column_for_each_structure_in_the_order_of_the_blocks():
    mix = structures(build_method({"name": "mix_ln", "post_fraction": "1/4"}), 12)
    assert [[number for number, _ in group] for group in mix] == [[1, 2, 3], [*range(4, 13)]]
    assert [(group[0][1].pre, group[0][1].out) for group in mix] == [(False, True), (True, False)]
    assert [len(group) for group in structures(build_method({"name": "pre_ln"}), 12)] == [12]
    with pytest.raises(SpecError, match="not a whole number"):
        structures(build_method({"name": "mix_ln", "post_fraction": "1/7"}), 12)


@pytest.mark.parametrize(
    ("factors", "text"),
    [
        ([1.0, 1.0, 1.0], ""),
        ([1.0, 2**-0.5, 3**-0.5], r"$1/\sqrt{\ell}$"),
        ([1.0, 0.5, 0.25], "0.25 to 1"),
        ([2.5, 2.5, 2.5], "2.5"),
        ([Learned(init=0.1)] * 3, "trained from 0.1"),
    ],
)
def test_a_factor_is_written_as_its_formula_its_range_or_its_start(factors, text):
    assert formula([1, 2, 3], factors) == text


def test_the_numbers_behind_the_diagrams_are_the_equations_of_the_methods(tiny, tmp_path):
    """Post-LN normalizes sums, Pre-LN inputs; LayerNorm Scaling divides by the root of the block's number."""
    for name in ("mixln_figure1", "lns_figure3"):
        write_figure(tiny, name, [], tmp_path / f"{name}.svg")
    first, third = (
        list(csv.DictReader((tmp_path / f"{name}.csv").read_text().splitlines()))
        for name in ("mixln_figure1", "lns_figure3")
    )
    of_sum = {panel: [r["norm_of_sum"] for r in rows] for panel, rows in itertools.groupby(first, lambda r: r["panel"])}
    assert of_sum == {
        "(a) Post-LN": ["True"] * 12,
        "(b) Pre-LN": ["False"] * 12,
        "(c) Mix-LN": ["True"] * 3 + ["False"] * 9,
    }
    assert all((r["norm_before"] == "True") != (r["norm_of_sum"] == "True") for r in first)
    scales = [float(r["c"]) for r in third if r["panel"] == "(b) LayerNorm Scaling"]
    np.testing.assert_allclose(scales, 1 / np.sqrt(np.arange(1, 13)), rtol=1e-5)
    assert "attention" in (tmp_path / "lns_figure3.svg").read_text() or (tmp_path / "lns_figure3.svg").stat().st_size


@pytest.mark.parametrize("name", sorted(norm_methods()))
def test_every_method_can_be_drawn_or_says_why_not(name):
    options = {"mix_ln": {"post_layers": 3}}.get(name, {})
    if name.startswith("scaled_") or name == "gpas":
        options = {"base": {"name": "pre_ln"}}
    method = build_method({"name": name, **options})
    if not method.in_equation:
        with pytest.raises(SpecError, match=f"{name} has residual sums of its own"):
            structures(method, 12)
        return
    groups = structures(method, 12)
    assert [number for group in groups for number, _ in group] == [*range(1, 13)]


# -- curves ----


def curve(job, losses: list[float | None], seed: int = 0):
    job = job.model_copy(update={"seed": seed})
    rows = [[10 * i, i, loss] for i, loss in enumerate(losses, 1)]
    return record_of(job, series={"train": Series(columns=["update", "tokens", "loss"], rows=rows)})


OPTIONS = {"series": "train", "x": "update", "y": "loss", "window": 2, "reference": "A", "since": "1/2", "noise": "log"}


def test_a_curve_is_compared_with_the_reference_of_its_seed_over_the_later_part(tiny):
    job = tiny.jobs_of("lns_figure5")[0]
    found = {
        "A": (curve(job, [9.0, 7.0, 5.0, 4.0]), curve(job, [1.0, 1.0, 1.0, 1.0], seed=1)),
        "B": (curve(job, [99.0, 6.5, 4.5, 3.0]), curve(job, [2.0, 2.0, 2.0, 2.0], seed=1)),
    }
    statistics = curve_statistics(found, OPTIONS)
    # Smoothed: A 8, 6, 4.5 and B 52.75, 5.5, 3.75 at 20, 30 and 40; the later part begins at 20.
    assert statistics["A"][0] == pytest.approx({END: 4.5, LATER_MEAN: 18.5 / 3})
    assert statistics["B"][0] == pytest.approx({END: 3.75, LATER_MEAN: 62 / 3, HIGHEST_GAP: 44.75, SAME: 0})
    assert statistics["B"][1][HIGHEST_GAP] == 1.0, "the reference of the same seed"
    later = curve_statistics(found, OPTIONS | {"since": "3/4"})
    assert later["B"][0][HIGHEST_GAP] == pytest.approx(-0.5), "below it from there on: a negative number"


def test_a_seed_without_the_reference_has_no_gap(tiny):
    job = tiny.jobs_of("lns_figure5")[0]
    found = {"A": (curve(job, [3.0, 2.0]),), "B": (curve(job, [3.0, 2.0], seed=4),)}
    assert HIGHEST_GAP not in curve_statistics(found, OPTIONS)["B"][4]


def test_points_that_are_no_numbers_are_left_out_of_a_curve(tiny):
    job = tiny.jobs_of("lns_figure5")[0]
    found = {"A": (curve(job, [3.0, 2.0, None]),)}
    assert curve_statistics(found, OPTIONS)["A"][0] == pytest.approx({END: 2.5, LATER_MEAN: 2.5})


def test_the_noise_of_a_curve_is_the_scales_and_that_of_a_gap_of_two_runs_larger(tiny):
    job = tiny.jobs_of("lns_figure5")[0]
    found = {"A": (curve(job, [50.0, 40.0]),), "B": (curve(job, [44.0, 36.0]),)}
    relative = curve_samples(found, OPTIONS | {"noise": "relative", "window": 1}, 0.03)
    assert relative["B", HIGHEST_GAP].values == pytest.approx((-0.1,)), "as a share of the reference: 0.88 and 0.9"
    assert relative["A", END].deviation == pytest.approx(0.03 * 40)
    log = curve_samples(found, OPTIONS | {"window": 1}, 0.03)
    assert log["B", HIGHEST_GAP].values == (-4.0,) and log["A", END].deviation == 0.03
    assert log["B", HIGHEST_GAP].deviation == relative["B", HIGHEST_GAP].deviation == pytest.approx(0.03 * 2**0.5)


def test_figure_five_has_a_second_axis_and_a_column_of_the_tokens_behind_each_update(tiny, tmp_path, monkeypatch):
    paths = []
    for job in tiny.jobs_of("lns_figure5"):
        rows = [[update, 90 * update + update % 3, 5 - update / 100] for update in range(10, 210, 10)]
        paths.append(tmp_path / f"{job.job_id}.json")
        write_record(
            paths[-1], record_of(job, series={"train": Series(columns=["update", "tokens", "loss"], rows=rows)})
        )
    (axis,) = drawn(monkeypatch, tiny, "lns_figure5", paths, tmp_path).axes
    (above,) = axis.child_axes
    assert (axis.get_xlabel(), above.get_xlabel()) == ("update", "tokens")
    each = (90 * 200 + 2) / 200  # at the end of the run
    assert above.get_xlim() == pytest.approx([each * end for end in axis.get_xlim()])
    with (tmp_path / "lns_figure5.csv").open() as file:
        numbers = list(csv.DictReader(file))
    assert [(int(n["update"]), int(n["tokens"])) for n in numbers[:2]] == [(10, 901), (20, 1802)]
    assert len(numbers) == 40


def test_runs_whose_updates_have_other_numbers_of_tokens_share_no_axis_of_them(tiny):
    job = tiny.jobs_of("lns_figure5")[0]
    one, near, other = (
        record_of(job, series={"train": Series(columns=["update", "tokens", "loss"], rows=[[10, count, 3.0]])})
        for count in (1000, 1010, 1020)
    )
    assert tokens_of_an_update("f", {"A": (one,), "B": (near,)}, OPTIONS | {"tokens": "tokens"}) == 100.5
    with pytest.raises(SpecError, match=r"figures\.f\.options\.tokens: .* 100 tokens in A, seed 0 and 102 in B"):
        tokens_of_an_update("f", {"A": (one,), "B": (other,)}, OPTIONS | {"tokens": "tokens"})


@pytest.mark.parametrize(
    ("changes", "words"), [({"x": "tokens"}, "x is tokens"), ({"tokens": "words"}, "unknown column 'words'")], ids=str
)
def test_an_axis_of_tokens_that_cannot_be_drawn_is_refused(tmp_path, changes, words):
    root = edited(tmp_path, "lns", lambda paper: paper["figures"]["lns_figure5"]["options"].update(changes))
    with pytest.raises(SpecError, match=words):
        check_options(Project({"scale": "tiny"}, root), "lns_figure5")


@pytest.mark.parametrize(("ends", "verdict"), [((40.0, 34.0), "holds"), ((40.0, 39.5), "undecided")])
def test_a_curve_that_stays_below_another_by_more_than_the_noise_does_so(tiny, ends, verdict):
    job = tiny.jobs_of("mixln_figure4")[0]
    found = {"A": (curve(job, [50.0, ends[0]]),), "B": (curve(job, [42.0, ends[1]]),)}
    samples = curve_samples(found, OPTIONS | {"noise": "relative", "window": 1}, 0.03)
    cells = {("F", key): sample for key, sample in samples.items()}
    assert judge(f"F['B','{HIGHEST_GAP}'] < 0", cells, {"F": {}}).verdict == verdict


# -- blocks that are left out ----


def test_what_is_said_of_removed_blocks_is_read_off_the_right_blocks():
    """Twelve blocks, of which the first and the last matter most: thirds are 1-4 and 9-12, the deep half 7-12."""
    values = [20.0, 3.0, 2.0, 1.0, -1.0, 0.0, 0.5, 0.5, 2.0, 1.0, 0.0, 9.0]
    found = removal_statistics(values)
    assert found[FIRST] == 20 and found[LARGEST_BEHIND_FIRST] == 9
    assert (found[LARGEST_OF_THREE], found[LARGEST_BEHIND_THREE]) == (20, 9)
    assert found[SHALLOW] == pytest.approx(25 / 6) and found[BEHIND_FIRST] == pytest.approx(18 / 11)
    assert found[DEEP_BUT_LAST] == pytest.approx(4 / 5) and found[HIGH_BUT_LAST] == pytest.approx(1)
    assert found[UNEVENNESS] == pytest.approx(20 / 39), "of what is lost, not of what is gained"
    assert found[AT_MOST_ONE] == 7
    assert removal_statistics([2.0]).keys() >= {FIRST, UNEVENNESS}, "one block has no others"
    assert removal_statistics([-1.0, -2.0])[UNEVENNESS] == 0


def test_the_error_of_the_blocks_says_nothing_of_statistics_in_another_unit():
    samples = depth_samples({"a": [removal_statistics([3.0, 1.0, 2.0])]}, {"a": 0.7})
    assert samples["a", FIRST].deviation == 0.7 and samples["a", FIRST].measured
    assert not samples["a", UNEVENNESS].measured and not samples["a", AT_MOST_ONE].measured


def test_an_unknown_set_of_statistics_is_refused_with_those_there_are(tmp_path):
    root = edited(tmp_path, "lns", lambda p: p["figures"]["lns_figure6"]["options"].update(also="grwoth"))
    with pytest.raises(SpecError, match=r"figures\.lns_figure6\.options.*also.*'growth'"):
        open_project({"scale": "tiny"}, root)


# -- growth ----


@pytest.mark.parametrize("depth", [3, 12, 24])
def test_growth_is_what_lines_through_the_logarithms_explain(depth):
    values = np.exp(np.random.default_rng(depth).normal(0, 1, depth))
    found, block = growth_statistics(values.tolist()), np.arange(1, depth + 1)
    assert found[LAST] == values[-1]
    assert found[EXPONENTIAL] == pytest.approx(scipy.stats.linregress(block, np.log(values)).rvalue ** 2)
    assert found[POWER] == pytest.approx(scipy.stats.linregress(np.log(block), np.log(values)).rvalue ** 2)


def test_exponentials_and_powers_are_told_apart():
    block = np.arange(1, 13)
    exponential, power = growth_statistics(np.exp(0.4 * block)), growth_statistics(3.0 * block**1.7)
    assert exponential[EXPONENTIAL] == pytest.approx(1) and exponential[POWER] < 0.95
    assert power[POWER] == pytest.approx(1) and power[EXPONENTIAL] < 0.95
    assert growth_statistics([1.0, 0.0, 2.0]).keys() == {LAST}, "no logarithm of zero"


# -- colours and models from elsewhere ----


def test_every_method_of_the_papers_has_a_colour_of_its_own():
    colors = [to_hex(method_color(name)) for name in METHODS]
    assert len(set(colors)) == len(METHODS) and to_hex(method_color("")) not in colors


def test_a_model_from_elsewhere_has_the_colour_of_its_normalization(tiny):
    styles = row_styles(tiny, "mixln_figure2ab")
    assert styles["SmolLM2-135M (Pre-LN)"]["color"] == method_color("pre_ln")
    assert styles["our 130M, Post-LN"]["color"] == method_color("post_ln")
    models = yaml.safe_load((HERE / "registry.yaml").read_text(encoding="utf-8"))["models"]
    named = {f"{entry['source']}:{name}": entry for name, entry in models.items()}
    assert named.pop("hub:stable-diffusion-v1-5/stable-diffusion-v1-5").get("norm") is None, "no stack of such blocks"
    assert all(HubModel(name=name).norm["name"] in norm_methods() for name in named)


def test_nothing_of_a_model_that_is_not_in_the_repository_is_made_at_the_scales_of_a_first_run():
    """Its records are committed: without them the bare command would stop for want of a file of 98 MB."""
    seen = 0
    for scale in ("smoke", "tiny"):
        project = Project({"scale": scale})
        state = State(project)
        for job in project.jobs.values():
            others = [one for one in job.ancestors() if one.kind == "hub_model"]
            if any(not one.name.startswith("bundled:") for one in others):
                seen += 1
                assert state.want(job) == "have" and "paper_tables/records" in state.record(job), job.job_id
    assert seen


def test_panels_of_models_of_different_depth_show_all_of_their_blocks(tiny, tmp_path):
    name = "mixln_figure2ab"
    paths = records_of(tiny, name, tmp_path / "records")
    write_figure(tiny, name, paths, tmp_path / f"{name}.svg")
    rows = list(csv.DictReader((tmp_path / f"{name}.csv").read_text().splitlines()))
    depth = {row: max(int(r["block"]) for r in rows if r["row"] == row) for row in {r["row"] for r in rows}}
    assert depth == {"our 130M, Post-LN": 12, "SmolLM2-135M (Pre-LN)": 30}


def test_the_states_of_figure_six_are_those_shares_of_the_run(tiny):
    jobs = tiny.jobs_of("lns_figure6")
    assert [job.at / job.of.steps for job in jobs] == pytest.approx([1 / 20, 3 / 20, 3 / 10])
    published = Project({"scale": "paper"}).jobs_of("lns_figure6")
    assert [job.at for job in published] == [1000, 3000, 6000]


def test_a_record_of_every_new_figure_can_be_read_back(tiny, tmp_path):
    """What is drawn from made-up records is what real ones hold: series and columns of the same names."""
    for name in ("mixln_figure4", "lns_figure5", "lns_figure6", "mixln_figure6a_training"):
        spec = tiny.figure(name)[1]
        record = measured(tiny.jobs_of(name)[0])
        write_record(tmp_path / "one.json", record)
        columns = record.series[spec.options["series"]].columns
        assert {spec.options[k] for k in ("x", "y", "column") if k in spec.options} <= set(columns)
