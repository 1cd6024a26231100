"""What the documents say is so: their code runs, their commands work, files and links exist, tables are generated."""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support import copy_tracked, job_environment
from support_documents import DOCUMENTS, blocks, commands, generated, headings, prose, read, words
from support_workflow import slower

from paperlm.data.registry import registry
from paperlm.documents import check_documents, write_documents
from paperlm.errors import RecordError, SpecError
from paperlm.norms import norm_methods
from paperlm.plan.project import ROOT, Project

NOT_RUN = {
    "make table": "makes an environment; the snakemake command behind it is run",
    "make test": "runs these tests",
    "pip install ./kernels": "makes an environment; tests/test_kernels_package.py builds the package",
    "python -m paperlm lm-eval --model hf --model_args pretrained=my_model --tasks arc_easy --device cpu": (
        "fetches items; tests/test_harness.py runs it on local ones"
    ),
    "lm_eval --model hf --model_args pretrained=my_model,trust_remote_code=True --tasks arc_easy --device cpu": (
        "fetches items; tests/test_model_folder.py runs it on local ones"
    ),
    "snakemake mixln --cores 8 --config scale=gpu local_data=/path/to/folder run_missing=yes --until prepare_data": (
        "needs the files of the local sets"
    ),
}
"Command -> why no test runs it."
SMALLER = {
    "python -m paperlm watch": "python -m paperlm watch --once",
    "python -m paperlm run mixln_figure5 --with-parents": (
        "python -m paperlm run mixln_figure5 --with-parents --scale smoke"
    ),
    "python -m paperlm run <job id> --with-parents --again": (
        "python -m paperlm run <job id> --with-parents --again --scale smoke"
    ),
    "python tests/support_network.py snakemake mixln --cores 8": (
        "python tests/support_network.py snakemake mixln --cores 8 -n"  # tests/test_network.py makes jobs
    ),
    "torchrun --standalone --nproc-per-node 4 -m paperlm run <job id> --scale gpu": (
        "torchrun --standalone --nproc-per-node 2 -m paperlm run <job id> --again --scale smoke --device cpu"
    ),
}
"Command -> how it is run here: at the scale of tests, on a CPU."
FOR_REAL = "snakemake toy --cores 2 --config scale=smoke"
"The one workflow that is run; of the others the plan is made."
SLOW = (
    FOR_REAL,
    "paperlm run",
    "rows.jsonl",
    "rms_norm.jsonl",
    "bench pretrain --cases",
    "bench sft --cases",
    "bench descent --scale",
)
"Parts of commands that train or measure, or show what was measured."


