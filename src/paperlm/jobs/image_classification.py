"""Training of one image classifier from random weights: `paperlm.train.image_classification` on the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from paperlm.data.registry import DatasetName
from paperlm.data.settings import DataSettings, ImageData
from paperlm.errors import SpecError, unknown
from paperlm.jobs.base import Beta, Inputs, Job, Machine, Norm, Seed
from paperlm.jobs.pretrain import method_slug
from paperlm.models.sizes import VIT_SIZES, bytes_in_training, flops_per_image
from paperlm.norms import ModelShape, NormMethod, build_method

if TYPE_CHECKING:
    from paperlm.result import Result

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]

AUGMENTATIONS = {
    "flip": "mirroring",
    "rand_augment": "RandAugment",
    "erasing": "random erasing",
    "mixup": "mixup",
    "cutmix": "CutMix",
    "label_smoothing": "label smoothing",
}
"Setting that is 0 or null where it is left out -> its name."


class ImageClassification(Job):
    """One training run of a vision transformer, and its accuracy on the validation images."""

    kind: ClassVar[str] = "image_classification"
    summary: ClassVar[str] = "train one vision transformer from random weights"
    leaves_model: ClassVar[bool] = True
    distributed: ClassVar[bool] = True
    has_curve: ClassVar[bool] = True

    size: str
    "name of the model size in the paper; at small scales the shape below is not that size's"
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    n_heads: int = Field(gt=0)
    n_layers: int = Field(gt=0)
    patch_size: int = Field(gt=0)
    "pixels a side"
    norm: Norm
    layer_norm_eps: float = Field(gt=0)
    initializer_range: float = Field(gt=0)

    dataset: DatasetName
    classes: int = Field(gt=1)
    train_images: int | None = Field(gt=0)
    "at most so many of the first; null: all"
    validation_images: int | None = Field(gt=0)
    "at most so many of the first; null: all"
    image_size: int = Field(gt=0)
    "pixels a side that the model sees"
    pixel_mean: tuple[float, ...]
    "of each channel, in units of the brightest value; one is grey, three are colours"
    pixel_std: tuple[Positive, ...]

    crop_area: tuple[Share, Share]
    "share of the image that a random crop keeps, from and to; (1, 1) with crop_ratio (1, 1): a square image is not cut"
    crop_ratio: tuple[Positive, Positive]
    "width over height of a random crop, from and to"
    flip: Share
    "probability that an image is mirrored"
    rand_augment: tuple[Annotated[float, Field(ge=0, le=10)], Annotated[float, Field(ge=0)]] | None
    "magnitude of RandAugment, of 10, and its standard deviation; null: none"
    erasing: Share
    "probability that a rectangle of an image becomes noise"
    mixup: float = Field(ge=0)
    "parameter of mixup's beta distribution; 0: none"
    cutmix: float = Field(ge=0)
    "parameter of CutMix's beta distribution; 0: none. With both, each group takes one of them with probability 1/2"
    mix_group: int = Field(gt=1)
    "so many images of a batch share one draw of mixup or CutMix (the authors' batch of one process)"
    label_smoothing: float = Field(ge=0, lt=1)
    stochastic_depth: float = Field(ge=0, lt=1)
    "probability that a branch of the last block is left out in training; it grows linearly from 0 in the first"
    eval_crop: float = Field(gt=0, le=1)
    "side of the central square that is evaluated over the image's shorter side"

    optimizer: Literal["adamw"]
    adam_betas: tuple[Beta, Beta]
    adam_eps: float = Field(gt=0)
    weight_decay: float = Field(ge=0)
    "of matrices and patches; biases, norms, class token and positions have none"
    grad_clip: float = Field(ge=0)
    "0 means none"
    peak_lr: float = Field(gt=0)
    warmup_fraction: float = Field(ge=0, lt=1)
    final_lr_fraction: float = Field(ge=0, le=1)
    steps: int = Field(gt=0)
    global_batch: int = Field(gt=0)
    "images per update"
    numerics: Literal["pure_bf16", "fp32_master", "fp32"]
    seed: Seed
    eval_every: int = Field(gt=0)

    @field_validator("size")
    @classmethod
    def size_is_a_classifiers(cls, value: str) -> str:
        """The sizes of language models have feed-forward networks of three matrices."""
        if value not in VIT_SIZES:
            raise ValueError(unknown("size of an image classifier", value, VIT_SIZES))
        return value

    @field_validator("crop_area", "crop_ratio")
    @classmethod
    def from_to(cls, value: tuple[float, float]) -> tuple[float, float]:
        """A range."""
        if not 0 < value[0] <= value[1]:
            raise ValueError(f"{list(value)} is no range: write two positive numbers, the smaller one first")
        return value

    @model_validator(mode="after")
    def fits_together(self) -> ImageClassification:
        if self.hidden_size % self.n_heads:
            raise ValueError(f"hidden_size {self.hidden_size} does not split into {self.n_heads} heads")
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size {self.image_size} does not split into patches of {self.patch_size} pixels")
        if self.channels not in (1, 3) or len(self.pixel_std) != self.channels:
            raise ValueError("pixel_mean and pixel_std: give both one number (grey) or three (colours)")
        if (found := self.image_data().classes) != self.classes:
            raise ValueError(f"classes is {self.classes}, and {self.dataset} has {found}: set classes to {found}")
        if self.mixes and (self.global_batch % 2 or self.mix_group % 2):
            raise ValueError("mixup and cutmix mix pairs: global_batch and mix_group have to be even")
        try:
            self.method().check(self.shape())
        except SpecError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def channels(self) -> int:
        """1 or 3."""
        return len(self.pixel_mean)

    @property
    def mixes(self) -> bool:
        """Whether images are mixed in pairs."""
        return bool(self.mixup or self.cutmix)

    @property
    def tokens(self) -> int:
        """Patches of an image and the class token."""
        return 1 + (self.image_size // self.patch_size) ** 2

    @property
    def warmup_steps(self) -> int:
        """Updates of linear warm-up."""
        return round(self.warmup_fraction * self.steps)

    def left_out(self) -> list[str]:
        """Names of the augmentations that this run goes without."""
        whole = ["random crops"] if min(self.crop_area) == 1 else []
        return whole + [name for setting, name in AUGMENTATIONS.items() if not getattr(self, setting)]

    def method(self) -> NormMethod:
        """The normalization method."""
        return build_method(self.norm)

    def shape(self) -> ModelShape:
        """What the method may look at."""
        return ModelShape(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            n_layers=self.n_layers,
            initializer_range=self.initializer_range,
            embed_init_std=self.initializer_range,
        )

    def image_data(self) -> ImageData:
        """The prepared images that it trains on and is evaluated on."""
        limits = {"train": self.train_images, "validation": self.validation_images}
        return ImageData(dataset=self.dataset, images=limits)

    def data(self) -> list[DataSettings]:
        return [self.image_data()]

    def flops_of_an_image(self) -> float:
        """As `flops_per_image` counts them."""
        patch_values = self.patch_size**2 * self.channels
        return flops_per_image(
            self.hidden_size, self.intermediate_size, self.n_layers, self.tokens, patch_values, self.classes
        )

    def flops(self) -> float:
        """Of training."""
        return self.flops_of_an_image() * self.steps * self.global_batch

    def weight_count(self) -> int:
        """Of its matrices and positions: gains and biases are less than a hundredth."""
        blocks = self.n_layers * (4 * self.hidden_size**2 + 2 * self.hidden_size * self.intermediate_size)
        return blocks + self.hidden_size * (self.patch_size**2 * self.channels + self.tokens + self.classes)

    def card_bytes(self) -> int:
        return bytes_in_training(self.weight_count(), self.numerics)

    def metrics(self) -> tuple[str, ...]:
        return ("accuracy", "loss_validation", "validation_images", "updates", "images", "epochs", "parameters")

    def series(self) -> dict[str, tuple[str, ...]]:
        return {"train": ("update", "images", "loss"), "eval": ("update", "images", "accuracy", "loss")}

    def slug(self) -> str:
        return f"{self.size}-{method_slug(self.norm)}-s{self.seed}".lower()

    def derived(self) -> dict[str, tuple[str, str]]:
        return {
            "warm-up": (f"{self.warmup_steps} updates", "warmup_fraction x steps"),
            "images": (f"{self.steps * self.global_batch:,}", "steps x global_batch"),
        }

    def snapshots(self) -> range:
        return range(self.steps)


def run(job: ImageClassification, inputs: Inputs, machine: Machine) -> Result | None:
    """Train and evaluate; None on all but the leading process. Raises DataError, CheckpointError, Interrupted.

    Metrics: accuracy (share of the validation images whose class has the largest logit), its binomial standard error,
    loss_validation (nats), updates, images, epochs, parameters. Series: train (update, images, loss), the loss being
    that of mixed and smoothed targets; eval (update, images, accuracy, loss).
    """
    from paperlm.train.image_classification import classify

    return classify(job, inputs, machine)
