"""Questions that are answered by a span of a passage: SQuAD v1.1 (Rajpurkar et al. 2016, arXiv 1606.05250).

The protocol is that of BERT's run_squad.py (Devlin et al. 2019, arXiv 1810.04805): a passage that does not fit into the
model beside its question is read in overlapping windows; the head scores each token of a window as the first and as the
last one of the answer; the answer is the span of the highest sum. It is cut out of the passage by the tokens' places in
it, where run_squad.py goes back from pieces of words to words by rules. Nothing is left unanswered by choice, which is
of v2.0.

Shapes: N items, W windows, S tokens of a window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.tasks.qasper.metrics import f1_abstractive, normalize_answer
from tqdm import tqdm

from paperlm.data.items import read_items
from paperlm.errors import DataError, JobError

FIELDS = ("id", "context", "question", "answers")
SPLIT = "validation"
"The split that is evaluated; the answers of the official test set are not public."

Item = Mapping[str, Any]


def load_questions(manifest: Path, limit: int | None = None) -> list[Item]:
    """The first `limit` prepared items (None: all), each with a passage (context), a question, and answers.

    Raises DataError for items that are missing, altered, lack a field or an answer, and for fewer than two.
    """
    rows = read_items(manifest, SPLIT)[:limit]
    for number, row in enumerate(rows, start=1):
        where = f"{manifest.parent}, {SPLIT} split, item {number}"
        if missing := [key for key in FIELDS if key not in row]:
            raise DataError(f"{where}: no {', '.join(map(repr, missing))}; correct the item")
        if not (isinstance(row["answers"], dict) and row["answers"].get("text")):
            raise DataError(
                f"{where}: answers.text is empty; in SQuAD v1.1 each question has an answer: correct the item"
            )
    if len(rows) < 2:
        raise DataError(f"{manifest.parent}, {SPLIT} split: {len(rows)} items; a standard error needs two")
    return rows


@dataclass(frozen=True)
class Window:
    """A question and as much of its passage as the model sees at once."""

    item: int
    "number of its item, from 0"
    tokens: Mapping[str, Sequence[int]]
    "what the model takes: input_ids and, where the tokenizer gives them, token_type_ids; S numbers each"
    places: np.ndarray
    "(S, 2) int: first character of each token in the passage, and the one behind it; -1 outside the passage"
    may_start: np.ndarray
    "(S,) bool: whether an answer may start here; of the windows that see a token that with most around it"


def windows_of(tokenizer: Any, items: Sequence[Item], *, max_length: int, stride: int) -> list[Window]:
    """Windows of at most `max_length` tokens, item by item; of a passage one begins every `stride` tokens.

    Raises JobError for a tokenizer that does not tell where its tokens stand, DataError for a question that is too long
    to leave room for `stride` tokens of the passage.
    """
    if not tokenizer.is_fast:
        raise JobError(f"{type(tokenizer).__name__} does not tell where a token stands in a text; use a fast tokenizer")
    found = []
    for number, item in enumerate(items):
        question = item["question"].strip()
        taken = len(tokenizer.encode(question, add_special_tokens=False)) + tokenizer.num_special_tokens_to_add(True)
        room = max_length - taken
        if room < stride:
            raise DataError(
                f"item {item['id']}: beside its question {max_length} tokens leave {room} of the passage, and a window "
                f"begins every {stride}: raise max_length, or lower stride"
            )
        encoded = tokenizer(
            question,
            item["context"],
            truncation="only_second",
            max_length=max_length,
            stride=room - stride,  # to the library it is the overlap
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        found += _windows(number, encoded, stride)
    return found


def _windows(number: int, encoded: Any, stride: int) -> list[Window]:
    """Windows of one item."""
    count = len(encoded["input_ids"])
    inside = [np.array([part == 1 for part in encoded.sequence_ids(i)]) for i in range(count)]
    starts = stride * np.arange(count)
    lengths = np.array([int(mask.sum()) for mask in inside])
    # How much a window sees around each token of the passage; longer windows win where that is equal.
    token = np.arange(int((starts + lengths).max()))
    around = np.minimum(token - starts[:, None], (starts + lengths)[:, None] - 1 - token)
    best = np.where(around >= 0, around + 0.01 * lengths[:, None], -np.inf).argmax(0)
    found = []
    for i in range(count):
        places = np.where(inside[i][:, None], np.array(encoded["offset_mapping"][i]), -1)
        may_start = np.zeros(len(places), dtype=bool)
        may_start[inside[i]] = best[starts[i] : starts[i] + lengths[i]] == i
        tokens = {key: encoded[key][i] for key in ("input_ids", "token_type_ids") if key in encoded}
        found.append(Window(number, tokens, places, may_start))
    return found


def require_spans(model: Any, max_length: int) -> None:
    """Raise JobError unless the model scores starts and ends of answers, and sees `max_length` tokens at once."""
    if not hasattr(model, "qa_outputs"):
        raise JobError(
            f"{type(model).__name__} marks no span of a text as an answer; it takes a model with the head of question "
            "answering, e.g. BertForQuestionAnswering"
        )
    if max_length > (seen := getattr(model.config, "max_position_embeddings", max_length)):
        raise JobError(f"{type(model).__name__} sees {seen} tokens at once, max_length is {max_length}: lower it")


@torch.no_grad()
def answer(
    model: Any,
    windows: Sequence[Window],
    items: Sequence[Item],
    *,
    n_best: int,
    longest: int,
    batch_size: int,
    progress: bool = False,
) -> list[str]:
    """The model's answer to each of N items; empty where no span is left.

    Of each window the `n_best` tokens that score highest as the first one of the answer, and as the last one, are
    looked at; a span lies in the passage, starts where `may_start` says and has at most `longest` tokens. Scores that
    are no numbers make no span. Of equal sums the first counts.
    """
    device = next(model.parameters()).device
    best = [(-np.inf, "")] * len(items)
    order = sorted(range(len(windows)), key=lambda i: len(windows[i].tokens["input_ids"]))  # little is padded
    found: dict[int, tuple[float, int, int]] = {}
    for first in tqdm(range(0, len(order), batch_size), desc="windows", unit="batch", disable=not progress):
        chosen = order[first : first + batch_size]
        out = model(**_padded([windows[i] for i in chosen], device))
        scores = torch.stack([out.start_logits, out.end_logits]).float().cpu().numpy()
        for i, start, end in zip(chosen, *scores, strict=True):
            size = len(windows[i].places)
            found[i] = _best_span(start[:size], end[:size], windows[i], n_best, longest)
    for i, window in enumerate(windows):
        score, start, end = found[i]
        if score > best[window.item][0]:
            passage = items[window.item]["context"]
            best[window.item] = (score, passage[window.places[start, 0] : window.places[end, 1]])
    return [text for _, text in best]


def _padded(windows: Sequence[Window], device: Any) -> dict[str, torch.Tensor]:
    """Windows as a batch, padded on the right."""
    widest = max(len(window.places) for window in windows)
    batch = {key: np.zeros((len(windows), widest), dtype=np.int64) for key in (*windows[0].tokens, "attention_mask")}
    for row, window in enumerate(windows):
        for key, values in window.tokens.items():
            batch[key][row, : len(values)] = values
        batch["attention_mask"][row, : len(window.places)] = 1
    return {key: torch.from_numpy(values).to(device) for key, values in batch.items()}


def _best_span(start: np.ndarray, end: np.ndarray, window: Window, n_best: int, longest: int) -> tuple[float, int, int]:
    """Sum of the scores, first and last token of a window's best span; a sum of minus infinity: there is none."""
    start, end = (np.where(np.isfinite(scores), scores, -np.inf) for scores in (start, end))
    first = np.argsort(-start, kind="stable")[:n_best]
    last = np.argsort(-end, kind="stable")[:n_best]
    first, last = first[window.may_start[first]], last[window.places[last, 0] >= 0]
    if not (len(first) and len(last)):
        return -np.inf, 0, 0
    length = last - first[:, None] + 1
    sums = np.where((length >= 1) & (length <= longest), start[first][:, None] + end[last], -np.inf)
    row, column = np.unravel_index(sums.argmax(), sums.shape)
    return float(sums[row, column]), int(first[row]), int(last[column])


def scores(answers: Sequence[str], items: Sequence[Item]) -> tuple[np.ndarray, np.ndarray]:
    """Exact match (0 or 1) and F1 (0 to 1) of each answer, (N,) float64 each: against the best of an item's answers.

    Of SQuAD v1.1's evaluate-v1.1.py: lower case, without punctuation and articles; F1 of the bags of words.
    """
    exact, f1 = np.zeros(len(items)), np.zeros(len(items))
    for number, (found, item) in enumerate(zip(answers, items, strict=True)):
        truths = item["answers"]["text"]
        exact[number] = max(normalize_answer(found) == normalize_answer(truth) for truth in truths)
        f1[number] = max(f1_abstractive([found], [truth]) for truth in truths)
    return exact, f1