def _commands() -> list:
    found = []
    for document in DOCUMENTS:
        for command in dict.fromkeys(commands(document)):
            slow = any(part in command for part in SLOW)
            found.append(pytest.param(document, command, marks=[pytest.mark.slow] if slow else []))
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Copy of the repository with the files that a document says to write; one for each document."""
    made: dict[str, Path] = {}

    def of(document: str) -> Path:
        if document not in made:
            made[document] = copy_tracked(tmp_path_factory.mktemp("clone"))
            for block in blocks(document):
                if block.file:
                    path = made[document] / block.file
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(block.text, encoding="utf-8")
        return made[document]

    return of


def _run(folder: Path, command: list[str], cwd: Path | None = None) -> str:
    """Standard output and error of a command with the packages of `folder`, on a machine without a GPU."""
    packages = {"PYTHONPATH": f"{folder / 'src'}:{folder / 'kernels'}", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    command = [sys.executable, *command[1:]] if command[0] == "python" else command
    done = subprocess.run(
        command,
        cwd=cwd or folder,
        env=job_environment(**packages),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400 * slower(),
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def _job(start: str, scale: str) -> str:
    of_table_1 = (job.job_id for job in Project({"scale": scale}).jobs_of("mixln_table1"))
    (found,) = (name for name in of_table_1 if re.fullmatch(f"{start}[0-9a-f]{{8}}", name))
    return found


# -- code and commands ----


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if any(not b.file for b in blocks(d, "python"))])
def test_the_python_of_a_document_runs_as_it_stands(document, place, tmp_path):
    folder = place(document)
    code = tmp_path / "code.py"
    code.write_text("\n".join(b.text for b in blocks(document, "python") if not b.file), encoding="utf-8")
    _run(folder, ["python", str(code)], cwd=tmp_path)


@pytest.mark.parametrize(("document", "command"), _commands())
def test_a_command_of_a_document_works(document, command, place):
    if command in NOT_RUN:
        return
    folder, command = place(document), SMALLER.get(command, command)
    command = command.replace("/path/to/folder", "data").replace("<yours>", "gpu")
    (folder / "data").mkdir(exist_ok=True)
    if "<job id>" in command:
        command = command.replace("<job id>", _job("llama_71m-pre_ln-s0-", "smoke"))
    command = re.sub(r"(\S+-)<hash>", lambda match: _job(match[1], "tiny"), command)
    given = words(command)
    if given[0] == "snakemake" and command != FOR_REAL and "-n" not in given:
        given.append("-n")
    out = _run(folder, given)
    if command == FOR_REAL:
        rows = list(csv.reader((folder / "paper_tables/toy_table1.csv").read_text().splitlines()))
        assert {cell for row in rows for cell in row} >= {"Gated", "Gated from 0.25", "Largest gate"}
        assert all(row[0].startswith("smoke: a proxy of 71M: hidden_size ") for row in rows[1:]), rows
        assert "TOY-T1-1" in out and (folder / "paper_tables/toy_figure1.svg").is_file()
        drawn = list(csv.DictReader((folder / "paper_tables/toy_figure1.csv").read_text().splitlines()))
        assert [(row["row"], row["block"]) for row in drawn] == [
            (name, str(block)) for name in ("Gated", "Gated from 0.25") for block in range(1, 13)
        ]
        assert all(float(row["gate"]) not in (0.5, 0.25) for row in drawn), "four updates moved every gate"


def test_every_exception_is_a_command_of_a_document():
    said = {command for document in DOCUMENTS for command in commands(document)}
    assert {*NOT_RUN, *SMALLER, FOR_REAL} <= said


def test_jobs_of_the_two_partitions_ask_for_the_right_one(place):
    folder = place("docs/scales_and_clusters.md")
    profile = ["--workflow-profile", "workflow/profiles/two_partitions"]
    out = _run(folder, ["snakemake", *profile, "paper_tables/mixln_table1.csv", "--config", "scale=paper", "-n"])
    asked = dict(re.findall(r"^rule (\w+):$.*?slurm_partition=(\w+)", out, re.MULTILINE | re.DOTALL))
    assert asked["prepare_data"] == "cpu" and asked["pretrain"] == "gpu"
    assert re.search(r"^rule pretrain:$.*?gpu_model=h100", out, re.MULTILINE | re.DOTALL)


# -- names ----


def test_the_entrance_is_short():
    assert len(read("README.md").splitlines()) <= 150


def test_the_document_on_models_names_every_method():
    named = re.search(r"`norm` is one of `([^`]*)`", read("docs/models.md"))[1]
    assert sorted(named.split()) == sorted(norm_methods())


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_somewhere(document):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = ((ROOT / document).parent / path).resolve() if path else ROOT / document
        assert linked.is_file(), f"{document}: {target}"
        if anchor:
            assert anchor in headings(str(linked.relative_to(ROOT))), f"{document}: {target}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_file_that_a_document_names_exists(document):
    own = {block.file for block in blocks(document)}
    top = {path.name for path in ROOT.iterdir()} - {"results", "logs"}
    exhibits = Project().exhibits
    for name in re.findall(r"`([\w./<> -]+)`", prose(document)):
        pattern = re.sub(r"<[^>]*>", "*", name).rstrip("/")
        if name in own or " " in pattern:
            continue
        if made := re.fullmatch(r"paper_tables/(\w+)\.[\w.]+", pattern):
            assert made[1] in [*exhibits, "published_consistency"], f"{document}: {name}"
        elif "/" in pattern and pattern.split("/")[0] in top:
            there = list(ROOT.glob(pattern))
            assert there or ("<" in name and pattern.startswith("paper_tables/")), f"{document}: {name}"
        elif pattern.endswith(".py"):
            assert list((ROOT / document).parent.rglob(pattern)), f"{document}: {name}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_names_no_host_but_that_of_the_projects_it_links_to(document):
    hosts = set(re.findall(r"\b[\w-]+\.(?:com|org|io|net|dev)\b", read(document)))
    assert hosts <= {"github.com"}


# -- generated parts ----

BENCH, TILES = "paper_tables/records/bench", "paper_tables/records/tiles"
SWEPT = f"measured: python -m paperlm_kernels.bench.ops.ternary_linear.swept {TILES}/ternary_linear.jsonl"
MARKS = {
    "README.md": ["gpu: mixln_table1"],
    "docs/data.md": ["registry: bundled and local"],
    "docs/speed.md": [
        f"measured: python -m paperlm bench show {BENCH}/{name}.jsonl"
        for name in ("pretrain", "sft", "decode", "descent", "descent_second", "descent_third", "descent_h100")
    ],
    "kernels/README.md": [
        f"measured: python -m paperlm_kernels.bench show {BENCH}/{name}"
        for name in ("cross_entropy.jsonl # first table", "neuzip_cpu.jsonl")
    ],
    "kernels/MEASURED.md": [
        f"measured: python -m paperlm_kernels.bench show {BENCH}/{name}.jsonl"
        for name in ("cross_entropy", "cross_entropy_h100")
    ],
    "kernels/MEASURED_FEW_BITS.md": [
        *(
            f"measured: python -m paperlm_kernels.bench show {BENCH}/{name}.jsonl"
            for name in ("ternary_linear_h100", "ternary_linear", "ternary_linear_second", "ternary_linear_gemlite")
        ),
        SWEPT,
        *(
            f"measured: python -m paperlm_kernels.bench show {BENCH}/{name}.jsonl"
            for name in ("rmsnorm_quantize", "kv_attention", "neuzip", "neuzip_h100", "neuzip_student_t")
        ),
    ],
}
MEASURED = ["docs/speed.md", "kernels/MEASURED.md", "kernels/MEASURED_FEW_BITS.md"]


def test_every_generated_part_is_what_its_source_says():
    check_documents(Project())
    marks = {document: re.findall(r"^<!-- (\w+: .+) -->$", read(document), re.MULTILINE) for document in DOCUMENTS}
    assert {document: found for document, found in marks.items() if found} == MARKS


@pytest.mark.parametrize("document", MEASURED)
def test_a_part_that_was_measured_is_what_the_command_of_its_mark_prints(document):
    for mark in MARKS[document]:
        shown = _run(ROOT, words(mark.removeprefix("measured: "))).strip()
        assert generated(document, mark) == shown and shown.count("\n|") > 2


def test_the_table_in_the_readme_of_the_kernels_is_the_first_of_the_measured():
    section = read("kernels/README.md").split("### Measured")[1].split("\n## ")[0]
    (table,) = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    assert re.search(r"(?:^\|.*\n)+", read("kernels/MEASURED.md"), re.MULTILINE)[0] == table


def test_the_times_of_the_sweep_are_the_latest_of_its_record():
    rows = map(json.loads, (ROOT / TILES / "ternary_linear.jsonl").read_text().splitlines())
    latest = {(row["case"], row["tiles"]): row["us"] for row in rows if row["tiles"] in ("bf16", "chosen")}
    cases = {case for case, _ in latest}
    expected = [
        f"| {c} | {latest[c, 'bf16']:.1f} | {latest[c, 'chosen']:.1f} | {latest[c, 'bf16'] / latest[c, 'chosen']:.2f} |"
        for c in cases
    ]
    table = [line for line in generated("kernels/MEASURED_FEW_BITS.md", SWEPT).splitlines() if line.startswith("|")]
    assert sorted(table[2:]) == sorted(expected) and len(expected) > 20


def test_the_table_of_data_has_a_line_for_each_set_that_is_not_on_the_hub():
    lines = generated("docs/data.md", "registry: bundled and local").splitlines()[2:]
    named = re.findall(r"^\| (?:tokenizer )?`([\w:.-]+)`", "\n".join(lines), re.MULTILINE)
    found = registry()
    entries = {**found.datasets, **found.models}
    assert named == [f"{e.source}:{n}" for n, e in entries.items() if e.source != "hub"] + list(found.tokenizers)
    assert len(named) == len(lines) > 10


@pytest.fixture
def copy(root: Path) -> Project:
    """The documents and what they are generated from."""
    for name in (BENCH, TILES, "docs"):
        shutil.copytree(ROOT / name, root / name)
    (root / "kernels").mkdir()
    for name in ("README.md", "kernels/README.md", "kernels/MEASURED.md", "kernels/MEASURED_FEW_BITS.md"):
        shutil.copy(ROOT / name, root / name)
    return Project({}, root)


@pytest.mark.parametrize("document", MARKS)
def test_a_number_that_was_edited_is_found_and_written_anew_and_words_around_it_stay(copy, document, capsys):
    path, text = copy.root / document, read(document)
    inside, around = generated(document, MARKS[document][0]), f"A word of mine.\n{text}"
    path.write_text(around.replace(inside, inside.replace("1", "2")), encoding="utf-8")
    assert path.read_text() != around
    with pytest.raises(RecordError, match=rf"^{document}: a generated part is not .*documents --write"):
        check_documents(copy)
    write_documents(copy)
    assert path.read_text() == around and capsys.readouterr().out == f"{document}\n"
    check_documents(copy)


@pytest.mark.parametrize(
    ("edit", "error", "message"),
    [
        (lambda t: t.replace("<!-- end -->", ""), SpecError, r"speed\.md: no <!-- end --> behind <!-- measured: "),
        (
            lambda t: t.replace("<!-- measured:", "<!-- mesured:"),
            SpecError,
            "source 'mesured'; did you mean 'measured'",
        ),
        (lambda t: t.replace("bench show paper", "bench list paper"), SpecError, "quote python -m paperlm bench show"),
        (lambda t: t.replace("pretrain.jsonl -->", "no.jsonl -->"), RecordError, r"No such file .*no\.jsonl"),
        (
            lambda t: t.replace("paperlm bench show", "paperlm_kernels.bench.ops.ternary_linear.swept"),
            RecordError,
            r"pretrain\.jsonl:1: not a row of a sweep; restore the file or delete the line",
        ),
        (lambda t: t.replace("measured: python", "tiny: python"), RecordError, "no reference of python"),
    ],
)
def test_a_mark_with_a_mistake_is_named_and_nothing_is_written(copy, edit, error, message):
    path = copy.root / "docs/speed.md"
    path.write_text(edit(path.read_text()), encoding="utf-8")
    before = path.read_bytes()
    with pytest.raises(error, match=message):
        write_documents(copy)
    assert path.read_bytes() == before
