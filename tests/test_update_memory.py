"""Memory over the phases of an update (NeuZip, Figure 2): counted bytes against what tensors really take."""

from __future__ import annotations

import functools
import weakref

import pandas
import pytest
import torch
from paperlm_kernels.stored import weight_bytes
from support_engine import trained
from support_figures import drawn, record_of
from test_descent import descent
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paperlm.figures.base import write_figure
from paperlm.figures.resident_tensors import BACKWARD, BLOCK, LAYER, RUN, UPDATE
from paperlm.jobs.base import Inputs
from paperlm.jobs.stored_speed import PHASES, StoredSpeed, iteration, peaks
from paperlm.plan.project import Project
from paperlm.record.record import write_record
from paperlm.train.language_model import store_weights

CPU = torch.device("cpu")
deep = functools.partial(descent, n_layers=8)  # so that all gradients are many times the largest
METHODS = {"Vanilla": ("sgd", "raw"), "LOMO": ("lomo", "raw"), "+NeuZip Lossless": ("lomo", "packed")}


class Storages(TorchDispatchMode):
    """Bytes of the storages that tensor functions have made and that are still there; counts as torch.cuda does."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            storage = tensor.untyped_storage() if torch.is_tensor(tensor) else None
            if storage is not None and storage._cdata not in before and storage not in self.known:
                self.known.add(storage)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.gone, storage.nbytes())
        return found

    def gone(self, size):
        self.now -= size

    def synchronize(self, device):
        pass

    def max_memory_allocated(self, device):
        return self.most

    def reset_peak_memory_stats(self, device):
        self.most = self.now


@pytest.fixture(scope="module")
def model(manifest, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    trained(deep(), manifest, folder)
    return folder / "model"


def measured(model, optimizer, weights):
    """Peak of each phase beyond what is there between updates, and the counted bytes of the weights."""
    of = deep(optimizer=optimizer, weights=weights)
    job = StoredSpeed(of=of, what="update", store="plain", batch=2, window=16)
    update = iteration(job, Inputs(models={"of": model}, work=model), CPU)
    update()
    with Storages() as memory:
        found = peaks(update, memory, CPU)
    return {phase: found[f"{phase}/peak_bytes"] for phase in PHASES}


def counted(model, weights):
    from paperlm.models.folder import load_model

    plain = load_model(model, dtype=torch.bfloat16)
    store_weights(deep(weights=weights), plain)
    return weight_bytes(plain)


def test_the_peak_of_a_phase_has_nothing_of_what_was_before_or_of_another_phase():
    def update(ended):
        for phase, size in zip(PHASES, (300, 500, 200), strict=True):
            torch.zeros(size, dtype=torch.uint8)
            ended(phase)

    with Storages() as memory:
        torch.zeros(10**6, dtype=torch.uint8)
        found = peaks(update, memory, CPU)
    assert [found[f"{phase}/peak_bytes"] for phase in PHASES] == [300, 500, 200]


def test_gradients_are_kept_until_the_update_by_descent_and_never_together_by_lomo(model):
    vanilla, lomo = (measured(model, *METHODS[row]) for row in ("Vanilla", "LOMO"))
    found = counted(model, "raw")
    assert vanilla["forward"] == pytest.approx(lomo["forward"], rel=0.05), "activations are the same"
    # what the forward pass holds at most, of which the backward pass begins with a part
    activations = lomo["forward"]
    assert found.gradients <= vanilla["backward"] <= found.gradients + 2 * activations
    assert vanilla["update"] >= found.gradients, "they are there when the weights are changed"
    # in float32 a part of a weight is changed on a CPU: twice its gradient, and their difference
    assert lomo["backward"] <= 7 * found.in_update + 2 * activations < found.gradients
    assert lomo["update"] < 0.1 * found.gradients, "nothing is left to do"


def test_the_counted_bytes_of_training_are_in_the_order_of_the_measured_peaks(model):
    most = {}
    for row, (optimizer, weights) in METHODS.items():
        phases, found = measured(model, optimizer, weights), counted(model, weights)
        most[row] = (found.in_training(fused=optimizer == "lomo"), found.total + max(phases.values()))
    for column in (0, 1):
        assert most["+NeuZip Lossless"][column] < most["LOMO"][column] < most["Vanilla"][column]


def numbers(scale, folder, metrics):
    project, files = Project({"scale": scale}), []
    for job in {job.job_id: job for job in project.jobs_of("neuzip_figure2")}.values():
        if job.kind == "pretrain" or metrics:
            train = job if job.kind == "pretrain" else job.of
            size = {"sgd": 4, "lomo": 3}[train.optimizer] - (train.weights == "packed")
            values = dict.fromkeys(job.metrics(), 1.0) | {name: bound[0] for name, bound in job.bounds().items()}
            values |= {name: size * 2**20 for name in values if name.endswith("_bytes")}
            files.append(folder / f"{job.job_id}.json")
            write_record(files[-1], record_of(job, values, outcome="trained" if job is train else "measured"))
    write_figure(project, "neuzip_figure2", files, folder / "two.svg")
    return pandas.read_csv(folder / "two.csv", dtype=str).set_index("tensor")


def test_the_figure_has_counted_bytes_and_of_a_gpu_the_peak_of_each_phase(tmp_path):
    found = numbers("gpu", tmp_path, metrics=True)
    for what in ("weights, counted", "with gradients at most, counted", *(f"{p}, measured peak" for p in PHASES)):
        assert list(found.loc[f"{what} (MiB)"])[:4] == ["not run", "4", "3", "2"]
    assert found.loc["weight, 16 bits", "NeuZip"] == "while its layer runs"
    claim = pandas.read_csv(tmp_path / "two.claims.csv").set_index("part").loc["GPT-Neo-XL 2.7B"]
    assert claim["claim"] == "NEU-F2-1" and "Peak" in claim["expression"]
    diff = pandas.read_csv(tmp_path / "two.diff.csv")
    assert set(diff["row"]) == {"Vanilla", "LOMO", "+NeuZip Lossless"} and diff["column"].nunique() == 2
    picture = (tmp_path / "two.svg").read_text()
    assert "peaks are measured" not in picture and "measured peaks: not run" not in picture


@pytest.mark.parametrize(
    ("scale", "words", "others"),
    [
        ("tiny", "peaks are measured on a GPU", "measured peaks: not run"),
        ("gpu", "measured peaks: not run", "peaks are measured on a GPU"),
    ],
)
def test_peaks_that_are_missing_at_a_scale_of_gpus_were_not_run(tmp_path, scale, words, others):
    numbers(scale, tmp_path, metrics=False)
    found = (tmp_path / "two.svg").read_text()
    assert words in found and others not in found


def test_the_figure_is_no_wider_than_a_page_and_each_lifetime_stands_inside_its_box(tmp_path, monkeypatch):
    project = Project({"scale": "tiny"})
    figure = drawn(monkeypatch, project, "neuzip_figure2", [], tmp_path)
    upper, lower = figure.axes
    assert figure.get_figwidth() <= 7.2 and upper.get_position().y0 > lower.get_position().y1
    renderer = figure.canvas.get_renderer()
    boxes = [patch.get_window_extent(renderer) for patch in upper.patches]
    words = [text for text in upper.texts if text.get_text() in {RUN, UPDATE, BACKWARD, BLOCK, LAYER}]
    assert len(words) == len(boxes) and min(text.get_fontsize() for text in words) >= 7.5
    for text, box in zip(words, boxes, strict=True):
        inside = text.get_window_extent(renderer)
        assert box.x0 < inside.x0 and inside.x1 < box.x1, text.get_text()


def test_without_a_gpu_it_has_the_counted_bytes_alone_and_without_records_the_lifetimes(tmp_path):
    found = numbers("tiny", tmp_path, metrics=False)
    assert list(found.loc["weights, counted (MiB)"])[:4] == ["not run", "4", "3", "2"]
    assert set(found["proxies"]) == {"a proxy of neuzip_2.7B: hidden_size 256, n_layers 2, vocab_size 1024"}
    assert set(found.loc["backward, measured peak (MiB)"][:4]) == {"not run"}
    write_figure(Project({"scale": "tiny"}), "neuzip_figure2", [], tmp_path / "none.svg")
    assert (tmp_path / "none.csv").read_text().count("not run") == 4 * 5
