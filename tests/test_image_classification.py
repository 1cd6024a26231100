"""Image classification on the engine: batches, exact resuming, micro-batches, accuracy, its record, bad input."""

from __future__ import annotations

import csv
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support_images import image_job, prepared

from paperlm.data.images import ImageShards
from paperlm.errors import DataError, Interrupted, JobError
from paperlm.figures.curves import draw_curves
from paperlm.jobs import run_job
from paperlm.jobs.base import Inputs, Machine
from paperlm.models.folder import load_model
from paperlm.models.sizes import flops_per_image
from paperlm.plan.project import Project
from paperlm.record.places import Places
from paperlm.record.record import read_record
from paperlm.run import Maker
from paperlm.tables.build import table_contents
from paperlm.train.augment import evaluation_pixels, smoothed, training_pixels
from paperlm.train.distributed import World
from paperlm.train.image_classification import Classifying

ALONE = World(0, 1, torch.device("cpu"))
QUIET = Machine(device="cpu", progress=False, compile="no")
PLAIN = {"crop_area": (1, 1), "crop_ratio": (1, 1), "flip": 0.0, "rand_augment": None, "erasing": 0.0}
PLAIN |= {"mixup": 0.0, "cutmix": 0.0, "label_smoothing": 0.0, "stochastic_depth": 0.0, "eval_crop": 1.0}
WHOLE = {"train_images": None, "validation_images": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


def made(job, folder, work, machine=QUIET, model=None):
    return run_job(job, Inputs(data=(prepared(job, folder),), work=work, model=model), machine)


def task_of(job, folder, micro_batch=0, world=ALONE):
    return Classifying(job, prepared(job, folder), micro_batch, world)


def parts(task, update):
    return [part for part, _ in task.batch(update).parts]


# -- batches --


def test_a_plain_batch_is_the_images_of_the_order_with_their_classes(folder):
    job = image_job(**PLAIN, **WHOLE)
    task, shards = task_of(job, folder), ImageShards(prepared(job, folder), "train", 1)
    for update in (0, 7):
        ((pixels, targets),) = parts(task, update)
        numbers = task.order.indices(update)
        expected = np.stack([evaluation_pixels(shards.image(int(n)), job) for n in numbers])
        assert np.array_equal(pixels.numpy(), expected)
        assert targets.argmax(1).tolist() == shards.labels[numbers].tolist() and targets.sum() == 8


def test_an_epoch_shows_every_image_once(folder):
    task = task_of(image_job(**PLAIN), folder)
    seen = torch.cat([pixels for update in range(4) for pixels, _ in parts(task, update)])
    stored = {evaluation_pixels(task.images.image(n), task.job).tobytes() for n in range(32)}
    assert len(stored) == 32 and {image.numpy().tobytes() for image in seen} == stored


def test_draws_differ_between_images_and_updates_and_seeds_and_are_the_same_again(folder):
    image = {"train_images": 1}
    job = image_job(**image, **{**PLAIN, "flip": 0.5, "erasing": 1.0})
    task, again, other = task_of(job, folder), task_of(job, folder), task_of(job.model_copy(update={"seed": 1}), folder)
    drawn = [parts(one, update)[0][0] for one, update in ((task, 0), (task, 1), (other, 0))]
    assert len({pixels.numpy().tobytes() for batch in drawn for pixels in batch}) == 24
    assert torch.equal(parts(again, 1)[0][0], drawn[1])


def test_a_group_shares_a_draw_of_mixing_and_groups_do_not(folder):
    """Four images a group; the weights are read off the targets of images whose partner has another class."""
    job = image_job(**{**PLAIN, "mixup": 0.8}, **WHOLE, global_batch=64)
    task = task_of(job, folder)
    ((_, targets),) = parts(task, 0)
    labels = task.images.labels[task.order.indices(0)]
    groups: dict[int, set[float]] = {}
    for place, label in enumerate(labels):
        if labels[place ^ 1] != label:
            groups.setdefault(place // 4, set()).add(round(float(targets[place, label]), 5))
    assert all(len(weights) == 1 for weights in groups.values()) and len(groups) > 10
    assert len(set().union(*groups.values())) == len(groups)
    torch.testing.assert_close(targets.sum(1), torch.ones(64))


@pytest.mark.parametrize("micro_batch", [2, 4])
def test_the_micro_batch_changes_no_pixel_no_target_and_no_branch_that_is_left_out(folder, micro_batch):
    job = image_job(stochastic_depth=0.5)
    whole, small = task_of(job, folder), task_of(job, folder, micro_batch)
    assert len(small.batch(3).parts) == 8 // micro_batch
    for expected, found in zip(parts(whole, 3)[0], zip(*parts(small, 3), strict=True), strict=True):
        assert torch.equal(torch.cat(found), expected)


@pytest.mark.parametrize("size", [2, 4])
def test_processes_share_a_batch_out_without_changing_it(folder, size):
    job = image_job()
    worlds = [World(rank, size, torch.device("cpu")) for rank in range(size)]
    shared = [part for world in worlds for part in parts(task_of(job, folder, world=world), 2)]
    ((pixels, targets, _),) = parts(task_of(job, folder), 2)
    assert torch.equal(torch.cat([part[0] for part in shared]), pixels)
    assert torch.equal(torch.cat([part[1] for part in shared]), targets)


def test_threads_that_decode_ahead_give_the_same_batches(folder):
    from concurrent.futures import ThreadPoolExecutor

    job = image_job()
    plain, threaded = task_of(job, folder), task_of(job, folder, 4)
    threaded.pool = ThreadPoolExecutor(3)
    for update in (0, 1, 2, 3):
        for expected, found in zip(parts(plain, update)[0], zip(*parts(threaded, update), strict=True), strict=True):
            assert torch.equal(torch.cat(found), expected)
    assert set(threaded._ahead) == {3}


# -- training --


def test_a_killed_job_ends_as_an_unbroken_one_to_the_last_bit(folder, tmp_path):
    """Every draw is on: crops, RandAugment, erasing, mixing, stochastic depth."""
    job = image_job(steps=7, eval_every=3, **WHOLE)
    assert not job.left_out() and job.stochastic_depth
    (tmp_path / "whole").mkdir(), (tmp_path / "broken").mkdir()
    whole = made(job, folder, tmp_path / "w", model=tmp_path / "whole")
    for stop in (2, 5):
        with pytest.raises(Interrupted, match=f"stopped at update {stop} of 7"):
            made(job, folder, tmp_path / "b", replace(QUIET, stop_after=stop), tmp_path / "broken")
    broken = made(job, folder, tmp_path / "b", model=tmp_path / "broken")
    assert broken.metrics == whole.metrics and broken.series == whole.series
    assert broken.cost.resumed_from == [2, 5]
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "broken")]
    assert files[0] == files[1]


