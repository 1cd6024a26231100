"""Held-out measurements of causal and reward models: token losses, scores, samples and their log-probabilities.

All sums are taken in float64 over examples in a fixed order, and samples are drawn in groups of a fixed size, so that a
number does not depend on the machine's micro-batch.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from paperlm.finetune.examples import Example

ROWS = 64
"Sequences of one forward pass or one call of generate; the samples depend on it."


def mean_and_error(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Mean and its standard error over independent values; the error of a single value is nan."""
    array = np.asarray(values, dtype=np.float64)
    error = array.std(ddof=1) / math.sqrt(len(array)) if len(array) > 1 else math.nan
    return float(array.mean()), float(error)


def ratio_and_error(sums: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """sum(sums) / sum(counts) and its standard error over examples (linearized ratio estimator)."""
    ratio = sums.sum() / counts.sum()
    n = len(sums)
    spread = math.sqrt(((sums - ratio * counts) ** 2).sum() * n / (n - 1)) if n > 1 else math.nan
    return float(ratio), float(spread / counts.sum())


@contextlib.contextmanager
def evaluation(model: Any, numerics: str) -> Iterator[torch.device]:
    """Evaluation mode without gradients, products as in training; the mode of before comes back."""
    device, training = next(model.parameters()).device, model.training
    model.eval()
    half = torch.autocast(device.type, torch.bfloat16) if numerics == "fp32_master" else contextlib.nullcontext()
    try:
        with torch.no_grad(), half:
            yield device
    finally:
        model.train(training)


def _groups(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices in groups of ROWS, longest first, so that little is padded."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    for start in range(0, len(order), ROWS):
        yield order[start : start + ROWS]


def _padded(rows: Sequence[list[int]], value: int, device: torch.device, left: bool = False) -> torch.Tensor:
    width = max(map(len, rows))
    fill = [[value] * (width - len(row)) for row in rows]
    return torch.tensor([f + r if left else r + f for r, f in zip(rows, fill, strict=True)], device=device)


def token_losses(model: Any, examples: Sequence[Example], answer_only: bool, numerics: str) -> tuple:
    """Summed next-token losses of each example, and the number of tokens in it (float64, int64 arrays).

    The first token of a text is not predicted; `answer_only` counts those of the answer alone.
    """
    sums, counts = np.zeros(len(examples)), np.zeros(len(examples), dtype=np.int64)
    with evaluation(model, numerics) as device:
        for group in _groups([len(e.ids) for e in examples]):
            rows = [examples[i] for i in group]
            ids = _padded([e.ids for e in rows], 0, device)
            mask = _padded([[1] * len(e.ids) for e in rows], 0, device)
            starts = torch.tensor([max(1, e.answer if answer_only else 1) for e in rows], device=device)
            counted = mask[:, 1:].bool() & (torch.arange(1, ids.shape[1], device=device) >= starts[:, None])
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
            losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
            sums[group] = (losses.double() * counted).sum(1).cpu().numpy()
            counts[group] = counted.sum(1).cpu().numpy()
    return sums, counts


def scores(model: Any, sequences: Sequence[list[int]], numerics: str) -> np.ndarray:
    """Score of a reward model for each sequence of ids (float64)."""
    found = np.zeros(len(sequences))
    pad = model.config.pad_token_id or 0
    with evaluation(model, numerics) as device:
        for group in _groups([len(s) for s in sequences]):
            rows = [sequences[i] for i in group]
            ids, mask = _padded(rows, pad, device), _padded([[1] * len(r) for r in rows], 0, device)
            found[group] = model(input_ids=ids, attention_mask=mask).logits[:, 0].double().cpu().numpy()
    return found


def sample(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    *,
    each: int,
    length: int,
    temperature: float,
    seed: int,
    numerics: str,
) -> list[list[int]]:
    """`each` answers to every prompt (the first prompt's first), of at most `length` ids, eos included.

    Plain sampling from the model's distribution at this temperature, as trl's trainers sample.
    """
    from transformers import GenerationConfig

    config = GenerationConfig(
        max_new_tokens=length,
        do_sample=True,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        disable_compile=True,
    )
    rows = [prompt for prompt in prompts for _ in range(each)]
    answers: list[list[int]] = []
    torch.manual_seed(seed)
    with evaluation(model, numerics) as device:
        for start in range(0, len(rows), ROWS):
            group = rows[start : start + ROWS]
            ids = _padded(group, tokenizer.pad_token_id, device, left=True)
            mask = _padded([[1] * len(r) for r in group], 0, device, left=True)
            made = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
            answers += [_until(row, tokenizer.eos_token_id) for row in made[:, ids.shape[1] :].tolist()]
    return answers


def _until(ids: list[int], eos: int) -> list[int]:
    return ids[: ids.index(eos) + 1] if eos in ids else ids


def answer_log_probs(model: Any, examples: Sequence[Example], temperature: float, numerics: str) -> np.ndarray:
    """Log-probability of each example's answer given its prompt, logits divided by `temperature` (float64)."""
    found = np.zeros(len(examples))
    with evaluation(model, numerics) as device:
        for group in _groups([len(e.ids) for e in examples]):
            rows = [examples[i] for i in group]
            ids = _padded([e.ids for e in rows], 0, device)
            mask = _padded([[1] * len(e.ids) for e in rows], 0, device)
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
            chosen = (logits / temperature).log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].double()
            starts = torch.tensor([e.answer for e in rows], device=device)
            counted = mask[:, 1:].bool() & (torch.arange(1, ids.shape[1], device=device) >= starts[:, None])
            found[group] = (chosen * counted).sum(1).cpu().numpy()
    return found


def keeps_texts_apart(model: Any) -> bool:
    """Whether two texts in one row, told apart by position ids that start anew, get the logits that each has alone."""
    first, second = [3, 4, 5, 6], [7, 8, 9]
    with evaluation(model, "fp32") as device:
        ids = torch.tensor([[*first, *second]], device=device)
        positions = torch.tensor([[*range(len(first)), *range(len(second))]], device=device)
        together = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, len(first) :].float()
        alone = model(input_ids=ids[:, len(first) :], use_cache=False).logits[0].float()
        apart = model(input_ids=ids, use_cache=False).logits[0, len(first) :].float()
    # Equal but for rounding, which is far below what the other text does to the logits.
    return float((together - alone).norm()) <= 0.05 * float((apart - alone).norm())
