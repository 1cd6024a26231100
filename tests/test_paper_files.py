"""Mistakes in scale and paper files are refused with the file, the place, the nearest name and the remedy."""

from __future__ import annotations

import copy
import re

import pytest
from support_declarations import declared, edit, refused, renamed, write

from paperlm import cli
from paperlm.plan import names
from paperlm.plan.project import ROOT

# -- scale files ----


@pytest.mark.parametrize(
    ("scale", "change", "message"),
    [
        ("gpu", lambda s: renamed(s["sizes"], "71M", "17M"), "unknown model size '17M'; did you mean '71M'"),
        ("gpu", lambda s: s["jobs"].update(stf={}), "unknown kind of job 'stf'; did you mean 'sft'"),
        ("gpu", lambda s: renamed(s, "comparable", "comprable"), "unknown key 'comprable'; did you mean 'comparable'"),
        ("smoke", lambda s: s["claims"].update(judge="nome"), "unknown claims.judge 'nome'; did you mean 'none'"),
        ("tiny", lambda s: s["jobs"]["sft"]["batch"].update(value=0), "jobs.sft: batch: .* greater than 0"),
        ("paper", lambda s: renamed(s["resources"]["jobs"], "pretrain/71M", "pretain/71M"), "did you mean 'pretrain'"),
        ("paper", lambda s: renamed(s["resources"]["jobs"], "pretrain/71M", "pretrain/"), "unknown model size ''"),
    ],
)
def test_a_mistake_in_any_scale_file_is_refused_whichever_scale_is_configured(root, scale, change, message):
    edit(root, f"workflow/scales/{scale}.yaml", change)
    refused(root, rf"scales/{scale}\.yaml: .*{message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has to be a mapping"),
        ("- a\n", "has to be a mapping"),
        ("jobs: [\n", "not valid YAML"),
        ("[a]: 1\n", "not valid YAML: a list or a mapping is no key"),
    ],
)
@pytest.mark.parametrize("folder", ["papers", "scales"])
def test_a_file_that_is_no_declaration_is_named(root, folder, text, message):
    write(root, f"workflow/{folder}/new.yaml", text)
    refused(root, rf"{folder}/new\.yaml: {message}")


@pytest.mark.parametrize("folder", ["papers", "scales"])
def test_a_file_that_cannot_be_read_is_named(root, folder):
    path = root / f"workflow/{folder}/new.yaml"
    path.write_bytes("scale: größer".encode("latin-1"))
    refused(root, rf"{folder}/new\.yaml: not UTF-8 .* save it as UTF-8")
    path.unlink()
    path.mkdir()
    refused(root, rf"{folder}/new\.yaml: cannot be read: Is a directory")


# -- paper files ----


def table(paper: dict, number: int) -> dict:
    return paper["tables"][f"mixln_table{number}"]


def claim(paper: dict, number: int, index: int = 0) -> dict:
    return table(paper, number)["claims"][index]


