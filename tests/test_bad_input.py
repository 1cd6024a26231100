"""Bad input: a configuration, paper or scale file with a mistake is refused before any job, with place and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, PositiveInt
from support import smoke_run

from paperlm.checks import open_project
from paperlm.errors import PaperLMError, SpecError
from paperlm.jobs.pretrain import Pretrain
from paperlm.load import load, parse
from paperlm.plan.paper import PaperSpec
from paperlm.plan.project import ROOT, Project

PAPER = ROOT / "workflow/papers/mixln.yaml"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"scale": "tinny"}, r"unknown scale 'tinny'; did you mean 'tiny'"),
        ({"sale": "tiny"}, r"unknown key 'sale'; did you mean 'scale'"),
        ({"seeds": []}, "seeds"),
        ({"seeds": ["a"]}, "seeds"),
        ({"seeds": [-1]}, "seeds.0: Input should be greater than or equal to 0"),
        ({"run_missing": "maybe"}, "run_missing"),
        ({"remake": "drifting"}, "remake"),
        ({"checkpoint_seconds": -1}, "checkpoint_seconds"),
        ({"editions": {"cce_tabel1": "ICLR"}}, "unknown table 'cce_tabel1'; did you mean 'cce_table1'"),
        ({"editions": {"mixln_table1": "v1"}}, "has one edition only; leave it out"),
    ],
)
def test_a_bad_configuration_is_refused(config, message):
    with pytest.raises(SpecError, match=message):
        _ = Project(config).jobs


def test_a_bare_yes_or_no_means_what_it_says():
    assert [Project({"run_missing": v}).config.run_missing for v in (True, False)] == ["yes", "no"]


def test_an_unknown_exhibit_is_refused_with_the_nearest_name():
    project = Project({})
    with pytest.raises(SpecError, match="unknown table 'mixln_tabel1'; did you mean 'mixln_table1'"):
        project.table("mixln_tabel1")
    with pytest.raises(SpecError, match="unknown figure 'cce_figur3'; did you mean 'cce_figure3'"):
        project.figure("cce_figur3")
    with pytest.raises(SpecError, match="unknown table or figure 'cce_figur3'; did you mean 'cce_figure3'"):
        project.exhibit("cce_figur3")


def edited(path: Path, tmp_path: Path, edit) -> Path:
    content = yaml.safe_load(path.read_text())
    edit(content)
    out = tmp_path / path.name
    out.write_text(yaml.safe_dump(content, sort_keys=False))
    return out


def settings_of(paper: dict) -> dict:
    return paper["jobs"]["pretrain"]["settings"]


def first_table(paper: dict) -> dict:
    return paper["tables"]["mixln_table1"]


def add(paper: dict, section: str, name: str, value: object) -> None:
    paper.setdefault(section, {})[name] = value


SFT = {"kind": "sft", "of": "pretrain"}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda p: settings_of(p).update(peak_lrr={"value": 1, "source": "Table 7"}), "did you mean 'peak_lr'"),
        (lambda p: settings_of(p)["seq_len"].pop("source"), "settings.seq_len.source is missing"),
        (lambda p: first_table(p).update(colums={}), "unknown key 'colums'; did you mean 'columns'"),
        (lambda p: first_table(p)["columns"]["LLaMA-71M"].update(size="70M"), "did you mean '7.*M'"),
        (lambda p: first_table(p).update(kind="job"), r"kind: unknown kind 'job'; did you mean 'jobs'"),
        (lambda p: first_table(p).update(job="pretrian"), "unknown job 'pretrian'; did you mean 'pretrain'"),
        (lambda p: p["deviations"][0].update(touches=["mixln_table9"]), "unknown exhibit 'mixln_table9'"),
        (lambda p: first_table(p)["claims"][0].pop("expression"), "expression is missing"),
        (
            lambda p: p["jobs"]["pretrain"].update(kind="pretraining"),
            "kind of job 'pretraining'; did you mean 'pretrain'",
        ),
        (lambda p: p["jobs"]["pretrain"].update(of="pretrain"), "unknown key 'of'"),
        (lambda p: add(p, "jobs", "tuned", {"kind": "sft"}), "of is missing: name the job of this file"),
        (lambda p: add(p, "jobs", "tuned", {"kind": "sft", "of": 3}), "of is the name of a job in this file, got 3"),
        (lambda p: add(p, "jobs", "tuned", SFT | {"off": "pretrain"}), "unknown key 'off'; did you mean 'of'"),
        (
            lambda p: add(p, "jobs", "tuned", {"kind": "sft", "of": "pretran"}),
            "unknown job 'pretran'; did you mean 'pretrain'",
        ),
        (
            lambda p: p["jobs"].update(
                tuned=SFT, judge={"kind": "reward_model", "of": "tuned"}, again={"kind": "sft", "of": "judge"}
            ),
            r"jobs.again.of: 'judge' is a reward_model job; it has to be pretrain or",
        ),
        (
            lambda p: add(p, "tables", "x;rm", first_table(p)),
            "'x;rm' becomes a file name: use letters, digits and _ only",
        ),
        (lambda p: add(p, "jobs", "x y", SFT), "'x y' becomes a file name"),
        (lambda p: p["paper"].update(id="mix;ln"), "paper.id: String should match pattern"),
        (
            lambda p: p["scales"]["tiny"].update(jobs={"pretrain": {"stpes": {"value": 1, "why": "x y"}}}),
            "did you mean 'steps'",
        ),
    ],
)
def test_a_paper_file_with_a_mistake_is_refused_with_place_and_fix(tmp_path, edit, message):
    path = edited(PAPER, tmp_path, edit)
    with pytest.raises(SpecError, match=message) as error:
        load(path, PaperSpec)
    assert str(path) in str(error.value)


def test_one_mistake_in_many_places_is_said_of_a_few_and_hides_no_other():
    class Rows(BaseModel):
        model_config = ConfigDict(extra="forbid")
        rows: dict[str, int]
        other: int
        a: PositiveInt = 1
        b: PositiveInt = 1
        c: PositiveInt = 1
        d: PositiveInt = 1

    value = {"rows": {f"r{n}": "many" for n in range(50)} | {"one": "few"}, "other": "none", "othr": 1}
    value |= dict.fromkeys("abcd", 0)
    with pytest.raises(SpecError) as caught:
        parse(value, Rows, "file.yaml")
    first, *lines = str(caught.value).splitlines()
    assert "unknown key 'othr'" in first and "did you mean 'other'" in first
    assert [line.split(": ")[1] for line in lines[:3]] == ["rows.r0", "rows.r1", "rows.r2"]
    assert lines[3] == lines[0].replace("rows.r0", "47 more like the last, to rows.r49") and len(lines) == 10
    assert [line.split(": ")[1] for line in lines[4:]] == ["rows.one", "other", *"abcd"]


def test_a_key_written_twice_is_refused(tmp_path):
    (tmp_path / "x.yaml").write_text("paper: 1\npaper: 2\n")
    with pytest.raises(SpecError, match="key 'paper' is written twice"):
        load(tmp_path / "x.yaml", PaperSpec)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &x {b: 1}\nc:\n  <<: *x\n", "merge keys .* are not read: write the keys out, or .* `like: <another job>`"),
        ("a: 1\n? [b]\n: 2\n", "a list or a mapping is no key: write a word or a number"),
        ("a: 1\n? {b: 1}\n: 2\n", "a list or a mapping is no key"),
    ],
)
def test_keys_that_are_no_names_are_refused_with_the_line_and_the_remedy(tmp_path, text, message):
    (tmp_path / "x.yaml").write_text(text)
    line = len(text.splitlines()) if "<<" in text else 2
    with pytest.raises(SpecError, match=rf"x.yaml: not valid YAML: {message}(.|\n)*line {line},"):
        load(tmp_path / "x.yaml", PaperSpec)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: " + "[" * 3000, "nested more than 40 deep"),
        ("a:\n" + "- " * 3000, "nested more than 40 deep"),
        ("a: &x [1, *x]\n", r"\*x stands within itself"),
        ("a: &x {b: {c: *x}}\n", r"\*x stands within itself"),
        ("".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9) if n else 1}]\n" for n in range(9)), "300,000 values"),
        ("a: 2026-13-45\n", "'2026-13-45' is no timestamp: put a word in quotes"),
        ("a: !!int many\n", "'many' is no int"),
        ("a: !!timestamp now\n", "'now' is no timestamp"),
    ],
    ids=["brackets", "dashes", "itself", "itself deeper", "aliases", "date", "int", "timestamp"],
)
def test_yaml_that_no_hand_wrote_is_refused_in_a_line_that_says_where(tmp_path, text, message):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(SpecError, match=rf"x\.yaml: not valid YAML: .*({message}).* line \d+, column") as refused:
        load(tmp_path / "x.yaml", PaperSpec)
    assert "\n" not in str(refused.value)


def test_yaml_cannot_construct_python_objects(tmp_path):
    (tmp_path / "x.yaml").write_text("paper: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(SpecError, match="not valid YAML"):
        load(tmp_path / "x.yaml", PaperSpec)


def rewrite(path: Path, edit) -> None:
    edited(path, path.parent, edit)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("hidden_size", -64, "hidden_size: Input should be greater than 0"),
        ("steps", 0, "steps: Input should be greater than 0"),
        ("tokenizer", "bpe1025", "unknown tokenizer 'bpe1025'; did you mean 'bpe1024'"),
        ("dataset", "bundled:c4_sampel", "unknown dataset 'c4_sampel'; did you mean 'c4_sample'"),
        ("dataset", "bundled:c4_sample;rm", "dataset: String should match pattern"),
        ("numerics", "bf16", "unknown numerics 'bf16'; did you mean 'pure_bf16'"),
        ("adam_betas", [0.9, 1.0], "adam_betas.1: Input should be less than 1"),
        ("peak_lr", float("inf"), "peak_lr: Input should be a finite number"),
    ],
)
@pytest.mark.parametrize("scale", ["tiny", "gpu"])
def test_an_impossible_value_in_any_scale_file_is_refused_naming_file_and_place(root, scale, setting, value, message):
    change = {"value": value, "why": "a test"}
    rewrite(root / f"workflow/scales/{scale}.yaml", lambda s: s["jobs"]["pretrain"].update({setting: change}))
    with pytest.raises(SpecError, match=rf"{scale}\.yaml: jobs\.pretrain: .*{message}"):
        Project({"scale": "tiny"}, root)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("hidden_size", 63, "does not split into 2 heads"),
        ("loss_group", 3, "loss_group 3 does not divide global_batch 4"),
        ("vocab_size", 2000, "tokenizer 'bpe1024' has 1024 ids, the model vocab_size 2000"),
        ("steps", True, "steps is a truth value; give a number"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused_naming_the_cell(root, setting, value, message):
    change = {"value": value, "why": "a test"}
    rewrite(root / "workflow/scales/tiny.yaml", lambda s: s["jobs"]["pretrain"].update({setting: change}))
    with pytest.raises(SpecError, match=message) as error:
        Project({"scale": "tiny"}, root).cells("mixln_table1")
    assert "LLaMA-71M] at scale tiny" in str(error.value)


def test_an_alpha_that_names_no_whole_number_of_blocks_is_refused_with_the_nearest_one(root):
    path = root / "workflow/papers/mixln.yaml"
    rewrite(path, lambda p: p["sizes"]["130M"]["norm"]["mix_ln"]["post_fraction"].update(value=0.3))
    with pytest.raises(SpecError, match=r"0.3 of 12 blocks is 3.60.*post_layers: 4"):
        _ = Project({"scale": "tiny"}, root).jobs


def test_an_option_of_the_size_that_the_size_does_not_have_is_named(root):
    rewrite(root / "workflow/papers/mixln.yaml", lambda p: p["sizes"]["130M"].pop("norm"))
    with pytest.raises(SpecError, match=r"sizes.130M.norm.mix_ln.post_fraction is missing: add it"):
        _ = Project({"scale": "tiny"}, root).jobs


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda s: s["jobs"].update(pretrian={}), "kind of job 'pretrian'; did you mean 'pretrain'"),
        (lambda s: s["jobs"]["pretrain"].update(seed={"value": 1, "why": "a test"}), "unknown setting 'seed'"),
        (lambda s: s["sizes"].update({"70M": {}}), "unknown model size '70M'; did you mean '7.*M'"),
        (
            lambda s: s["resources"].update(jobs={"pretrain/1.5B": {"mem_mb": 1, "runtime": 1}}),
            "unknown model size '1.5B'",
        ),
        (lambda s: s.update(scale="small"), "scale is 'small'; it must be the file's name, 'tiny'"),
        (lambda s: s.update(claims={"judg": "none"}), "unknown key 'judg'; did you mean 'judge'"),
    ],
)
def test_a_scale_file_with_a_mistake_is_refused(root, edit, message):
    rewrite(root / "workflow/scales/tiny.yaml", edit)
    with pytest.raises(SpecError, match=message):
        Project({"scale": "tiny"}, root)


def states(root: Path, at: object) -> set[int | None]:
    """Updates of its parent that the jobs of a figure ask for where their `at` is this."""
    change = {"ranks": {"at": {"value": at, "why": "a test"}}}
    rewrite(root / "workflow/papers/cce.yaml", lambda p: p["scales"]["smoke"].update(jobs=change))
    return {job.snapshot("of") for job in Project({"scale": "smoke"}, root).jobs_of("cce_figure3")}


@pytest.mark.parametrize(
    ("at", "update"),
    [(0, 0), (3, 3), ("init", 0), ("end", None), ("share 0", 0), ("share 1/3", 1), ("share 0.5", 2), ("share 1", None)],
)
def test_a_child_may_ask_for_an_update_of_the_run_or_a_part_of_it(root, at, update):
    assert states(root, at) == {update}


@pytest.mark.parametrize(
    "at",
    [
        4,
        -1,
        0.5,
        True,
        None,
        [1],
        "start",
        "50%",
        "share",
        "share x",
        "share 1/0",
        "share 3/2",
        "share -1/2",
        "share nan",
    ],
)
def test_a_child_that_asks_for_no_state_of_the_run_is_refused_with_the_states_there_are(root, at):
    remedy = "write init, end, an update from 0 to 3, or a part of the run, e.g. share 1/2"
    with pytest.raises(SpecError, match=r"ranks: at: .* is no state of llama.*: ") as error:
        states(root, at)
    assert remedy in str(error.value) and repr(at) in str(error.value)


def test_a_state_of_a_model_that_has_one_alone_is_refused(root):
    path = root / "workflow/papers/mixln.yaml"
    rewrite(path, lambda p: p["jobs"]["gradients"].update(of="sft"))
    with pytest.raises(SpecError, match=r"at: 'init' is no state of sft.*: it keeps its last state alone: leave `at`"):
        Project({"scale": "smoke"}, root).jobs_of("mixln_figure6a")


def test_a_row_and_a_column_that_both_name_a_size_are_refused(root):
    path = root / "workflow/papers/mixln.yaml"
    rewrite(path, lambda p: p["tables"]["mixln_table1"]["rows"]["Pre-LN"].update(size="1B"))
    with pytest.raises(SpecError, match=r"\[Pre-LN, LLaMA-71M\].*both give a size: 1B and 71M; keep one"):
        Project({"scale": "tiny"}, root).cells("mixln_table1")


def test_a_cell_without_a_size_or_a_norm_says_where_to_give_one(root):
    path = root / "workflow/papers/mixln.yaml"
    rewrite(path, lambda p: p["tables"]["mixln_table1"]["rows"]["Pre-LN"].pop("norm"))
    with pytest.raises(SpecError, match="no norm: give one in the row or the column"):
        Project({"scale": "tiny"}, root).cells("mixln_table1")
    rewrite(path, lambda p: p["tables"]["mixln_table1"]["columns"]["LLaMA-71M"].pop("size"))
    with pytest.raises(SpecError, match="needs a size: give one in the row or the column"):
        Project({"scale": "tiny"}, root).cells("mixln_table1")


@pytest.mark.parametrize(
    ("paper", "edit", "message"),
    [
        (
            "mixln",
            lambda p: p["tables"]["mixln_table1"].update(published="paper_tables/published/no.csv"),
            "unknown file 'paper_tables/published/no.csv'; did you mean",
        ),
        ("mixln", lambda p: p["scales"].update(tini={}), "unknown scale 'tini'; did you mean 'tiny'"),
        (
            "mixln",
            lambda p: p["scales"]["tiny"].update({"except": {"MIX-T1-99": "a test"}}),
            "unknown claim 'MIX-T1-99'",
        ),
        ("mixln", lambda p: p["tables"]["mixln_table1"].update(seeds={"tinny": 3}), "unknown scale 'tinny'"),
        (
            "cce",
            lambda p: p["tables"].update(mixln_table1=p["tables"]["cce_tableA3"] | {"claims": [], "claims_name": ""}),
            "'mixln_table1' is declared twice; rename one",
        ),
        (
            "cce",
            lambda p: p["figures"]["cce_figure3"].update(draw="rank_probabilty"),
            "unknown figure 'rank_probabilty'; did you mean 'rank_probability'",
        ),
    ],
)
def test_a_project_with_a_mistake_between_files_is_refused(root, paper, edit, message):
    rewrite(root / f"workflow/papers/{paper}.yaml", edit)
    with pytest.raises(SpecError, match=message):
        open_project({"scale": "tiny"}, root)


def test_a_missing_setting_is_named():
    settings = smoke_run().fields()
    del settings["peak_lr"]
    with pytest.raises(SpecError, match="here: peak_lr is missing"):
        parse(settings, Pretrain, "here")


def test_every_error_class_is_one_that_the_command_line_prints():
    from paperlm import errors

    assert all(issubclass(getattr(errors, n), PaperLMError) for n in dir(errors) if n.endswith("Error"))
