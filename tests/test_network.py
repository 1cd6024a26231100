"""Nothing at the default scale uses a network, told by a kernel that lets no process ask for it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import copy_tracked
from support_workflow import SMOKE, clone_environment

from paperlm.data.settings import ModelData
from paperlm.plan.project import Project

DENIED = Path(__file__).with_name("support_network.py")


def denied(*command: str, folder: Path | None = None) -> subprocess.CompletedProcess:
    """Run without the network, and without the words by which libraries are asked to do without it themselves."""
    environment = clone_environment(folder or Path.cwd())
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        environment.pop(name, None)
    return subprocess.run(
        [sys.executable, str(DENIED), sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=550,
    )


@pytest.mark.parametrize(
    "code",
    [
        "socket.getaddrinfo('example.org', 443)",
        "socket.create_connection(('127.0.0.1', 9))",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
        "import urllib.request; urllib.request.urlopen('http://example.org')",
        "import huggingface_hub; huggingface_hub.hf_hub_download('gpt2', 'config.json', cache_dir='/nonexistent')",
    ],
    ids=["name", "address", "datagram", "page", "hub"],
)
def test_a_process_that_asks_for_the_network_is_ended_even_if_it_would_not_mind(code):
    code = f"import socket\ntry:\n    {code}\nexcept Exception:\n    pass"
    assert denied("-c", code).returncode == -signal.SIGSYS


def test_a_process_that_another_one_starts_is_ended_as_well():
    inner = "import socket; socket.socket()"
    code = f"import subprocess, sys; print(subprocess.run([sys.executable, '-c', {inner!r}]).returncode)"
    assert denied("-c", code).stdout.split() == [str(-signal.SIGSYS.value)]


def test_what_stays_within_the_machine_is_allowed():
    code = (
        "import multiprocessing, socket\n"
        "a, b = socket.socketpair()\n"
        "a.send(b'x'); assert b.recv(1) == b'x'\n"
        "with multiprocessing.get_context('spawn').Pool(1) as pool: print(pool.apply(len, ('abc',)))"
    )
    done = denied("-c", f"if __name__ == '__main__':\n    {code.replace(chr(10), chr(10) + '    ')}")
    assert done.stdout.split() == ["3"], done.stderr


def made(clone: Path, target: str, *options: str) -> str:
    done = denied("-m", "snakemake", f"paper_tables/{target}", "--cores", "2", *options, folder=clone)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (clone / "paper_tables" / target).is_file()
    return done.stdout + done.stderr


def test_a_table_of_records_is_made_without_a_network(tmp_path):
    made(copy_tracked(tmp_path / "clone"), "mixln_table1.csv", "--config", "scale=gpu", "run_missing=no")


def test_data_a_model_and_what_is_measured_on_it_are_made_without_a_network(tmp_path):
    """By the rules, at smoke; slow tests make a job of every kind, and train at the default scale."""
    out = made(copy_tracked(tmp_path / "clone"), "lns_figure6.svg", *SMOKE)
    assert all(rule in out for rule in ("prepare_data", "pretrain", "output_variance"))


@pytest.mark.parametrize("scale", ["smoke", "tiny"])
def test_the_scales_of_a_first_run_read_nothing_from_a_hub(scale):
    """So that a job of a kind that needs no network at one of them needs none at the other."""
    read = [settings for job in Project({"scale": scale}).jobs.values() for settings in job.data()]
    named = {getattr(settings, "model" if isinstance(settings, ModelData) else "dataset") for settings in read}
    assert {name.partition(":")[0] for name in named} <= {"bundled", "local"} and len(named) > 10


@pytest.mark.slow
@pytest.mark.long
def test_data_models_and_what_is_measured_on_them_are_made_without_a_network_at_the_default_scale(tmp_path):
    out = made(copy_tracked(tmp_path / "clone"), "neuzip_figure1.svg")
    assert all(rule in out for rule in ("prepare_data", "pretrain", "weight_entropy"))


ONE_OF_EACH = """
from paperlm.jobs import Machine
from paperlm.plan.project import Project
from paperlm.run import run_named

project, machine = Project({"scale": "smoke"}), Machine(device="cpu", progress=False)
first = {job.kind: name for name, job in reversed(project.jobs.items())}
for name in first.values():
    run_named(project, name, machine, with_parents=True, again=False)
print(*first)
"""


@pytest.mark.slow
def test_a_job_of_every_kind_is_made_without_a_network(tmp_path):
    clone = copy_tracked(tmp_path / "clone")
    done = denied("-c", ONE_OF_EACH, folder=clone)
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = {job.kind for job in Project({"scale": "smoke"}).jobs.values()}
    assert set(done.stdout.split()) == kinds and len(kinds) >= 24
    for kind in kinds:
        assert list((clone / "results/smoke" / kind).glob("*.json")), kind
