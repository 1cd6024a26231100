"""Exhibits of the two normalization papers: jobs that they share, both budgets of a table, diagrams, curves, growth."""

from __future__ import annotations

import csv
import itertools

import numpy as np
import pytest
import yaml
from matplotlib.colors import to_hex
from support_figures import measured, records_of
from support_tables import edited

from paperlm.checks import open_project
from paperlm.data.registry import HERE
from paperlm.errors import SpecError
from paperlm.figures.base import write_figure
from paperlm.figures.block_diagrams import formula, structures
from paperlm.figures.style import METHODS, method_color, row_styles
from paperlm.jobs.hub_model import HubModel
from paperlm.norms import build_method, norm_methods
from paperlm.norms.base import Learned
from paperlm.plan.project import Project
from paperlm.plan.state import State
from paperlm.record.record import write_record


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


# -- colours and models from elsewhere ----


def test_every_method_of_the_papers_has_a_colour_of_its_own():
    colors = [to_hex(method_color(name)) for name in METHODS]
    assert len(set(colors)) == len(METHODS) and to_hex(method_color("")) not in colors


def test_a_model_from_elsewhere_has_the_colour_of_its_normalization(tiny):
    styles = row_styles(tiny, "mixln_figure2ab")
    assert styles["SmolLM2-135M-Instruct (Pre-LN)"]["color"] == method_color("pre_ln")
    assert styles["our 130M, Post-LN"]["color"] == method_color("post_ln")
    models = yaml.safe_load((HERE / "registry.yaml").read_text(encoding="utf-8"))["models"]
    named = {f"{entry['source']}:{name}": entry for name, entry in models.items()}
    pipeline = [named.pop(name) for name in [*named] if "stable-diffusion" in name]
    assert [entry.get("norm") for entry in pipeline] == 4 * [None], "no stacks of such blocks"
    assert all(HubModel(name=name).norm["name"] in norm_methods() for name in named)


def test_nothing_of_a_model_that_is_not_in_the_repository_is_made_at_the_scales_of_a_first_run():
    """Its records are committed: without them the bare command would stop for want of a file of 98 MB. What can never
    be read is blocked without a file (NeuZip, Figure 6)."""
    seen = 0
    for scale in ("smoke", "tiny"):
        project = Project({"scale": scale})
        state = State(project)
        for job in project.jobs.values():
            hub = [one for one in job.ancestors() if one.kind == "hub_model"]
            others = [one for one in hub if not one.never()]
            assert all("stable-diffusion" in one.name for one in hub if one.never()), job.job_id
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
    assert depth == {"our 130M, Post-LN": 12, "SmolLM2-135M-Instruct (Pre-LN)": 30}


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