def test_the_first_update_is_adamws_with_no_decay_for_norms_biases_class_token_and_positions(folder):
    """One step by hand: Adam's first step moves every weight by the rate, decayed ones shrink first."""
    job = image_job(**PLAIN, weight_decay=0.5, peak_lr=0.01, warmup_fraction=0.0)
    task = task_of(job, folder)
    before = {name: p.detach().clone() for name, p in task.model.named_parameters()}
    task.begin(0)
    for (pixels, targets), weight in task.batch(0).parts:
        assert weight == 1 / 8
        (task.loss_module(pixels, targets) * weight).backward()
    gradients = {name: p.grad.clone() for name, p in task.model.named_parameters()}
    task.optimizer.step()
    for name, p in task.model.named_parameters():
        plain = name in ("class_token", "positions") or p.ndim == 1
        g = gradients[name]
        expected = before[name] * (1 if plain else 1 - 0.01 * 0.5) - 0.01 * g / (g.abs() + job.adam_eps)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-5, atol=1e-6)


def test_the_loss_is_the_mean_cross_entropy_of_the_batch(folder, tmp_path):
    job = image_job(steps=1, eval_every=1)
    task = task_of(job, folder)
    ((pixels, targets, kept),) = parts(task, 0)
    with torch.no_grad():
        expected = -(targets * task.model.logits(pixels, kept).log_softmax(1)).sum(1).mean()
    ((_, images, loss),) = made(job, folder, tmp_path).series["train"].rows
    assert images == 8 and loss == pytest.approx(float(expected), abs=2e-6)