MIXLN = [
    (
        lambda p: table(p, 1)["columns"]["LLaMA-71M"].update(size="ViT-Tiny"),
        r"LLaMA-71M\].*'ViT-Tiny' is the size of an image classifier: use the kind image_classification",
    ),
    (
        lambda p: table(p, 1)["rows"]["Post-LN"]["norm"].update(name="postln"),
        "rows.Post-LN.norm: .*did you mean 'post_ln'",
    ),
    (lambda p: table(p, 1)["rows"]["Mix-LN"]["norm"].update(post_fraction={"of": "sise"}), r"write \{of: size\}"),
    (
        lambda p: table(p, 1)["rows"]["DeepNorm (as defined)"].update(scales=["gup"]),
        "unknown scale 'gup'; did you mean 'gpu'",
    ),
    (
        lambda p: p["deviations"][0].update(scales=["tinny"]),
        "deviations.scales: unknown scale 'tinny'; did you mean 'tiny'",
    ),
    (
        lambda p: claim(p, 2, -1).update(only_at={"scales": ["gpuu"], "why": "a reason"}),
        r"MIX-T2-\w+\.only_at: unknown scale 'gpuu'; did you mean 'gpu'",
    ),
    (
        lambda p: claim(p, 2, -1).update(only_at={"scales": [], "why": "a reason"}),
        "only_at.scales: List should have at least 1 item",
    ),
    (
        lambda p: claim(p, 1).update(by_eye={"holds": True, "source": "[P] Figure 1"}),
        r"MIX-T1-1: by_eye is for a picture without numbers.*published: null",
    ),
    (
        lambda p: claim(p, 6, 3).update(by_eye={"holds": False, "source": "[P] Figure 1"}),
        r"MIX-T6-3: by_eye is for a picture without numbers.*published: null",
    ),
    (
        lambda p: p["figures"]["mixln_figure4"]["claims"][0]["by_eye"].pop("source"),
        r"mixln_figure4\.claims\.0\.by_eye\.source is missing: add it",
    ),
    (lambda p: p["deviations"][0].update(touches=[]), "deviations.0.touches: "),
    (
        lambda p: p["scales"]["tiny"]["except"].update({"MIX-T1-99": "a reason"}),
        "unknown claim 'MIX-T1-99'; did you mean",
    ),
    (lambda p: table(p, 1).update(metric="ppl_ture"), r"\[Post-LN, LLaMA-71M\]: .*did you mean 'ppl_true'"),
    (lambda p: table(p, 1).update(printed_metric="ppl_papre"), "unknown metric 'ppl_papre'; did you mean 'ppl_paper'"),
    (
        lambda p: table(p, 1)["rows"]["Training Tokens"].update(sum_of_column="token_nonpad"),
        "did you mean 'tokens_nonpad'",
    ),
    (
        lambda p: table(p, 2)["columns"]["BoolQ"].update(metric="bolq/acc"),
        "unknown metric 'bolq/acc'; did you mean 'boolq/acc'",
    ),
    (lambda p: table(p, 2)["columns"]["PIQA (5-shot)"].update(metric="piqa/ac"), "did you mean 'piqa/acc'"),
    (lambda p: table(p, 2).update(factor=0), "factor: Input should be greater than 0"),
    (
        lambda p: renamed(p["sizes"]["71M"]["values"], "published_batches", "batches"),
        "needs sizes.*there is batches: rename it",
    ),
    (
        lambda p: table(p, 1)["rows"]["Pre-LN"].update(
            values={"70M": {"published_batches": {"value": 1, "source": "toy"}}}
        ),
        "rows.Pre-LN.values: .*did you mean '71M'",
    ),
    (
        lambda p: table(p, 1)["rows"]["Pre-LN"].update(
            values={"71M": {"published_batch": {"value": 1, "source": "toy"}}}
        ),
        "rows.Pre-LN.values.71M: .*did you mean 'published_batches'",
    ),
    (lambda p: p["jobs"]["tasks"]["settings"]["tasks"].update(value=["mmul"]), "jobs.tasks: .*did you mean 'mmlu'"),
    (lambda p: p["jobs"]["pretrain"]["settings"]["adam_betas"].update(value=[0.9, 1.5]), "adam_betas.1: .*less than 1"),
    (lambda p: p["jobs"]["pretrain"]["settings"]["grad_clip"].update(value=float("nan")), "grad_clip: .*finite number"),
    (
        lambda p: p["jobs"]["reward"]["with"]["norm"].update(name="pre-ln"),
        "jobs.reward.with.norm: .*did you mean 'pre_ln'",
    ),
    (lambda p: claim(p, 5).update(id=claim(p, 1)["id"]), "claim 'MIX-T1-1' stands in mixln.yaml, mixln_table1 already"),
    (
        lambda p: p["consistency"][1].update(id=claim(p, 1)["id"]),
        "consistency: claim 'MIX-T1-1' stands in mixln.yaml, mixln_table1 already",
    ),
    (lambda p: table(p, 2).update(claims_name="M1"), "'M1' is that of mixln_table1 already; rename one"),
    (lambda p: table(p, 7)["columns"]["Hidden"].update(setting="hiden_size"), "did you mean 'hidden_size'"),
    (
        lambda p: renamed(table(p, 1)["rows"], "Post-LN", "PostLN"),
        "'Post-LN' is printed but not declared; did you mean 'PostLN'",
    ),
    (lambda p: table(p, 7)["sizes"].remove("7B"), "row '7B' is printed but not declared"),
    (lambda p: p["paper"].update(id="lns"), "paper.id is 'lns'; it must be the file's name, 'mixln'"),
]


@pytest.mark.parametrize(("change", "message"), MIXLN)
def test_a_mistake_in_a_paper_file_is_refused_with_place_and_remedy(root, change, message):
    edit(root, "workflow/papers/mixln.yaml", change)
    refused(root, rf"papers/mixln\.yaml: .*{message}")


def options(paper: dict, name: str) -> dict:
    return paper["figures"][name]["options"]


