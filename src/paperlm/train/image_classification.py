"""Image classification as a task of the engine.

Every draw of an augmentation depends on the seed, the update and the image's place in the batch, never on the machine:
pairs that are mixed stand side by side, so that any even micro-batch has both.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from paperlm.data.images import ImageShards
from paperlm.data.shards import BatchOrder
from paperlm.errors import DataError
from paperlm.jobs.base import Inputs, Machine
from paperlm.models.vit import PaperViTConfig, PaperViTForImageClassification
from paperlm.result import Result, Series
from paperlm.train.augment import evaluation_pixels, kept_branches, mixed, mixing, smoothed, training_pixels
from paperlm.train.distributed import World, start_world
from paperlm.train.engine import Batch, Engine, run_task
from paperlm.train.task import ScheduledTask, start_dtype

if TYPE_CHECKING:
    from paperlm.jobs.image_classification import ImageClassification

POINTS = 160
"Points of a thinned curve: enough for a figure, a few kB in a record."
GPU_TOKENS = 65_536
"Tokens of a micro-batch on a GPU, at most."
PROFILED = 64
"Images of the forward pass that methods may start from, at most."
OF_IMAGE, OF_GROUP = 1, 2
"Last words of the seeds: one generator for each image of a batch, one for each group that shares a draw."


class SummedLoss(torch.nn.Module):
    """forward(pixels, targets, kept) -> summed loss: what DistributedDataParallel and torch.compile wrap."""

    def __init__(self, model: PaperViTForImageClassification) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: torch.Tensor, targets: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
        return self.model.summed_loss(pixels, targets, kept)


def config_of(job: ImageClassification, names: Sequence[str]) -> PaperViTConfig:
    """The model's configuration; `names` are those of the classes."""
    return PaperViTConfig(
        image_size=job.image_size,
        patch_size=job.patch_size,
        num_channels=job.channels,
        hidden_size=job.hidden_size,
        intermediate_size=job.intermediate_size,
        num_hidden_layers=job.n_layers,
        num_attention_heads=job.n_heads,
        layer_norm_eps=job.layer_norm_eps,
        initializer_range=job.initializer_range,
        norm=job.norm,
        id2label=dict(enumerate(names)),
        label2id={name: number for number, name in enumerate(names)},
    )


def build_model(
    job: ImageClassification, names: Sequence[str], first_batch: torch.Tensor, device: torch.device
) -> PaperViTForImageClassification:
    """The model at update 0. first_batch: (B, C, I, I), for methods that start from a forward pass."""
    torch.manual_seed(job.seed)
    model = PaperViTForImageClassification(config_of(job, names))
    job.method().initialize_from_batch(model, first_batch)
    start_dtype(model, job.numerics)
    return model.to(device).train()


class Parts(Sequence):
    """The parts of a batch, each made when it is its turn."""

    def __init__(self, made: Sequence[Callable[[], Any]]) -> None:
        self.made = made

    def __len__(self) -> int:
        return len(self.made)

    def __getitem__(self, index: int) -> Any:
        return self.made[index]()