def test_accuracy_is_the_share_of_right_classes_with_its_binomial_error_and_the_saved_model_has_it(folder, tmp_path):
    job = image_job(**PLAIN, **WHOLE, steps=60, eval_every=30, peak_lr=5e-3, global_batch=32, hidden_size=24)
    (tmp_path / "model").mkdir()
    result = made(job, folder, tmp_path / "work", model=tmp_path / "model")
    model, shards = load_model(tmp_path / "model", "image"), ImageShards(prepared(job, folder), "validation", 1)
    pixels = torch.from_numpy(np.stack([evaluation_pixels(shards.image(n), job) for n in range(len(shards))]))
    with torch.no_grad():
        logits = model(pixels).logits
    right = (logits.argmax(1).numpy() == shards.labels).mean()
    assert 0.2 < right < 1, "it learned something, and can still be wrong"
    assert result.metrics["accuracy"] == pytest.approx(right)
    assert result.standard_errors == {"accuracy": pytest.approx(math.sqrt(right * (1 - right) / 500))}
    loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(shards.labels))
    assert result.metrics["loss_validation"] == pytest.approx(float(loss), rel=1e-5)
    assert model.config.id2label == {n: str(n) for n in range(10)}
    assert load_model(tmp_path / "model", "own").num_parameters() == result.metrics["parameters"]
    rows = result.series["eval"].rows
    assert [row[:2] for row in rows] == [[30, 960], [60, 1920]] and rows[-1][2] == result.metrics["accuracy"]
    assert result.metrics["epochs"] == pytest.approx(60 * 32 / 1297)


def test_what_is_left_out_stands_beside_the_number_and_nothing_does_for_the_whole_recipe(folder, tmp_path):
    part = image_job(rand_augment=None, flip=0.0, steps=1, eval_every=1)
    assert made(part, folder, tmp_path / "a").labels == ["trained without mirroring, RandAugment"]
    assert made(image_job(steps=1, eval_every=1), folder, tmp_path / "b").labels == []


def test_a_loss_that_is_no_number_ends_the_run_without_an_accuracy(folder, tmp_path):
    job = image_job(peak_lr=1e30, warmup_fraction=0.0, steps=20, grad_clip=0.0)
    result = made(job, folder, tmp_path)
    assert result.outcome == "not_finite" and result.metrics["updates"] < 20
    assert result.metrics["accuracy"] is None and result.standard_errors == {}


@pytest.mark.parametrize("numerics", ["pure_bf16", "fp32_master"])
def test_bfloat16_trains_close_to_float32(folder, tmp_path, numerics):
    results = [
        made(image_job(**PLAIN, steps=8, numerics=n, peak_lr=1e-3), folder, tmp_path / n) for n in ("fp32", numerics)
    ]
    losses = [result.series["train"].column("loss") for result in results]
    assert results[1].outcome == "trained" and losses[0] != losses[1]
    assert np.allclose(*losses, rtol=0.05)


def test_operations_are_six_a_matrix_weight_and_token_and_attention_over_all_tokens():
    """DeiT-Tiny and -Small do 1.3 and 4.6 billion multiply-adds an image (DeiT, Table 5, has them as FLOPs): six
    operations each when trained."""
    for shape, published in (((192, 768), 1.3e9), ((384, 1536), 4.6e9)):
        assert flops_per_image(*shape, 12, 197, 768, 1000) / 6 == pytest.approx(published, rel=0.04)


