"""Arguments, variables and files that a verb cannot use are refused in one sentence, with exit status 2."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paperlm import cli
from paperlm.plan.project import ROOT

OF_GPU = ROOT / "paper_tables/records/gpu/pretrain/llama_71m-admin-s0-3a13e1ff.json"


def refusal(arguments: list[str], capsys: pytest.CaptureFixture) -> str:
    """What a verb says when it refuses, with exit status 2."""
    try:
        status = cli.main(arguments)
    except SystemExit as done:
        status = done.code
    assert status == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("tabel", "unknown verb 'tabel'; did you mean 'table'"),
        ("plan --config seeds=[0", "not valid YAML"),
        ("plan --config-json []", "no object of JSON"),
        ("plan --config-json {} --config scale=gpu", "--config beside --config-json, which is a whole configuration"),
        ("evidence --config-json {} --scale gpu", "--scale beside --config-json, which is a whole configuration"),
        ('run --job {"kind":"hub_model"} --scale smoke --config seeds=x', "--config is for a job that is named"),
        ('run --job {"kind":"hub_model"} --scale smoke --config-json {}', "--config is for a job that is named"),
        (
            f"table mixln_table1 --config scale=tiny --records {OF_GPU} --out x.csv",
            "no job of scale tiny and seeds [0]",
        ),
        ("run x --micro-batch -1", "--micro-batch: '-1' is no whole number of 1 or more"),
        ("run x --micro-batch ²", "--micro-batch: '²' is no whole number of 1 or more"),
        ("run x --checkpoint-seconds nan", "--checkpoint-seconds: 'nan' is no number of seconds above 0"),
        ("run x --checkpoint-updates 0", "--checkpoint-updates: '0' is no whole number of 1 or more"),
        ("run x --local-data /no/such", "--local-data: /no/such: no such folder"),
        ('run --job {"kind":"hub_model"} --scale smok', "--scale: unknown scale 'smok'; did you mean 'smoke'"),
        ('run --job {"kind":"hub_model"} --scale smoke', "a job of kind hub_model: name is missing: add it"),
        ('run --job {"kind":"hub_model","nam":"x"} --scale smoke', "unknown key 'nam'; did you mean 'name'"),
        ("watch --seconds 0", "--seconds: '0' is no number of seconds above 0"),
        ("table mixln_table1 --out src", "--out: src: name a file that ends in .csv"),
        ("table mixln_table1 --out README.md/x.csv", "--out: README.md/x.csv: README.md is a file"),
        ("table mixln_table1 --out x.csv --records no.json", "--records: no.json: no such file"),
        ("table mixln_table1 --out x.csv --records src", "--records: src is a folder"),
        ("figure mixln_figure5 --out x.png", "--out: x.png: name a file that ends in .svg"),
        ("curves cce_table1 --out x.svg", "cce_table1: none of its jobs has a training curve"),
        ("measure cross_entropy --case x --out x", "--out: x: name a file that ends in .jsonl"),
        ("prepare-data --settings 5 --out d", "no object of JSON"),
        ("prepare-data --settings {} --out README.md", "--out: README.md is a file; name a folder"),
        ("prepare-data --settings {} --out d", "settings of TokenData: dataset is missing: add it"),
        ("show mixln_table1 --json", "name it with --cell"),
        ("show mixln_table1 --cell x", "--cell takes ROW,COLUMN: unknown cell 'x'"),
    ],
)
def test_an_argument_that_a_verb_cannot_use_is_refused_in_a_sentence(arguments, message, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert message in refusal(arguments.split(" "), capsys)


def test_a_variable_of_the_environment_that_is_no_number_is_named(capsys, monkeypatch):
    for variable, value in (("PAPERLM_CHECKPOINT_SECONDS", "soon"), ("PAPERLM_LOCAL_DATA", "/no/such")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            assert f"environment variable {variable}: " in refusal(["plan"], capsys)
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert "environment variable WORLD_SIZE is 'many'" in refusal(["run", "x"], capsys)


@pytest.mark.parametrize(
    "more,variable,right",
    [
        ([], None, 60),
        (["--config", "checkpoint_seconds=7"], None, 7),
        (["--config", "checkpoint_seconds=7"], "5", 5),
        (["--config", "checkpoint_seconds=7", "--checkpoint-seconds", "3"], "5", 3),
    ],
)
def test_how_often_a_job_that_is_named_keeps_its_state_is_said_by_argument_variable_or_configuration(
    more, variable, right, monkeypatch
):
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("PAPERLM_CHECKPOINT_SECONDS", raising=False)
    if variable:
        monkeypatch.setenv("PAPERLM_CHECKPOINT_SECONDS", variable)
    seen = []
    monkeypatch.setattr("paperlm.run.run_named", lambda project, what, machine, *rest: seen.append(machine))
    cli.main(["run", "mixln_table1", *more])
    assert [machine.checkpoint_seconds for machine in seen] == [right]


def test_outside_a_clone_the_verbs_say_where_they_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("paperlm.plan.project.ROOT", tmp_path)
    for arguments in (["plan"], ["run", "--job", "{}", "--scale", "smoke"]):
        assert "this works in a clone of the repository only" in refusal(arguments, capsys)


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["--version"])
    assert done.value.code == 0
    stated = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert capsys.readouterr().out == f"paperlm {stated}\n"


@pytest.mark.parametrize("numbers", [10, 100_000])
@pytest.mark.parametrize("library", ["safetensors", "torch", "datasets"])
def test_a_full_disk_inside_a_library_is_a_sentence(library, numbers, tmp_path, capsys, monkeypatch):
    import resource
    import signal

    import datasets
    import torch
    from safetensors.torch import save_file

    items = tmp_path / "items.jsonl"
    items.write_text('{"x": "0123456789"}\n' * numbers)

    def load(tensors: dict, path: Path) -> None:
        datasets.load_dataset("json", data_files=str(items), cache_dir=str(path))

    def save(options: object) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
        try:
            {"safetensors": save_file, "torch": torch.save, "datasets": load}[library](
                {"x": torch.zeros(numbers)}, tmp_path / "x"
            )
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            signal.signal(signal.SIGXFSZ, before)

    monkeypatch.setattr(cli, "_plan", save)
    assert "no space left" in refusal(["plan"], capsys)


def test_a_file_that_is_not_there_is_a_sentence_and_a_fault_of_ours_is_not_hidden(tmp_path, capsys, monkeypatch):
    def missing(options: object) -> None:
        (tmp_path / "no.csv").read_text()

    monkeypatch.setattr(cli, "_plan", missing)
    assert "no.csv: No such file or directory" in refusal(["plan"], capsys)

    for error in (KeyError("a fault"), ValueError("unexpected positions"), RuntimeError("unexpected pos")):

        def fault(options: object, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(cli, "_plan", fault)
        with pytest.raises(type(error)):
            cli.main(["plan"])
