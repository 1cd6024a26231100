"""Augmentations: each does what its name says, on images where that can be computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image
from support_images import image_job

from paperlm.train.augment import (
    OPERATIONS,
    central_box,
    erase,
    evaluation_pixels,
    kept_branches,
    mixed,
    mixing,
    rand_augment,
    random_box,
    smoothed,
    training_pixels,
)

GREY, COLOUR = (128,), (10, 20, 30)
FULL = {"crop_area": (1, 1), "crop_ratio": (1, 1)}


def rng(seed=0):
    return np.random.default_rng(seed)


def picture(size=(8, 8), channels=1, seed=0):
    shape = (size[1], size[0], channels) if channels > 1 else (size[1], size[0])
    return Image.fromarray(rng(seed).integers(0, 256, shape, dtype=np.uint8))


# -- one image --


@pytest.mark.parametrize("size", [(64, 64), (200, 50), (50, 200), (7, 5)])
def test_a_random_crop_lies_within_the_image_with_the_asked_area_and_ratio(size):
    boxes = [random_box(size, (0.08, 1.0), (3 / 4, 4 / 3), rng(seed)) for seed in range(300)]
    for left, upper, right, lower in boxes:
        assert 0 <= left < right <= size[0] and 0 <= upper < lower <= size[1]
    if size == (64, 64):
        areas = [(r - x) * (b - y) / 64**2 for x, y, r, b in boxes]
        ratios = [(r - x) / (b - y) for x, y, r, b in boxes]
        assert 0.06 < min(areas) < 0.15 and max(areas) > 0.85
        assert abs(np.mean(areas) - 0.52) < 0.06, "uniform but for draws that do not fit"
        assert 0.7 < min(ratios) < 0.8 and 1.25 < max(ratios) < 1.45
        assert len({box[:2] for box in boxes}) > 100


def test_an_image_too_narrow_for_any_ratio_is_cut_in_the_middle():
    assert random_box((100, 10), (1.0, 1.0), (3 / 4, 4 / 3), rng()) == (43, 0, 56, 10)
    assert random_box((10, 100), (1.0, 1.0), (3 / 4, 4 / 3), rng()) == (0, 43, 10, 56)


def test_without_augmentation_training_and_evaluation_see_the_same_scaled_pixels():
    job = image_job(**FULL, flip=0.0, rand_augment=None, erasing=0.0, eval_crop=1.0)
    image = picture()
    expected = (np.asarray(image, dtype=np.float64)[None] / 255 - 0.305) / 0.376
    for pixels in (training_pixels(image, job, rng()), evaluation_pixels(image, job)):
        assert pixels.dtype == np.float32 and np.allclose(pixels, expected, atol=1e-6)


def test_each_channel_of_a_colour_image_has_its_own_scale():
    job = image_job(
        dataset="local:cifar10_6000", pixel_mean=(0.1, 0.2, 0.3), pixel_std=(1.0, 2.0, 4.0), eval_crop=1.0, erasing=0.0
    )
    flat = Image.fromarray(np.full((8, 8, 3), (51, 102, 204), dtype=np.uint8))
    expected = [(0.2 - 0.1) / 1, (0.4 - 0.2) / 2, (0.8 - 0.3) / 4]
    assert np.allclose(evaluation_pixels(flat, job), np.array(expected)[:, None, None], atol=1e-6)


def test_evaluation_takes_the_central_square_of_the_shorter_side():
    assert central_box((500, 400), 0.875) == (75.0, 25.0, 425.0, 375.0)
    wide = np.zeros((8, 24), dtype=np.uint8)
    wide[:, 8:16] = np.asarray(picture())
    pixels = evaluation_pixels(Image.fromarray(wide), image_job(eval_crop=1.0, erasing=0.0))
    assert np.allclose(pixels, evaluation_pixels(picture(), image_job(eval_crop=1.0, erasing=0.0)))


def test_an_image_is_mirrored_with_the_asked_probability():
    job = image_job(**FULL, flip=0.3, rand_augment=None, erasing=0.0)
    plain = evaluation_pixels(picture(), image_job(eval_crop=1.0))
    seen = [training_pixels(picture(), job, rng(seed)) for seed in range(1000)]
    mirrored = [np.array_equal(pixels, plain[:, :, ::-1]) for pixels in seen]
    assert all(flipped or np.array_equal(pixels, plain) for flipped, pixels in zip(mirrored, seen, strict=True))
    assert abs(sum(mirrored) / 1000 - 0.3) < 4 * math.sqrt(0.21 / 1000)


def test_erasing_turns_a_rectangle_of_2_to_33_percent_into_normal_noise():
    areas, noise = [], []
    for seed in range(400):
        pixels = np.full((3, 40, 40), 9.0, dtype=np.float32)
        erase(pixels, rng(seed))
        changed = (pixels != 9).all(0)
        rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
        assert changed[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all(), "a rectangle"
        assert changed.sum() == len(rows) * len(columns)
        areas.append(changed.mean())
        noise.append(pixels[:, changed].ravel())
    values = np.concatenate(noise)
    assert min(areas) > 0.015 and max(areas) < 0.35 and max(areas) > 0.28
    assert abs(values.mean()) < 0.01 and abs(values.std() - 1) < 0.01


@pytest.mark.parametrize("probability", [0.0, 0.25, 1.0])
def test_erasing_happens_with_the_asked_probability(probability):
    job = image_job(**FULL, flip=0.0, rand_augment=None, erasing=probability)
    plain = evaluation_pixels(picture(), image_job(eval_crop=1.0))
    erased = [not np.array_equal(training_pixels(picture(), job, rng(seed)), plain) for seed in range(400)]
    assert abs(np.mean(erased) - probability) < 4 * math.sqrt(0.25 / 400) * (0 < probability < 1) + 1e-9


# -- RandAugment: operations on pictures whose result is known --


def applied(name, pixels, level, sign=1, fill=GREY):
    return np.asarray(OPERATIONS[name](Image.fromarray(np.array(pixels, dtype=np.uint8)), level, sign, fill))


RAMP = np.arange(256).reshape(16, 16)


@pytest.mark.parametrize(
    ("name", "level", "expected"),
    [
        ("invert", 0.5, 255 - RAMP),
        ("posterize", 0.0, RAMP & 0b11110000),
        ("posterize", 0.9, RAMP & 0b10000000),
        ("solarize", 0.0, RAMP),
        ("solarize", 0.5, np.where(RAMP < 128, RAMP, 255 - RAMP)),
        ("solarize", 1.0, 255 - RAMP),
        ("solarize_add", 1.0, np.where(RAMP < 128, RAMP + 110, RAMP)),
        ("brightness", 0.0, RAMP),
        ("contrast", 0.0, RAMP),
        ("sharpness", 0.0, RAMP),
        ("color", 0.9, RAMP),
        ("rotate", 0.0, RAMP),
        ("shear_x", 0.0, RAMP),
        ("equalize", 0.3, RAMP),
        ("auto_contrast", 0.3, RAMP),
    ],
)
def test_an_operation_on_grey_levels_has_its_definitions_result(name, level, expected):
    assert np.array_equal(applied(name, RAMP, level), expected)


def test_brightness_scales_values_by_one_plus_or_minus_nine_tenths_of_the_level():
    flat = np.full((4, 4), 100)
    assert np.array_equal(applied("brightness", flat, 0.5, 1), np.full((4, 4), 145))
    assert np.array_equal(applied("brightness", flat, 0.5, -1), np.full((4, 4), 55))
    assert np.array_equal(applied("brightness", flat, 1.0, -1), np.full((4, 4), 10)), "not below a tenth"


def test_movements_go_where_the_sign_says_and_fill_with_the_mean_colour():
    pixels = np.zeros((20, 20, 3), dtype=np.uint8)
    pixels[:, :10] = 200
    moved = applied("translate_x", pixels, 1.0, 1, COLOUR)  # 9 of 20 columns come in from the right
    assert (moved[:, 0] == 200).all() and (moved[:, 2:10] == 0).all() and (moved[:, 12:] == COLOUR).all()
    moved = applied("translate_x", pixels, 1.0, -1, COLOUR)
    assert (moved[:, :8] == COLOUR).all() and (moved[:, 11:17] == 200).all()
    turned = applied("translate_y", pixels.transpose(1, 0, 2), 1.0, 1, COLOUR)
    assert (turned[0] == 200).all() and (turned[12:] == COLOUR).all()
    sheared = applied("shear_y", pixels, 1.0, 1, COLOUR)  # y' = y + 0.3 x
    assert (sheared[-1, 4:] == COLOUR).all() and (sheared[0, :10] == 200).all()


def test_rotation_by_30_degrees_turns_a_bar_by_30_degrees_either_way():
    pixels = np.zeros((41, 41), dtype=np.uint8)
    pixels[20, :] = 255
    for sign in (1, -1):
        y, x = np.nonzero(applied("rotate", pixels, 1.0, sign, (0,)) > 80)
        slope = np.polyfit(x - 20, 20 - y, 1)[0]
        assert slope == pytest.approx(sign * math.tan(math.radians(30)), rel=0.05)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_keeps_size_and_mode_at_any_level(name, channels):
    image = picture((9, 7), channels)
    for level in (0.0, 0.37, 0.9, 1.0):
        for sign in (1, -1):
            found = OPERATIONS[name](image, level, sign, GREY if channels == 1 else COLOUR)
            assert (found.size, found.mode) == (image.size, image.mode)


def test_rand_augment_applies_none_one_or_two_operations_and_the_same_draw_gives_the_same_image():
    image = picture((16, 16), 3)
    found = [np.asarray(rand_augment(image, 9, 0.5, COLOUR, rng(seed))) for seed in range(400)]
    again = [np.asarray(rand_augment(image, 9, 0.5, COLOUR, rng(seed))) for seed in range(400)]
    assert all(np.array_equal(a, b) for a, b in zip(found, again, strict=True))
    untouched = np.mean([np.array_equal(pixels, np.asarray(image)) for pixels in found])
    assert 0.2 < untouched < 0.4, "a quarter, and operations that change nothing here"


def test_the_magnitude_is_normal_about_the_asked_one_and_stays_within_0_and_10(monkeypatch):
    levels = []
    monkeypatch.setattr("paperlm.train.augment.OPERATIONS", {"note": lambda i, level, *_: levels.append(level) or i})
    for seed in range(3000):
        rand_augment(picture(), 9, 0.5, GREY, rng(seed))
    assert abs(len(levels) - 3000) < 4 * math.sqrt(6000 / 4)
    assert max(levels) == 1.0 and min(levels) > 0.7
    assert np.median(levels) == pytest.approx(0.9, abs=0.005)
    assert np.mean(np.array(levels) < 0.85) == pytest.approx(0.159, abs=0.025), "one deviation below the mean"


# -- pairs --


def test_mixed_values_are_weighted_sums_of_neighbours():
    values = torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    own = torch.tensor([[1.0], [0.25], [0.5], [0.0]])
    assert mixed(values, own).squeeze(1).tolist() == [1.0, 0.25 * 10 + 0.75 * 1, 550.0, 100.0]


def test_mixup_weighs_all_pixels_and_the_label_alike_with_a_beta_draw():
    job = image_job(mixup=0.8, cutmix=0.0)
    weights = []
    for seed in range(4000):
        own, weight = mixing(job, rng(seed))
        assert own.shape == (1, 8, 8) and (own == np.float32(weight)).all()
        weights.append(weight)
    # Beta(0.8, 0.8): mean 1/2, variance 1 / (4 * (2 * 0.8 + 1))
    assert np.mean(weights) == pytest.approx(0.5, abs=0.02)
    assert np.var(weights) == pytest.approx(1 / 10.4, rel=0.05)


def test_cutmix_takes_a_box_of_the_partner_and_the_label_has_its_area():
    job, weights = image_job(mixup=0.0, cutmix=1.0), []
    for seed in range(2000):
        own, weight = mixing(job, rng(seed))
        assert set(np.unique(own)) <= {0.0, 1.0} and own.mean() == pytest.approx(weight)
        rows, columns = np.nonzero((own[0] == 0).any(1))[0], np.nonzero((own[0] == 0).any(0))[0]
        assert (own == 0).sum() == len(rows) * len(columns), "one box"
        weights.append(weight)
    assert min(weights) < 0.1 and max(weights) == 1.0


def test_with_both_each_group_takes_one_of_them_half_of_the_time_and_with_neither_nothing_is_mixed():
    job = image_job()
    both = [np.isin(mixing(job, rng(seed))[0], (0.0, 1.0)).all() for seed in range(1000)]
    assert abs(np.mean(both) - 0.5) < 0.065
    own, weight = mixing(image_job(mixup=0.0, cutmix=0.0), rng())
    assert (own == 1).all() and weight == 1.0


def test_smoothed_labels_are_probabilities_with_the_rest_spread_over_all_classes():
    targets = smoothed(torch.tensor([2, 0]), 4, 0.1)
    expected = torch.tensor([[0.025, 0.025, 0.925, 0.025], [0.925, 0.025, 0.025, 0.025]])
    torch.testing.assert_close(targets, expected)
    assert smoothed(torch.tensor([1]), 3, 0.0).tolist() == [[0, 1, 0]]


def test_stochastic_depth_leaves_out_later_branches_more_often_and_keeps_the_mean():
    draws = np.stack([kept_branches(5, 0.4, rng(seed)) for seed in range(20_000)])
    dropped = (draws == 0).mean(0)
    assert np.allclose(dropped, np.array([0.0, 0.1, 0.2, 0.3, 0.4])[:, None], atol=0.015)
    assert np.allclose(draws.mean(0), 1, atol=0.02)
    assert (kept_branches(5, 0.0, rng()) == 1).all() and (kept_branches(1, 0.4, rng()) == 1).all()