# -- bad input --


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": "ViT-Tyni"}, "unknown size of an image classifier 'ViT-Tyni'; did you mean 'ViT-Tiny'"),
        ({"size": "71M"}, "unknown size of an image classifier '71M'"),
        ({"n_heads": 3}, "hidden_size 16 does not split into 3 heads"),
        ({"patch_size": 3}, "image_size 8 does not split into patches of 3 pixels"),
        ({"pixel_mean": (0.5, 0.5)}, r"pixel_mean and pixel_std: give both one number \(grey\) or three"),
        ({"pixel_std": (0.0,)}, "greater than 0"),
        ({"classes": 100}, "classes is 100, and bundled:digits has 10: set classes to 10"),
        ({"global_batch": 7}, "mix pairs: global_batch and mix_group have to be even"),
        ({"crop_area": (0.9, 0.1)}, "is no range: write two positive numbers, the smaller one first"),
        ({"rand_augment": (11, 0.5)}, "less than or equal to 10"),
        ({"dataset": "bundled:digit"}, "unknown dataset 'digit'; did you mean 'digits'"),
        ({"dataset": "bundled:c4_sample"}, "is a text, no set of images"),
        ({"norm": {"name": "mix_ln", "post_layers": 40}}, "mix_ln"),
        ({"norm": {"name": "mixln"}}, "unknown norm method 'mixln'; did you mean 'mix_ln'"),
        ({"optimizer": "adam"}, "adamw"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_with_the_fix(change, message):
    with pytest.raises(ValidationError, match=message):
        image_job(**change)


@pytest.mark.parametrize(
    ("micro_batch", "message"),
    [(3, "an even divisor of 8"), (1, "an even divisor of 8"), (16, "an even divisor of 8")],
)
def test_a_micro_batch_that_would_part_a_pair_is_refused(folder, micro_batch, message):
    with pytest.raises(DataError, match=f"micro_batch {micro_batch} must be {message}"):
        task_of(image_job(), folder, micro_batch)
    assert task_of(image_job(mixup=0.0, cutmix=0.0), folder, 1).micro_batch == 1


def test_processes_that_a_batch_does_not_split_over_are_refused(folder):
    with pytest.raises(DataError, match="global_batch 8 does not split over 3 processes"):
        task_of(image_job(), folder, world=World(0, 3, torch.device("cpu")))
    with pytest.raises(DataError, match="1 images a process: mixup and cutmix mix pairs"):
        task_of(image_job(), folder, world=World(0, 8, torch.device("cpu")))


def test_images_prepared_for_other_settings_are_refused(folder):
    with pytest.raises(DataError, match="prepared for other settings; run the data rule again"):
        Classifying(image_job(train_images=16), prepared(image_job(), folder), 0, ALONE)


def test_a_model_folder_with_weights_missing_is_refused(folder, tmp_path):
    (tmp_path / "model").mkdir()
    job = image_job(steps=1, eval_every=1, norm={"name": "mix_ln", "post_layers": 3})
    made(job, folder, tmp_path / "work", model=tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(json.dumps(config | {"num_hidden_layers": 13}))
    with pytest.raises(JobError, match=r"weights do not fit the model: layers\.12"):
        load_model(tmp_path / "model", "image")


def test_every_setting_but_the_sets_and_the_only_optimizer_changes_the_name():
    changes = {
        "size": "ViT-Tiny", "hidden_size": 32, "intermediate_size": 48, "n_heads": 4, "n_layers": 8, "patch_size": 2,
        "norm": {"name": "pre_ln"}, "layer_norm_eps": 1e-5, "initializer_range": 0.01, "train_images": 16,
        "validation_images": 8, "image_size": 16, "pixel_mean": (0.5,), "pixel_std": (0.5,), "crop_area": (0.5, 1),
        "crop_ratio": (1, 1), "flip": 0.1, "rand_augment": (5, 0.5), "erasing": 0.1, "mixup": 0.5, "cutmix": 0.5,
        "mix_group": 2, "label_smoothing": 0.2, "stochastic_depth": 0.2, "eval_crop": 1.0, "adam_betas": (0.9, 0.95),
        "adam_eps": 1e-6, "weight_decay": 0.1, "grad_clip": 1.0, "peak_lr": 1e-3, "warmup_fraction": 0.1,
        "final_lr_fraction": 0.1, "steps": 5, "global_batch": 16, "numerics": "fp32_master", "seed": 1, "eval_every": 3,
    }  # fmt: skip
    assert set(changes) | {"dataset", "classes", "optimizer"} == set(type(image_job()).model_fields)
    names = {image_job(**{key: value}).job_id for key, value in changes.items()}
    assert len(names | {image_job().job_id}) == len(changes) + 1


def test_training_pixels_and_targets_come_from_the_functions_that_are_tested_alone(folder):
    """Ties the task to paperlm.train.augment: no draw, no smoothing, and nothing else in between."""
    job = image_job(**{**PLAIN, "label_smoothing": 0.2})
    task = task_of(job, folder)
    ((pixels, targets),) = parts(task, 1)
    numbers = task.order.indices(1)
    images = [training_pixels(task.images.image(int(n)), job, np.random.default_rng(0)) for n in numbers]
    assert np.array_equal(pixels.numpy(), np.stack(images))
    assert torch.equal(targets, smoothed(torch.from_numpy(task.images.labels[numbers]), 10, 0.2))
    assert len(list(itertools.chain(*targets.tolist()))) == 80


def test_the_table_prints_percents_with_their_error_beside_the_print_and_its_curves_count_images(tmp_path):
    """Table 4 at the smoke scale, made: cells, labels, claims and curves come from the four records."""
    project = Project({"scale": "smoke"})
    maker = Maker(Places(tmp_path, "smoke"), QUIET)
    files = {job: tmp_path / maker.places.made(job) for job in project.jobs_of("mixln_table4")}
    for job in files:
        maker.with_parents(job)
    contents = table_contents(project, "mixln_table4", files.values())
    assert [row.published for row in contents.diff] == ["67.30", "75.99", "67.34", "76.40"]
    for row in contents.diff:
        (job,) = (job for job in files if job.job_id == row.jobs)
        record = read_record(files[job])
        assert float(row.regenerated) == pytest.approx(100 * record.metrics["accuracy"], abs=0.005)
        error = 100 * record.standard_errors["accuracy"]
        assert row.spread == f"standard error {error:.2g}" if error else not row.spread
        assert row.verdict == "not comparable at this scale" and record.data[0].dataset == "digits"
    draw_curves(project, "mixln_table4", files.values(), tmp_path / "curves.svg")
    rows = list(csv.DictReader((tmp_path / "curves.csv").read_text().splitlines()))
    assert {row["images"] for row in rows} == {"8", "16", "24", "32"} and len(rows) == 4 * (4 + 2)
    text = (tmp_path / "curves.svg").read_text()
    assert "training images" in text and "unigram plateau" not in text


def test_at_paper_scale_the_recipe_is_the_specified_one():
    """Section 7 of the specification of the normalization papers, and 120 epochs of ImageNet's 1,281,167 images."""
    jobs = Project({"scale": "paper"}).jobs_of("mixln_table4")
    assert [(j.size, j.norm["name"], j.stochastic_depth) for j in jobs] == [
        ("ViT-Tiny", "pre_ln", 0.0), ("ViT-Small", "pre_ln", 0.1),
        ("ViT-Tiny", "mix_ln", 0.0), ("ViT-Small", "mix_ln", 0.1),
    ]  # fmt: skip
    for job in jobs:
        assert job.left_out() == [] and job.method().wiring(3, job.shape()).out == (job.norm["name"] == "mix_ln")
        assert not job.method().wiring(4, job.shape()).out, "three of twelve blocks are Post-LN"
        assert (job.image_size, job.patch_size, job.n_layers, job.layer_norm_eps) == (224, 16, 12, 1e-6)
        assert (job.peak_lr, job.global_batch, job.weight_decay, job.adam_betas) == (4e-3, 4096, 0.05, (0.9, 0.999))
        assert (job.mixup, job.cutmix, job.rand_augment) == (0.8, 1.0, (9, 0.5))
        assert (job.erasing, job.label_smoothing) == (0.25, 0.1)
        assert job.steps * job.global_batch / 1_281_167 == pytest.approx(120, abs=0.01)
        assert job.warmup_steps * job.global_batch / 1_281_167 == pytest.approx(20, abs=0.01)
