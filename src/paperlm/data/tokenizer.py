"""Tokenizers, read with the tokenizers library alone (no network, no transformers import)."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from paperlm.data.registry import HERE, TokenizerEntry, tokenizer_entry
from paperlm.data.sources import verify
from paperlm.errors import DataError

NO_PADDING = -1
"In place of the padding id: no token has it."


class TextTokenizer:
    """Text to ids, with an end-of-sequence id after each document.

    A text that spells the padding token out gets its id there; that label is ignored, as by the authors' call.
    """

    def __init__(self, name: str) -> None:
        self.entry: TokenizerEntry = tokenizer_entry(name)
        path = HERE / self.entry.file.path
        verify(path, self.entry.file)
        self.path: Path = path
        self.inner = Tokenizer.from_file(str(path))
        self.inner.no_truncation()
        self.inner.no_padding()
        self.eos = self._id(self.entry.eos)
        self.bos = self._id(self.entry.bos or self.entry.eos)
        self.pad: int = NO_PADDING if self.entry.pad is None else self._id(self.entry.pad)

    def _id(self, token: str) -> int:
        number = self.inner.token_to_id(token)
        if number is None or number >= self.entry.vocab_size:
            raise DataError(f"{self.path}: special token {token!r} is not among the {self.entry.vocab_size} ids")
        return number

    def encode(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text followed by eos. Raises DataError if an id does not fit the vocabulary."""
        encoded = [e.ids for e in self.inner.encode_batch_fast(texts, add_special_tokens=False)]
        limit = self.entry.vocab_size
        for ids in encoded:
            if ids and max(ids) >= limit:
                token = self.inner.id_to_token(max(ids))
                raise DataError(
                    f"{self.path}: token {token!r} has id {max(ids)}, the model knows ids below {limit}; remove the "
                    "text that contains it, or choose another tokenizer"
                )
            ids.append(self.eos)
        return encoded

    def words(self, rows: Iterable[Iterable[int]]) -> int:
        """How many words, as white space parts them, the ids of consecutive rows spell; documents end with eos."""
        texts: list[list[int]] = [[]]
        for number in itertools.chain.from_iterable(rows):
            if number == self.eos:
                texts.append([])
            elif number not in (self.pad, self.bos):
                texts[-1].append(number)
        return sum(len(text.split()) for text in self.inner.decode_batch(texts, skip_special_tokens=False))


def examples(ids: list[int], seq_len: int, example: str) -> Iterator[list[int]]:
    """Training examples of one encoded document, each at most `seq_len` ids.

    truncate: one example; of a longer document the first seq_len - 1 ids and eos, which is what the authors'
    tokenizer call does (it keeps room for eos); the rest is dropped. split: consecutive pieces of the whole document.
    For packed examples see `packed`.
    """
    if example == "truncate":
        yield ids if len(ids) <= seq_len else [*ids[: seq_len - 1], ids[-1]]
        return
    for start in range(0, len(ids), seq_len):
        if len(ids) - start > 1:  # a lone last token predicts nothing
            yield ids[start : start + seq_len]


def packed(
    ids: list[int], before: list[int], seq_len: int, head: tuple[int, ...] = ()
) -> tuple[list[list[int]], list[int]]:
    """Examples of exactly `seq_len` ids that a document completes, and the ids left over for the next document.

    `before` is what the document before left over; each example begins with `head`. The authors of Cut Cross-Entropy
    cut one row of all documents this way, without a head, and drop what is left at its end.
    """
    row, step = [*before, *ids], seq_len - len(head)
    whole = len(row) - len(row) % step
    return [[*head, *row[start : start + step]] for start in range(0, whole, step)], row[whole:]


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE as shipped for the small scales: ids 0 <pad>, 1 </s>, then bytes and merges."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
