"""A T5 that writes SQL, trained by descent with weights in stores (NeuZip, Table 2)."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from paperlm.data.registry import DatasetName, TokenizerName, dataset_entry
from paperlm.data.settings import DataSettings, ItemData
from paperlm.frozen import Frozen
from paperlm.jobs.base import Head, Inputs, Job, Machine, Seed, packed_bytes, parent
from paperlm.jobs.pretrain import OF_WEIGHTS
from paperlm.result import Result

PREFIX = "generate SQL from context: "
NO_ADAPTER = (
    "QLoRA trains small matrices beside the weights of a trained T5 (of); beside fresh weights it shows its speed and "
    "its peak of memory alone (timed)"
)
SHAPE = ("hidden_size", "intermediate_size", "n_heads", "head_size", "n_layers", "vocab_size")


class Questions(Frozen):
    """Questions of a set, and how an encoder-decoder reads them."""

    dataset: DatasetName
    "a set of items with question and answer, and context where a question has one"
    split: str
    items: int = Field(gt=0)
    "at most so many of the split's"
    prefix: str
    "stands before each source"
    tokenizer: TokenizerName
    "the model's own"
    source_length: int = Field(gt=1)
    "tokens of prefix, context and question; what is longer is cut at its end"
    target_length: int = Field(gt=1)

    @model_validator(mode="after")
    def items_have_the_fields(self) -> Questions:
        has_fields(self.dataset, "question", "answer")
        return self

    def data(self) -> ItemData:
        """What has to be prepared."""
        return ItemData(dataset=self.dataset, splits={self.split: self.items})


def has_fields(dataset: str, *wanted: str) -> None:
    """ValueError for a set whose items lack one of the fields."""
    known = dataset_entry(dataset)[1].fields
    if missing := [name for name in wanted if name not in known]:
        raise ValueError(f"dataset {dataset!r} has no field {missing[0]!r}; it has {', '.join(known)}")


class TextToSQL(Job):
    """A T5 in bfloat16, with fresh weights or published ones, trained on questions with their tables; judged by BLEU of
    what it writes.

    A timed job leaves no model, nor does one with an adapter.
    """

    kind: ClassVar[str] = "text_to_sql"
    summary: ClassVar[str] = "train a T5 to write SQL, by descent with weights in stores, and judge it by BLEU"
    leaves_model: ClassVar[bool] = True
    # On a GPU, attention by its definition (2) and deterministic kernels (3). Standard errors came later and change no
    # number: a record without them stays, and its cells have none.
    behaviour: ClassVar[int] = 3

    of: parent("hub_model", "text_to_sql", optional=True) = None
    """a published T5, or one that such a job trained, which has its own shape; None: one with fresh weights, of the
    shape that is given here"""
    hidden_size: int | None = Field(None, gt=0)
    intermediate_size: int | None = Field(None, gt=0)
    n_heads: int | None = Field(None, gt=0)
    head_size: int | None = Field(None, gt=0)
    "width of a head, which in T5 need not be hidden_size / n_heads"
    n_layers: int | None = Field(None, gt=0)
    "of the encoder, and as many of the decoder"
    tokenizer: TokenizerName
    vocab_size: int | None = Field(None, gt=2, le=65536)

    dataset: DatasetName
    "a set of items with question, context and answer"
    examples: int = Field(gt=0)
    "at most so many of its training items"
    validation_examples: int = Field(gt=0)
    source_length: int = Field(gt=1)
    "tokens of context and question; what is longer is cut at its end"
    target_length: int = Field(gt=1)

    optimizer: Literal["sgd", "lomo"]
    weights: Literal["raw", "packed"]
    "as of a pretrain job"
    adapter: Literal["none", "int8", "fp4", "nf4", "fp4_double", "nf4_double"] = "none"
    """QLoRA beside weights of bitsandbytes, by ordinary descent, in place of optimizer and weights; blocked without
    bitsandbytes, and for fresh weights unless it is timed"""
    peak_lr: float = Field(gt=0)
    "falls to 0 along a line, without a warm-up"
    steps: int = Field(gt=0)
    batch: int = Field(gt=0)
    seed: Seed
    timed: bool = False
    "time updates on a GPU, in place of training to the end"
    cap_gib: float | None = Field(None, gt=0)
    "timed: memory of the card at most, in GiB, from reading the model on: that of a smaller card; null: all it has"

    def never(self) -> str:
        return NO_ADAPTER if self.adapter != "none" and self.of is None and not self.timed else ""

    @model_validator(mode="after")
    def items_have_the_fields(self) -> TextToSQL:
        has_fields(self.dataset, "question", "context", "answer")
        return self

    @model_validator(mode="after")
    def cap_is_of_a_timed_one(self) -> TextToSQL:
        if self.cap_gib is not None and not self.timed:
            raise ValueError("cap_gib is of a timed job, which a GPU alone can do: set timed, or leave cap_gib out")
        return self

    @model_validator(mode="after")
    def has_one_shape(self) -> TextToSQL:
        given = [name for name in SHAPE if getattr(self, name) is not None]
        if self.of is not None and given:
            raise ValueError(f"{given[0]}: a trained model (of) has its own; leave {', '.join(given)} out")
        if isinstance(self.of, TextToSQL) and (self.of.timed or self.of.adapter != "none"):
            raise ValueError("of: a job that is timed, or trains an adapter, leaves no model; name another")
        if isinstance(self.of, TextToSQL) and self.of.tokenizer != self.tokenizer:
            raise ValueError(f"tokenizer: {self.tokenizer}, and that of `of` is {self.of.tokenizer}: give the same")
        if self.of is None and len(given) < len(SHAPE):
            missing = [name for name in SHAPE if name not in given]
            raise ValueError(f"{missing[0]}: fresh weights need a shape; give {', '.join(missing)}, or a model (of)")
        return self

    def needs_head(self) -> Head:
        return "answers"

    def held_out(self) -> Questions:
        """The questions that it is judged by."""
        return Questions(
            dataset=self.dataset, split="validation", items=self.validation_examples, prefix=PREFIX,
            tokenizer=self.tokenizer, source_length=self.source_length, target_length=self.target_length,
        )  # fmt: skip

    def data(self) -> list[DataSettings]:
        return [ItemData(dataset=self.dataset, splits={"train": self.examples, "validation": self.validation_examples})]

    def metrics(self) -> tuple[str, ...]:
        if self.timed:
            return ("iterations_per_second", "peak_bytes")
        return ("bleu", "exact", "loss", "parameters", "examples", *OF_WEIGHTS)

    def behaviours(self) -> dict[str, int]:
        own = super().behaviours() | (packed_bytes() if self.weights == "packed" else {})
        # Since 2 activations are recomputed beside an adapter too, and gradients end in other last bits.
        return own | ({"qlora": 2} if self.adapter != "none" else {})

    def series(self) -> dict[str, tuple[str, ...]]:
        return {} if self.timed else {"train": ("update", "loss")}

    def slug(self) -> str:
        how = f"{self.optimizer}-{self.weights}" if self.adapter == "none" else f"qlora_{self.adapter}"
        what = f"t5_{self.n_layers}x{self.hidden_size}" if self.of is None else self.of.slug().replace("-", "_")
        return f"sql-{what}-{how}{'-timed' if self.timed else ''}-s{self.seed}"


def run(job: TextToSQL, inputs: Inputs, machine: Machine) -> Result:
    """Metrics bleu (SacreBLEU of stripped texts, 0 to 100) and exact (share of answers that are right to the letter),
    both with their standard error over items (that of exact is above 0 also where none is right), loss (nats a target
    token), parameters, examples, and the weights' bytes and hash as of a pretrain job. Series `train`: the loss of each
    update. Timed: iterations_per_second and peak_bytes, of a GPU; `out_of_memory` where the cap is too small.

    The trained model is left with plain weights and a tokenizer that adds no token.

    With an adapter the weights' bytes are those of the frozen weights and of the adapter, the hash is the adapter's.

    A job that is killed goes on from its last checkpoint. `blocked` for an adapter beside fresh weights that is not
    timed, or without bitsandbytes, and where speed is asked for without a GPU. Raises DataError for altered items and
    a tokenizer without padding, CheckpointError for a checkpoint that is damaged or of another job.
    """
    import importlib.util

    from paperlm.evaluate.cap import under_cap
    from paperlm.train.text_to_sql import speed, train

    if why := job.never():
        return Result(outcome="blocked", reason=why)
    if job.adapter != "none" and importlib.util.find_spec("bitsandbytes") is None:
        return Result(
            outcome="blocked", reason="QLoRA needs bitsandbytes, which is not installed: pip install bitsandbytes"
        )
    if job.timed and machine.torch_device().type != "cuda":
        return Result(outcome="blocked", reason="speed is of the kernels, which run on a GPU; there is none here")
    if job.timed:
        return under_cap(machine.torch_device(), job.cap_gib, lambda: speed(job, inputs, machine))
    return train(job, inputs, machine)
