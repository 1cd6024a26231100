"""Perplexity of a model whose weights are disturbed, by how much and how (NeuZip, Figure 7)."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from paperlm.data.registry import DatasetName
from paperlm.data.settings import DataSettings
from paperlm.data.texts import TextData, read_documents
from paperlm.jobs.base import Head, Inputs, LooksAtModel, Machine, Seed
from paperlm.result import Result, Series

Exponents = tuple[int | None, ...]
"Powers of two; null: no noise of this kind."


class PerturbedPerplexity(LooksAtModel):
    """exp of the summed loss by bytes of the text, with noise on the weights of linear layers, in float32.

    A weight w becomes w + u max(2^absolute, 2^relative |w|), u uniform in [-1, 1] and the same at every size of noise.
    Windows as in stored_perplexity.
    """

    kind: ClassVar[str] = "perturbed_perplexity"
    priority: ClassVar[int] = 1
    summary: ClassVar[str] = "perplexity of a model with noise on its weights, over absolute and relative sizes of it"

    text: DatasetName
    "a text of the registry, whose validation documents are read"
    documents: int = Field(gt=0)
    "so many of its first"
    window: int = Field(gt=1)
    "tokens of a window"
    absolute: Exponents = Field(min_length=1)
    "log2 of the noise"
    relative: Exponents = Field(min_length=1)
    "log2 of the noise over the weight's magnitude"
    policy: Literal["paper", "all_linear", "all"] = "paper"
    "which weights: linear layers but the head; the head too; embeddings too"
    noise_seed: Seed = 0
    "of the noise"

    @field_validator("absolute", "relative")
    @classmethod
    def each_once(cls, value: Exponents) -> Exponents:
        if len(set(value)) < len(value):
            raise ValueError("a power is named twice")
        return value

    @model_validator(mode="after")
    def text_exists(self) -> PerturbedPerplexity:
        self.data()
        return self

    def needs_head(self) -> Head:
        return "tokens"

    def data(self) -> list[DataSettings]:
        return [TextData(dataset=self.text, documents=self.documents)]

    def metrics(self) -> tuple[str, ...]:
        return ("loss", "perplexity", "bytes", "windows")

    def series(self) -> dict[str, tuple[str, ...]]:
        return {"grid": ("absolute", "relative", "loss", "perplexity")}

    def slug(self) -> str:
        return f"perturbed-{self.of_what()}"


def run(job: PerturbedPerplexity, inputs: Inputs, machine: Machine) -> Result:
    """Metrics without noise: loss (nats a byte of the text), perplexity, bytes, windows. Series `grid`: the same for
    each pair of `absolute` and `relative` (null: none); a loss that is no finite number is null.

    Raises JobError for a text shorter than a window.
    """
    import math

    import torch
    from paperlm_kernels.stored import chosen_weights
    from tqdm import tqdm

    from paperlm.evaluate.perplexity import perplexity
    from paperlm.evaluate.windows import mean_losses, windows_of
    from paperlm.models.folder import load_model
    from paperlm.probe.noise import disturbed

    folder, text = inputs.models["of"], "\n".join(read_documents(inputs.data[0]))
    windows, size = windows_of(job.slug(), folder, text, job.window), len(text.encode())
    model = load_model(folder, dtype=torch.float32).to(machine.torch_device())
    weights = chosen_weights(model, job.policy)

    def loss() -> float | None:
        # As the paper's program: a window counts with its mean times its tokens, the dropped rest with its bytes.
        value = sum(mean_losses(model, windows, machine)) * job.window / size
        return value if math.isfinite(value) else None

    clean = loss()
    if clean is None:
        return Result(outcome="blocked", reason="losses of this model are no finite numbers")
    pairs = [(a, r) for a in job.absolute for r in job.relative]
    rows: list[list[Any]] = []
    for absolute, relative in tqdm(pairs, desc=job.job_id, unit="noise", disable=not machine.progress):
        with disturbed(weights, absolute, relative, job.noise_seed):
            value = loss()
        rows.append([absolute, relative, value, None if value is None else perplexity(value)])
    return Result(
        outcome="measured",
        metrics={"loss": clean, "perplexity": perplexity(clean), "bytes": size, "windows": len(windows)},
        series={"grid": Series(columns=["absolute", "relative", "loss", "perplexity"], rows=rows)},
    )
