"""What the data rule prepares: rows of tokens to train on, items of a data set, documents, images, or a model's
files.

All are values with an id, like jobs: settings and checksums of the registry's entry.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from paperlm.data.images import ImageData
from paperlm.data.model_files import ModelData
from paperlm.data.registry import (
    DatasetName,
    TokenizerName,
    data_fingerprint,
    dataset_entry,
    item_splits,
    tokenizer_entry,
)
from paperlm.data.texts import TextData
from paperlm.errors import DataError, SpecError
from paperlm.frozen import Frozen, digest
from paperlm.load import parse

Example = Literal["truncate", "split", "packed", "packed_bos"]
"""truncate: a document is one example, its rest is dropped (the normalization papers); split: its rest makes more
examples; packed: all documents in a row, cut into full examples (Cut Cross-Entropy); packed_bos: the same with a BOS at
the head of each example, of a tokenizer without one its eos (BitNet)."""


class TokenData(Frozen):
    """Text as rows of token ids (paperlm.data.prepare)."""

    dataset: DatasetName
    tokenizer: TokenizerName
    vocab_size: int = Field(gt=2, le=65536)
    seq_len: int = Field(gt=1)
    example: Example
    train_examples: int = Field(gt=0)
    "at most so many examples are prepared"
    validation_tokens: int = Field(gt=0)
    "the first documents that hold so many real tokens are the validation set"

    @model_validator(mode="after")
    def tokenizer_fits(self) -> TokenData:
        _, entry = dataset_entry(self.dataset)
        size = tokenizer_entry(self.tokenizer).vocab_size
        if entry.form != "a text":
            raise ValueError(f"dataset {self.dataset!r} is {entry.form}, no text to make rows of tokens of")
        if not entry.trains:
            raise ValueError(f"dataset {self.dataset!r} has validation documents alone, none to train on")
        if size != self.vocab_size:
            raise ValueError(
                f"tokenizer {self.tokenizer!r} has {size} ids, the model vocab_size {self.vocab_size}: set vocab_size "
                f"to {size} or choose another tokenizer"
            )
        return self

    def fingerprint(self) -> dict[str, Any]:
        """Checksums of the text and the tokenizer."""
        return data_fingerprint(self.dataset, self.tokenizer)

    @property
    def data_id(self) -> str:
        """Folder name below results/data/."""
        name, _ = dataset_entry(self.dataset)
        slug = f"{name}-{self.tokenizer}-{self.seq_len}".replace("/", "_").lower()
        return f"{slug}-{digest({**self.model_dump(mode='json'), 'data': self.fingerprint()})}"


class ItemData(Frozen):
    """Items of a set for fine-tuning, preference or evaluation: JSON lines per split, as the source has them."""

    dataset: DatasetName
    splits: dict[str, int | None] = Field(min_length=1)
    "split -> at most so many of its first items; None: all"

    @model_validator(mode="after")
    def splits_exist(self) -> ItemData:
        try:
            item_splits(self.dataset, self.splits)
        except SpecError as error:
            raise ValueError(str(error)) from None
        if wrong := [split for split, count in self.splits.items() if count is not None and count < 1]:
            raise ValueError(f"splits: {', '.join(wrong)}: at least one item, or null for all")
        return self

    def fingerprint(self) -> dict[str, Any]:
        """Checksums of the set's files."""
        return data_fingerprint(self.dataset)

    @property
    def data_id(self) -> str:
        """Folder name below results/data/."""
        name, _ = dataset_entry(self.dataset)
        content = {**self.model_dump(mode="json"), "data": self.fingerprint()}
        return f"{name.replace('/', '_').lower()}-{digest(content)}"


DataSettings = TokenData | ItemData | TextData | ModelData | ImageData
OWN_FIELD = {"splits": ItemData, "documents": TextData, "model": ModelData, "images": ImageData}
"A field that tells the kinds apart; without one of them it is TokenData."


def data_settings(value: dict[str, Any]) -> DataSettings:
    """The settings that a JSON object describes; DataError if it is of no kind."""
    kind = next((kind for name, kind in OWN_FIELD.items() if name in value), TokenData)
    try:
        return parse(value, kind, f"settings of {kind.__name__}")
    except SpecError as error:
        raise DataError(str(error)) from None