class Classifying(ScheduledTask):
    """Classes of prepared images. Raises DataError if the images are not those of the job."""

    def __init__(self, job: ImageClassification, manifest: Path, micro_batch: int, world: World) -> None:
        self.job = self.settings = job
        self.world = world
        self.images, self.validation = (ImageShards(manifest, s, job.channels) for s in ("train", "validation"))
        if self.images.manifest["settings"] != job.image_data().model_dump(mode="json"):
            raise DataError(f"{manifest}: prepared for other settings; run the data rule again")
        self.updates, self.evaluate_every = job.steps, job.eval_every
        self.slots_per_update = job.global_batch
        self.micro_batch = self._micro_batch(micro_batch)
        self.order = BatchOrder(len(self.images), job.global_batch, job.seed)
        # On a GPU images are decoded ahead of it by threads; on a CPU a job has one.
        cores = len(os.sched_getaffinity(0)) // world.size if world.device.type == "cuda" else 0
        self.pool = ThreadPoolExecutor(max(1, cores)) if cores else None
        self._ahead: dict[int, list[Future]] = {}
        first = np.stack([self._pixels(0, *pair)[0] for pair in enumerate(self.order.indices(0)[:PROFILED])])
        self.model = build_model(job, self.images.manifest["names"], torch.from_numpy(first), world.device)
        self.loss_module = SummedLoss(self.model)
        matrices, others = [], []
        for name, parameter in self.model.named_parameters():
            (matrices if parameter.ndim > 1 and name not in ("class_token", "positions") else others).append(parameter)
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": others, "weight_decay": 0.0}],
            lr=job.peak_lr,
            betas=job.adam_betas,
            eps=job.adam_eps,
            weight_decay=job.weight_decay,
            fused=True,
        )
        self.accuracy = self.loss = math.nan

    def _micro_batch(self, wish: int) -> int:
        """Images per forward pass: a process's share, up to 64k tokens on a GPU, or as wished; even if mixed."""
        largest, pairs = self.share(), 2 if self.job.mixes else 1
        if largest % pairs:
            raise DataError(f"{largest} images a process: mixup and cutmix mix pairs; use another number of processes")
        if wish:
            if wish < 1 or largest % wish or wish % pairs:
                even = "an even divisor" if pairs == 2 else "a divisor"
                raise DataError(f"micro_batch {wish} must be {even} of {largest}, the images of a process")
            return wish
        if self.world.device.type == "cuda":
            while largest % (2 * pairs) == 0 and largest * self.job.tokens > GPU_TOKENS:
                largest //= 2
        return largest

    # -- batches --

    def _random(self, update: int, place: int, purpose: int) -> np.random.Generator:
        return np.random.default_rng([self.job.seed, update, place, purpose])

    def _pixels(self, update: int, place: int, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Pixels (C, I, I) and kept branches (L, 2) of the training image `number`, at a place of an update's batch."""
        rng = self._random(update, place, OF_IMAGE)
        kept = kept_branches(self.job.n_layers, self.job.stochastic_depth, rng)
        return training_pixels(self.images.image(number), self.job, rng), kept

    def _loaded(self, update: int, places: range) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """What `_pixels` gives for each place; with threads, those of the next update are on their way afterwards."""
        if self.pool is None:
            numbers = self.order.indices(update)
            yield from (self._pixels(update, place, int(numbers[place])) for place in places)
            return
        first = self.world.rank * self.share()
        for wanted in (update, update + 1):
            if wanted not in self._ahead and wanted < self.updates:
                numbers = enumerate(self.order.indices(wanted)[first : first + self.share()], start=first)
                self._ahead[wanted] = [self.pool.submit(self._pixels, wanted, *pair) for pair in numbers]
        self._ahead = {key: value for key, value in self._ahead.items() if key >= update}
        yield from (self._ahead[update][place - first].result() for place in places)

    def _part(self, update: int, places: range) -> tuple[tuple[torch.Tensor, ...], float]:
        pixels, kept = (np.stack(values) for values in zip(*self._loaded(update, places), strict=True))
        labels = self.to_device(self.images.labels[self.order.indices(update)[places.start : places.stop]])
        pixels = self.to_device(pixels)
        targets = smoothed(labels, self.job.classes, self.job.label_smoothing)
        if self.job.mixes:
            draws = {place // self.job.mix_group for place in places}
            drawn = {group: mixing(self.job, self._random(update, group, OF_GROUP)) for group in draws}
            own, weights = zip(*(drawn[place // self.job.mix_group] for place in places), strict=True)
            pixels = mixed(pixels, self.to_device(np.stack(own)))
            targets = mixed(targets, self.to_device(np.array(weights, dtype=np.float32)[:, None]))
        arguments = (pixels, targets, self.to_device(kept)) if self.job.stochastic_depth else (pixels, targets)
        return arguments, 1 / self.job.global_batch

    def batch(self, update: int) -> Batch:
        first = self.world.rank * self.share()
        starts = range(first, first + self.share(), self.micro_batch)
        parts = [lambda places=range(start, start + self.micro_batch): self._part(update, places) for start in starts]
        return Batch(Parts(parts), self.job.global_batch)

    # -- evaluation --

    @torch.no_grad()
    def evaluate(self) -> Mapping[str, float | None]:
        """Accuracy and mean cross-entropy over the validation images, shared out over the processes."""
        self.model.eval()
        mine = range(self.world.rank, len(self.validation), self.world.size)
        right, total = 0, 0.0
        for start in range(0, len(mine), batch := max(self.micro_batch, 64)):
            numbers = mine[start : start + batch]
            read = lambda number: evaluation_pixels(self.validation.image(number), self.job)  # noqa: E731
            pixels = np.stack(list((self.pool.map if self.pool else map)(read, numbers)))
            labels = self.to_device(self.validation.labels[list(numbers)])
            with self.autocast():
                logits = self.model.logits(self.to_device(pixels)).float()
            right += int((logits.argmax(1) == labels).sum())
            total += float(F.cross_entropy(logits, labels, reduction="none").double().sum())
        self.model.train()
        gathered = self.world.gather((right, total))
        count = len(self.validation)
        self.accuracy, self.loss = (sum(values) / count for values in zip(*gathered, strict=True))
        if not math.isfinite(self.loss):  # the largest of logits that are no numbers says nothing
            self.accuracy = self.loss = math.nan
            return {"accuracy": None, "loss": None}
        return {"accuracy": self.accuracy, "loss": self.loss}

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)


def classify(job: ImageClassification, inputs: Inputs, machine: Machine) -> Result | None:
    """Train and evaluate; the result on the leading process, None on the others."""
    world = start_world(machine.device)
    build = lambda micro: Classifying(job, inputs.data[0], micro, world)  # noqa: E731
    engine, ended = run_task(build, inputs.work, machine, world, inputs.keep)
    if not world.leads:
        return None
    if ended == "trained" and inputs.model is not None:
        engine.hand_over(inputs.model)
    return _result(job, engine, ended)


def _result(job: ImageClassification, engine: Engine, ended: str) -> Result:
    task: Classifying = engine.task
    known, images, updates = math.isfinite(task.accuracy), len(task.validation), engine.at.update
    error = {"accuracy": math.sqrt(task.accuracy * (1 - task.accuracy) / images)} if known else {}
    curve, names = engine.curve, ("accuracy", "loss")
    left_out = job.left_out()
    return Result(
        outcome=ended,
        metrics={
            "accuracy": task.accuracy if known else None,
            "loss_validation": task.loss if known else None,
            "validation_images": images,
            "updates": updates,
            "images": engine.at.counted,
            "epochs": updates * job.global_batch / len(task.images),
            "parameters": sum(p.numel() for p in task.model.parameters()),
        },
        standard_errors=error,
        series={
            "train": Series(columns=["update", "images", "loss"], rows=curve.training(POINTS) if curve else []),
            "eval": Series(columns=["update", "images", *names], rows=curve.evaluations(names) if curve else []),
        },
        cost=engine.cost(job.flops_of_an_image()),
        labels=[f"trained without {', '.join(left_out)}"] if left_out else [],
    )
