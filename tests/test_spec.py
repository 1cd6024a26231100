"""Specification: everything declared resolves; what does not is refused before any job, with the nearest known name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support import job_environment, smoke_run

from paperlm.errors import PaperLMError, SpecError
from paperlm.record.record import read_record
from paperlm.spec.load import load, parse
from paperlm.spec.paper import PaperSpec
from paperlm.spec.project import ROOT, Project
from paperlm.spec.run import RunConfig
from paperlm.spec.table import SETTINGS

SCALES = sorted(p.stem for p in (ROOT / "workflow/scales").glob("*.yaml"))
PAPER = ROOT / "workflow/papers/mixln.yaml"


@pytest.mark.parametrize("scale", SCALES)
def test_every_cell_of_every_table_resolves_to_runs_with_sourced_settings(scale):
    project = Project({"scale": scale, "seeds": [0, 1]})
    for name, (_, table) in project.tables.items():
        if table.kind != "runs":
            continue
        for cell in project.cells(name):
            assert cell.label or len(cell.runs) == max(2, table.seeds.get(scale, 0))
            if cell.runs:
                assert set(cell.sources) == SETTINGS | {"norm"}
                assert all(len(source) > 2 for source in cell.sources.values())


def runs_of(table: str, **config: object) -> set[str]:
    return {run.run_id for cell in Project(config).cells(table) for run in cell.runs}


def test_table_one_has_sixteen_runs_and_other_seeds_are_other_runs():
    assert len(runs_of("mixln_table1", scale="tiny")) == 16
    assert len(runs_of("mixln_table1", scale="tiny", seeds=[0, 1, 2])) == 48


def test_a_table_whose_figures_need_seeds_has_them_whatever_seeds_are_asked_for():
    for scale, seeds in (("smoke", 2), ("tiny", 3), ("gpu", 3), ("paper", 5)):
        assert len(runs_of("cce_pretraining", scale=scale)) == 4 * seeds
    assert runs_of("cce_pretraining", scale="gpu", seeds=[0, 9]) - runs_of("cce_pretraining", scale="gpu") == {
        r for r in runs_of("cce_pretraining", scale="gpu", seeds=[9]) if "-s9-" in r
    }


def test_the_paper_scale_changes_nothing_that_the_paper_says():
    for cell in Project({"scale": "paper"}).cells("mixln_table1"):
        assert not any("scale paper" in source for source in cell.sources.values())


def test_at_paper_scale_the_models_have_the_specified_shapes():
    runs = {run.size: run for run in Project({"scale": "paper"}).runs.values()}
    shape = lambda r: (r.hidden_size, r.intermediate_size, r.n_heads, r.n_layers)  # noqa: E731
    assert shape(runs["130M"]) == (768, 2048, 12, 12)
    assert shape(runs["250M"]) == (768, 2560, 16, 24)
    assert shape(runs["1B"]) == (2048, 5461, 32, 24)
    assert (runs["1B"].steps, runs["1B"].peak_lr, runs["71M"].steps) == (50_000, 5e-4, 10_000)


def test_the_specification_layer_loads_without_torch_and_transformers():
    code = (
        "import sys; from paperlm.spec.project import Project; import paperlm.tables.build, paperlm.spec.workflow; "
        "import paperlm.cost.access, paperlm.cost.loss, paperlm.cost.memory, paperlm.figures.draw; Project({}).runs; "
        "heavy = ('torch', 'transformers', 'datasets', 'pandas', 'matplotlib', 'paperlm_kernels'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=job_environment(), check=True
    )
    assert out.stdout.strip() == "[]"


# -- run ids ----


def test_a_runs_name_changes_with_every_setting_and_with_nothing_else():
    base = smoke_run()
    assert RunConfig.model_validate(json.loads(base.model_dump_json())).run_id == base.run_id
    changes = {
        "seed": 1, "steps": 5, "peak_lr": 2e-3, "numerics": "fp32_master", "grad_clip": 1.0, "loss_group": 4,
        "embed_init_std": 0.6325, "norm": {"name": "mix_ln", "post_layers": 4}, "adam_betas": (0.9, 0.95),
        "diverged": {"above": 1000.0}, "published_eval_batches": 100,
    }  # fmt: skip
    names = {smoke_run(**{key: value}).run_id for key, value in changes.items()}
    assert len(names | {base.run_id}) == len(changes) + 1


def test_other_text_or_another_tokenizer_makes_another_run(monkeypatch):
    from paperlm.data import registry

    before = smoke_run().run_id
    changed = registry.registry().model_copy(deep=True)
    entry = changed.datasets["c4_sample"].files["train"][0]
    changed.datasets["c4_sample"].files["train"][0] = entry.model_copy(update={"sha256": "0" * 64})
    monkeypatch.setattr(registry, "registry", lambda: changed)
    assert smoke_run().run_id != before


def test_the_slug_says_size_method_and_seed():
    assert smoke_run(seed=3).run_id.startswith("llama_71m-mix_ln-s3-")
    wrapped = {"name": "scaled_init", "base": {"name": "deep_norm", "preset": "authors_dev"}}
    assert smoke_run(norm=wrapped).run_id.startswith("llama_71m-scaled_init.deep_norm.authors_dev-s0-")


def test_every_committed_record_is_valid_and_still_asked_for_by_its_scale():
    found = sorted((ROOT / "paper_tables/records").glob("*/*.json"))
    assert found
    for path in found:
        if path.parent.name in ("bench", "tests"):
            continue
        record = read_record(path, path.stem)
        assert record.run_id in Project({"scale": path.parent.name, "seeds": [0, 1, 2]}).runs, path


# -- bad input ----


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"scale": "tinny"}, r"unknown scale 'tinny'; did you mean 'tiny'"),
        ({"sale": "tiny"}, r"unknown key 'sale'; did you mean 'scale'"),
        ({"seeds": []}, "seeds"),
        ({"seeds": ["a"]}, "seeds"),
        ({"seeds": [-1]}, "seed: Input should be greater than or equal to 0"),
        ({"run_missing": "maybe"}, "run_missing"),
        ({"checkpoint_seconds": -1}, "checkpoint_seconds"),
    ],
)
def test_a_bad_configuration_is_refused(config, message):
    with pytest.raises(SpecError, match=message):
        _ = Project(config).runs


def test_a_bare_yes_or_no_means_what_it_says():
    assert [Project({"run_missing": v}).config.run_missing for v in (True, False)] == ["yes", "no"]


def test_an_unknown_table_is_refused_with_the_nearest_name():
    with pytest.raises(SpecError, match="unknown table 'mixln_tabel1'; did you mean 'mixln_table1'"):
        Project({}).table("mixln_tabel1")


def edited(path: Path, tmp_path: Path, edit) -> Path:
    content = yaml.safe_load(path.read_text())
    edit(content)
    out = tmp_path / path.name
    out.write_text(yaml.safe_dump(content))
    return out


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda p: p["settings"].update(peak_lrr={"value": 1, "source": "Table 7"}), "did you mean 'peak_lr'"),
        (lambda p: p["settings"]["seq_len"].pop("source"), "settings.seq_len.source is missing"),
        (lambda p: p["tables"]["mixln_table1"].update(colums={}), "unknown key 'colums'; did you mean 'columns'"),
        (lambda p: p["tables"]["mixln_table1"]["columns"]["LLaMA-71M"].update(size="70M"), "did you mean '7.*M'"),
        (lambda p: p["tables"]["mixln_table1"]["rows"]["Pre-LN"].pop("norm"), "exactly one of norm and label"),
        (lambda p: p["deviations"][0].update(touches=["mixln_table9"]), "unknown table 'mixln_table9'"),
        (lambda p: p["tables"]["mixln_table1"]["claims"][0].pop("expression"), "expression is missing"),
    ],
)
def test_a_paper_file_with_a_mistake_is_refused_with_place_and_fix(tmp_path, edit, message):
    path = edited(PAPER, tmp_path, edit)
    with pytest.raises(SpecError, match=message) as error:
        load(path, PaperSpec)
    assert str(path) in str(error.value)


def test_a_key_written_twice_is_refused(tmp_path):
    (tmp_path / "x.yaml").write_text("paper: 1\npaper: 2\n")
    with pytest.raises(SpecError, match="key 'paper' is written twice"):
        load(tmp_path / "x.yaml", PaperSpec)


def test_yaml_cannot_construct_python_objects(tmp_path):
    (tmp_path / "x.yaml").write_text("paper: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(SpecError, match="not valid YAML"):
        load(tmp_path / "x.yaml", PaperSpec)


def copied_project(tmp_path: Path) -> Path:
    """A root whose declarations can be edited."""
    import shutil

    shutil.copytree(ROOT / "workflow", tmp_path / "workflow")
    shutil.copytree(ROOT / "paper_tables/published", tmp_path / "paper_tables/published")
    return tmp_path


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("hidden_size", -64, "hidden_size: Input should be greater than 0"),
        ("hidden_size", 63, "does not split into 2 heads"),
        ("steps", 0, "steps: Input should be greater than 0"),
        ("loss_group", 3, "loss_group 3 does not divide global_batch 4"),
        ("vocab_size", 2000, "tokenizer 'bpe1024' has 1024 ids, the model vocab_size 2000"),
        ("tokenizer", "bpe1025", "unknown tokenizer 'bpe1025'; did you mean 'bpe1024'"),
        ("dataset", "bundled:c4_sampel", "unknown dataset 'c4_sampel'; did you mean 'c4_sample'"),
        ("numerics", "bf16", "numerics"),
    ],
)
def test_a_scale_with_an_impossible_setting_is_refused_naming_the_cell(tmp_path, setting, value, message):
    root = copied_project(tmp_path)
    path = root / "workflow/scales/tiny.yaml"
    scale = yaml.safe_load(path.read_text())
    scale["settings"][setting] = {"value": value, "why": "a test"}
    path.write_text(yaml.safe_dump(scale))
    with pytest.raises(SpecError, match=message) as error:
        Project({"scale": "tiny"}, root).cells("mixln_table1")
    assert "LLaMA-71M] at scale tiny" in str(error.value)


def test_an_alpha_that_names_no_whole_number_of_blocks_is_refused_with_the_nearest_one(tmp_path):
    root = copied_project(tmp_path)
    path = root / "workflow/papers/mixln.yaml"
    paper = yaml.safe_load(path.read_text())
    paper["sizes"]["130M"]["post_fraction"]["value"] = 0.3
    path.write_text(yaml.safe_dump(paper))
    with pytest.raises(SpecError, match=r"0.3 of 12 blocks is 3.60.*post_layers: 4"):
        _ = Project({"scale": "tiny"}, root).runs


def test_an_unknown_norm_method_in_a_scale_is_refused(tmp_path):
    root = copied_project(tmp_path)
    path = root / "workflow/scales/tiny.yaml"
    scale = yaml.safe_load(path.read_text())
    scale["methods"]["deepnorm"] = scale["methods"].pop("deep_norm")
    path.write_text(yaml.safe_dump(scale))
    with pytest.raises(SpecError, match="unknown norm method 'deepnorm'; did you mean 'deep_norm'"):
        Project({"scale": "tiny"}, root)


def test_a_missing_setting_is_named():
    settings = smoke_run().canonical()
    del settings["peak_lr"]
    with pytest.raises(SpecError, match="here: peak_lr is missing"):
        parse(settings, RunConfig, "here")


def test_a_sixth_paper_is_one_file_and_its_published_table(tmp_path):
    root = copied_project(tmp_path)
    (root / "paper_tables/published/toy_table1.csv").write_text(",Small\nA,30.0\nB,20.0\n")
    paper = yaml.safe_load((root / "workflow/papers/mixln.yaml").read_text())
    paper["paper"].update(id="toy", title="Toy")
    paper["deviations"] = []
    paper["tables"] = {
        "toy_table1": {
            "title": "Toy", "number": "Table 1", "kind": "runs", "claims_name": "T1",
            "published": "paper_tables/published/toy_table1.csv",
            "rows": {
                "A": {"norm": {"name": "pre_ln"}, "source": "toy"},
                "B": {"norm": {"name": "layernorm_scaling"}, "source": "toy"},
            },
            "columns": {"Small": {"size": "130M"}},
        }
    }  # fmt: skip
    (root / "workflow/papers/toy.yaml").write_text(yaml.safe_dump(paper))
    project = Project({"scale": "smoke"}, root)
    assert len(project.runs) == len(Project({"scale": "smoke"}).runs) + 1, "A is Mix-LN Table 1's Pre-LN 130M run"
    shared = next(c for c in project.cells("toy_table1") if c.row == "A").runs[0].run_id
    assert project.tables_of(shared) == ["mixln_table1", "toy_table1"]


def test_every_error_class_is_one_that_the_command_line_prints():
    from paperlm import errors

    assert all(issubclass(getattr(errors, n), PaperLMError) for n in dir(errors) if n.endswith("Error"))
