"""Items of a prepared set as token ids: instructions with answers, and pairs of a chosen and a rejected answer.

Every item is looked at before training starts, and the first bad one is named with its file and line.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paperlm.errors import DataError

INSTRUCTION = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
INSTRUCTION_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n"
    "### Response:\n"
)
"""The public instruction format of Stanford Alpaca, which LLM-Adapters (arXiv 2304.01933, generate_prompt of its
finetune.py) uses for Commonsense170K; its file indents the lines between the headings, which is left out here."""

DIALOGUE = "\n\nHuman: {prompt}\n\nAssistant:"
"One turn of a dialogue as hh-rlhf (arXiv 2204.05862) writes it. Answers follow after a space."

ANSWER_CUE = "\n\nAssistant:"


@dataclass(frozen=True)
class Example:
    """One training text: `ids` (its length), of which those from `answer` on are the answer."""

    ids: list[int]
    answer: int
    cut: bool = False
    "whether a part of it is missing"


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt, as text; people or a model preferred the chosen one."""

    prompt: str
    chosen: str
    rejected: str


Items = list[tuple[str, dict[str, Any]]]
"(place, item): file and line of each item, for errors."


def placed_items(manifest: Path, split: str) -> Items:
    """Items of a prepared set's split. Raises DataError if the split or its file is missing, truncated or altered."""
    from paperlm.data.items import read_items

    found = read_items(manifest, split)
    return [(f"{manifest.parent / split}.jsonl, line {number}", item) for number, item in enumerate(found, start=1)]


def instructions(items: Items) -> list[tuple[str, str]]:
    """(prompt, answer) of items with `instruction`, `input` (which may be empty) and `output`.

    Raises DataError for an item without instruction or output.
    """
    texts = []
    for place, item in items:
        instruction, output = _text(place, item, "instruction"), _text(place, item, "output")
        given = item.get("input") or ""
        template = INSTRUCTION_WITH_INPUT if given else INSTRUCTION
        texts.append((template.format(instruction=instruction, input=given), output))
    return texts


def pairs(items: Items) -> list[Pair]:
    """Pairs of items with `prompt`, `chosen`, `rejected`, or with two whole dialogues (hh-rlhf) as the latter two.

    Of two dialogues the prompt is what they share up to the last `Assistant:` in it; of lists of messages (as
    UltraFeedback has them) the last message is the answer. Raises DataError for an item without one of the fields, with
    an empty answer, or with equal answers.
    """
    found = []
    for place, item in items:
        chosen, rejected = _text(place, item, "chosen"), _text(place, item, "rejected")
        if "prompt" in item:
            prompt = DIALOGUE.format(prompt=_text(place, item, "prompt").strip())
        else:
            prompt = _shared_turns(place, chosen, rejected)
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        chosen, rejected = chosen.strip(), rejected.strip()
        if not chosen or not rejected:
            raise DataError(f"{place}: the {'rejected' if chosen else 'chosen'} answer is empty; leave the pair out")
        if chosen == rejected:
            raise DataError(f"{place}: chosen and rejected answer are equal, which prefers neither; leave the pair out")
        found.append(Pair(prompt, f" {chosen}", f" {rejected}"))
    return found


def _shared_turns(place: str, chosen: str, rejected: str) -> str:
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    end = chosen.rfind(ANSWER_CUE, 0, shared)
    if end < 0:
        raise DataError(
            f"{place}: no field prompt, and the two dialogues share no turn that ends in {ANSWER_CUE.strip()!r}"
        )
    return chosen[: end + len(ANSWER_CUE)]


def _text(place: str, item: dict[str, Any], field: str) -> str:
    value = item.get(field)
    if isinstance(value, list) and value and isinstance(value[-1], dict):
        value = value[-1].get("content")
    if not isinstance(value, str):
        raise DataError(f"{place}: field {field!r} is {'no text' if field in item else 'missing'}")
    if not value.strip():
        raise DataError(f"{place}: field {field!r} is empty")
    return value


# -- ids --


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of a text, nothing added."""
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def encode_instruction(tokenizer: Any, prompt: str, answer: str, block: int, cut: str) -> Example:
    """Prompt and answer tokenized as one text, with eos, `block` ids at most; `cut`: end or start, what goes.

    A token that spans the border counts as answer. A text whose end is cut has no eos, as in LLM-Adapters.
    """
    encoded = tokenizer(prompt + answer, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    start = sum(end <= len(prompt) for _, end in encoded["offset_mapping"])
    ids = [*encoded["input_ids"], tokenizer.eos_token_id]
    if cut == "start":
        return Example(ids[-block:], max(0, start - max(0, len(ids) - block)), cut=len(ids) > block)
    return Example(ids[:block], min(start, block), cut=len(ids) > block)


def encode_answer(tokenizer: Any, prompt: list[int], answer: str, length: int) -> Example:
    """A prompt's ids with an answer's, which is tokenized alone and cut behind `length` ids, its eos included.

    So a scored or trained answer looks as one that a policy generates: ids behind those of the prompt, without eos
    if the length was reached first.
    """
    ids = [*encode(tokenizer, answer), tokenizer.eos_token_id]
    return Example([*prompt, *ids[:length]], len(prompt), cut=len(ids) > length)


def encode_pairs(
    tokenizer: Any, found: list[Pair], prompt_length: int, answer_length: int
) -> tuple[list[tuple[Example, Example]], int]:
    """(chosen, rejected) of each pair, and the number of pairs left out.

    Left out are pairs whose prompt is longer than `prompt_length` ids (a cut prompt asks something else), and those
    whose answers are equal in the ids that are kept.
    """
    kept = []
    for pair in found:
        prompt = encode(tokenizer, pair.prompt)
        both = tuple(encode_answer(tokenizer, prompt, answer, answer_length) for answer in (pair.chosen, pair.rejected))
        if len(prompt) <= prompt_length and both[0].ids != both[1].ids:
            kept.append(both)
    return kept, len(found) - len(kept)


def short_prompts(tokenizer: Any, found: list[Pair], prompt_length: int, count: int, place: Path) -> list[str]:
    """The first `count` distinct prompts of at most `prompt_length` ids. Raises DataError if there are fewer."""
    fitting = [p for p in dict.fromkeys(pair.prompt for pair in found) if len(encode(tokenizer, p)) <= prompt_length]
    if len(fitting) < count:
        raise DataError(
            f"{place}: {len(fitting)} prompts of at most {prompt_length} ids, {count} are asked for; ask for fewer, or "
            "raise prompt_length"
        )
    return fitting[:count]