FIGURES = [
    (
        "lns",
        lambda p: renamed(options(p, "lns_figure1"), "label", "lable"),
        "unknown key 'lable'; did you mean 'label'",
    ),
    ("lns", lambda p: options(p, "lns_figure1").pop("label"), "label is missing: add it"),
    (
        "lns",
        lambda p: options(p, "lns_figure1").update(series="varience"),
        "unknown series 'varience'; did you mean 'variance'",
    ),
    (
        "lns",
        lambda p: options(p, "lns_figure1").update(column="var_tokk"),
        "unknown column 'var_tokk'; did you mean 'var_tok'",
    ),
    (
        "mixln",
        lambda p: p["figures"]["mixln_figure5"].update(job="gradients"),
        "unknown series 'angular'; known: gradient_norms",
    ),
    ("mixln", lambda p: options(p, "mixln_figure5").update(values=["rwa"]), "'rwa'; did you mean 'raw'"),
    ("mixln", lambda p: options(p, "mixln_figure6b").update(error="full/acuracy"), "did you mean 'full/accuracy'"),
    ("mixln", lambda p: options(p, "mixln_table3_curve").update(window=0), "window: Input should be greater than 0"),
    (
        "cce",
        lambda p: options(p, "cce_figure4").update(reference="torch.compil"),
        "unknown row .*did you mean 'torch.compile'",
    ),
    (
        "cce",
        lambda p: options(p, "cce_table1_bars").update(bound="Lower bond"),
        "unknown row .*did you mean 'Lower bound'",
    ),
    ("cce", lambda p: options(p, "cce_table1_bars").update(memory="Memory"), "unknown column 'Memory'"),
    ("cce", lambda p: p["figures"]["cce_table1_bars"].update(table="cce_tableA3"), "it is given arithmetic"),
    ("cce", lambda p: p["figures"]["cce_figure3"]["in_words"].update(Share="all"), "unknown statistic 'Share'"),
]


@pytest.mark.parametrize(("paper", "change", "message"), FIGURES)
def test_a_mistake_in_the_options_of_a_figure_is_refused_with_the_nearest_name(root, paper, change, message):
    edit(root, f"workflow/papers/{paper}.yaml", change)
    refused(root, rf"papers/{paper}\.yaml: figures\..*{message}")


def column(paper: dict, name: str) -> dict:
    return paper["tables"]["cce_table1"]["columns"][name]


MEASUREMENTS = [
    (lambda p: p["tables"]["cce_table1"].update(op="cross_entrpy"), "op: .*did you mean 'cross_entropy'"),
    (lambda p: column(p, "Loss Memory (MB)").update(metric="peak_memry"), "metric: .*did you mean 'peak_memory'"),
    (lambda p: column(p, "Loss Memory (MB)").update(where={"measure": "los"}), "where.measure: .*did you mean 'loss'"),
    (lambda p: column(p, "Loss Memory (MB)").update(where={"part": "loss"}), "unknown field of peak_memory 'part'"),
    (lambda p: column(p, "Alive Tiles").update(only="lower_bond"), "only: .*did you mean 'lower_bound'"),
    (
        lambda p: p["tables"]["cce_table1"]["rows"]["5) Baseline"].update(method="eagre"),
        "method: .*did you mean 'eager'",
    ),
    (lambda p: p["tables"]["cce_table1"]["rows"]["5) Baseline"].update(remarks={"Los": "x"}), "unknown column 'Los'"),
    (lambda p: p["tables"]["cce_tableA3"].update(formula="memry"), "formula: .*did you mean 'memory'"),
    (lambda p: renamed(p["tables"]["cce_tableA3"]["constants"], "gpus", "gpsu"), "did you mean 'gpus'"),
]


@pytest.mark.parametrize(("change", "message"), MEASUREMENTS)
def test_what_the_benchmark_or_a_formula_does_not_have_is_refused_before_it_is_measured(root, change, message):
    edit(root, "workflow/papers/cce.yaml", change)
    refused(root, rf"papers/cce\.yaml: tables\..*{message}")


@pytest.mark.parametrize(
    ("name", "as_what"),
    [("table", "a rule"), ("plan", "a verb"), ("sft", "a kind of job"), ("mixln", "a paper")],
)
def test_an_exhibit_is_not_called_as_something_else_of_the_command_line(root, name, as_what):
    def rename(paper: dict) -> None:
        renamed(paper["figures"], "lns_figure1", name)
        paper["deviations"], paper["scales"] = [], {}

    edit(root, "workflow/papers/lns.yaml", rename)
    refused(root, rf"papers/lns\.yaml: .*{name!r} is {as_what}.* already; rename it")


def test_a_paper_is_not_called_as_a_rule(root):
    paper = copy.deepcopy(declared("workflow/papers/lns.yaml"))
    paper |= {"tables": {}, "figures": {}, "deviations": [], "consistency": [], "scales": {}}
    paper["paper"]["id"] = "all"
    write(root, "workflow/papers/all.yaml", paper)
    refused(root, r"papers/all\.yaml: paper.id: 'all' is a rule of the workflow already; rename it")


def test_the_names_that_are_taken_are_those_of_the_rules_and_verbs():
    text = "".join(path.read_text() for path in [ROOT / "Snakefile", *(ROOT / "workflow/rules").glob("*.smk")])
    written = re.findall(r"^rule (\w+):", text, re.MULTILINE) + re.findall(r" as (\w+) with:", text)
    assert sorted(names.RULES) == sorted(written)
    assert sorted(names.VERBS) == sorted(cli._parser()[1])
