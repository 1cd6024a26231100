"""Augmentations of images for classification, each a function of a random generator: the same draw, the same image.

They follow timm's, which ConvNeXt's recipe names (arXiv 2201.03545, Table 5), with Pillow and NumPy alone.
Probabilities and ranges that are no settings are timm's defaults.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

if TYPE_CHECKING:
    from paperlm.jobs.image_classification import ImageClassification

Box = tuple[float, float, float, float]
"left, upper, right, lower"
Range = tuple[float, float]

ATTEMPTS = 10
"Draws of a rectangle that may not fit."


def random_box(size: tuple[int, int], area: Range, ratio: Range, rng: np.random.Generator) -> Box:
    """A box within an image of `size` (width, height): a share of its area, width over height log-uniform in `ratio`.

    Where no draw fits, the largest central box with an allowed ratio.
    """
    width, height = size
    for _ in range(ATTEMPTS):
        pixels = rng.uniform(*area) * width * height
        shape = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(pixels * shape)), round(math.sqrt(pixels / shape))
        if 0 < w <= width and 0 < h <= height:
            left, upper = rng.integers(0, width - w + 1), rng.integers(0, height - h + 1)
            return int(left), int(upper), int(left) + w, int(upper) + h
    shape = min(max(width / height, ratio[0]), ratio[1])
    w, h = (width, round(width / shape)) if width / height < shape else (round(height * shape), height)
    left, upper = (width - w) // 2, (height - h) // 2
    return left, upper, left + w, upper + h


def central_box(size: tuple[int, int], share: float) -> Box:
    """The square in the middle of an image whose side is a share of the shorter one."""
    side, (width, height) = share * min(size), size
    left, upper = (width - side) / 2, (height - side) / 2
    return left, upper, left + side, upper + side


# -- RandAugment --

LAYERS, PROBABILITY, LARGEST = 2, 0.5, 10.0
"Operations an image, the probability that each is applied, the largest magnitude."


def _affine(image: Image.Image, matrix: tuple[float, ...], fill: tuple[int, ...]) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BICUBIC, fillcolor=_fill(fill))


def _fill(fill: tuple[int, ...]) -> int | tuple[int, ...]:
    return fill[0] if len(fill) == 1 else fill


def _enhanced(kind: Callable[[Image.Image], ImageEnhance._Enhance]) -> Callable:
    return lambda image, level, sign, fill: kind(image).enhance(max(0.1, 1 + sign * 0.9 * level))


def _solarize_add(image: Image.Image, level: float) -> Image.Image:
    add = min(128, int(level * 110))
    return image.point(
        [min(255, value + add) if value < 128 else value for value in range(256)] * len(image.getbands())
    )


# Each is called with the image, its level from 0 to 1, a sign drawn for those that have a direction, and the colour of
# what comes in from outside.
OPERATIONS: dict[str, Callable[[Image.Image, float, int, tuple[int, ...]], Image.Image]] = {
    "auto_contrast": lambda image, level, sign, fill: ImageOps.autocontrast(image),
    "equalize": lambda image, level, sign, fill: ImageOps.equalize(image),
    "invert": lambda image, level, sign, fill: ImageOps.invert(image),
    "rotate": lambda image, level, sign, fill: image.rotate(
        sign * 30 * level, Image.Resampling.BICUBIC, fillcolor=_fill(fill)
    ),
    "posterize": lambda image, level, sign, fill: ImageOps.posterize(image, max(1, 4 - int(level * 4))),
    "solarize": lambda image, level, sign, fill: ImageOps.solarize(image, 256 - min(256, int(level * 256))),
    "solarize_add": lambda image, level, sign, fill: _solarize_add(image, level),
    "color": _enhanced(ImageEnhance.Color),
    "contrast": _enhanced(ImageEnhance.Contrast),
    "brightness": _enhanced(ImageEnhance.Brightness),
    "sharpness": _enhanced(ImageEnhance.Sharpness),
    "shear_x": lambda image, level, sign, fill: _affine(image, (1, sign * 0.3 * level, 0, 0, 1, 0), fill),
    "shear_y": lambda image, level, sign, fill: _affine(image, (1, 0, 0, sign * 0.3 * level, 1, 0), fill),
    "translate_x": lambda image, level, sign, fill: _affine(
        image, (1, 0, sign * 0.45 * level * image.width, 0, 1, 0), fill
    ),
    "translate_y": lambda image, level, sign, fill: _affine(
        image, (1, 0, 0, 0, 1, sign * 0.45 * level * image.height), fill
    ),
}
"timm's `rand-m...-inc1`: every operation is stronger at a larger level."


def rand_augment(
    image: Image.Image, magnitude: float, deviation: float, fill: tuple[int, ...], rng: np.random.Generator
) -> Image.Image:
    """Two operations drawn with replacement, each applied with probability 1/2 at a normal magnitude within 0 to 10."""
    names = list(OPERATIONS)
    for _ in range(LAYERS):
        name, applied, sign = names[rng.integers(len(names))], rng.random() < PROBABILITY, int(rng.choice((-1, 1)))
        level = min(max(rng.normal(magnitude, deviation), 0.0), LARGEST) / LARGEST
        if applied:
            image = OPERATIONS[name](image, level, sign, fill)
    return image


# -- one image --


def training_pixels(image: Image.Image, job: ImageClassification, rng: np.random.Generator) -> np.ndarray:
    """The augmented and scaled image, (C, I, I) float32."""
    box = random_box(image.size, job.crop_area, job.crop_ratio, rng)
    image = image.resize((job.image_size, job.image_size), Image.Resampling.BICUBIC, box)
    if rng.random() < job.flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    if job.rand_augment:
        fill = tuple(min(255, round(255 * value)) for value in job.pixel_mean)
        image = rand_augment(image, *job.rand_augment, fill, rng)
    pixels = scaled(image, job)
    if rng.random() < job.erasing:
        erase(pixels, rng)
    return pixels


def evaluation_pixels(image: Image.Image, job: ImageClassification) -> np.ndarray:
    """The central square, scaled, (C, I, I) float32."""
    box = central_box(image.size, job.eval_crop)
    return scaled(image.resize((job.image_size, job.image_size), Image.Resampling.BICUBIC, box), job)


def scaled(image: Image.Image, job: ImageClassification) -> np.ndarray:
    """(C, I, I) float32: values over 255, less their mean, over their deviation."""
    values = np.asarray(image, dtype=np.float32).reshape(job.image_size, job.image_size, job.channels) / 255
    mean, deviation = (np.array(value, dtype=np.float32) for value in (job.pixel_mean, job.pixel_std))
    return np.ascontiguousarray(((values - mean) / deviation).transpose(2, 0, 1))


def erase(pixels: np.ndarray, rng: np.random.Generator) -> None:
    """A rectangle of 2 to 33 % of the image (C, I, I) becomes normal noise, in place; nothing where no draw fits."""
    _, height, width = pixels.shape
    for _ in range(ATTEMPTS):
        area, shape = rng.uniform(0.02, 1 / 3) * height * width, math.exp(rng.uniform(math.log(0.3), -math.log(0.3)))
        h, w = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < h < height and 0 < w < width:
            top, left = rng.integers(0, height - h + 1), rng.integers(0, width - w + 1)
            noise = rng.standard_normal((len(pixels), h, w), dtype=np.float32)
            pixels[:, top : top + h, left : left + w] = noise
            return


def kept_branches(n_layers: int, rate: float, rng: np.random.Generator) -> np.ndarray:
    """(L, 2) float32: 0 where a branch is left out, 1 / (probability that it is kept) elsewhere."""
    probability = 1 - rate * np.arange(n_layers) / max(1, n_layers - 1)
    return ((rng.random((n_layers, 2)) < probability[:, None]) / probability[:, None]).astype(np.float32)


# -- pairs of images --


def mixing(job: ImageClassification, rng: np.random.Generator) -> tuple[np.ndarray, float]:
    """How a group of images is mixed with their partners: the weight of the own pixel (1, I, I), and of the own label.

    mixup: one weight, drawn from Beta(a, a). CutMix: 0 within a box whose area is 1 less a weight so drawn, about a
    uniform centre and cut at the edge; the label's weight is the share that is left.
    """
    size = job.image_size
    own = np.ones((1, size, size), dtype=np.float32)
    if not job.mixes:
        return own, 1.0
    cut = job.cutmix > 0 and (job.mixup == 0 or rng.random() < 0.5)
    weight = rng.beta(job.cutmix, job.cutmix) if cut else rng.beta(job.mixup, job.mixup)
    if not cut:
        return own * np.float32(weight), float(weight)
    side = round(size * math.sqrt(1 - weight))
    starts = rng.integers(size, size=2) - side // 2
    top, bottom, left, right = (int(np.clip(start + d, 0, size)) for start in starts for d in (0, side))
    own[:, top:bottom, left:right] = 0
    return own, 1 - (bottom - top) * (right - left) / size**2


def mixed(values: Tensor, own: Tensor) -> Tensor:
    """own * values + (1 - own) * partner's, partners being neighbours: 0 and 1, 2 and 3. values: (B, ...), B even."""
    partners = values.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)
    return own * values + (1 - own) * partners


def smoothed(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """(B, classes) float32: 1 - s on the label, s spread over all classes. labels: (B,)."""
    targets = torch.full((len(labels), classes), smoothing / classes, device=labels.device)
    return targets.scatter_add_(1, labels[:, None], torch.full_like(targets[:, :1], 1 - smoothing))
