"""Training and judgement of a T5 that writes SQL. What is special: one backward pass is an update (LOMO)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from paperlm_kernels.stored import LomoSgd
from tqdm import tqdm

from paperlm.data.items import read_items
from paperlm.data.tokenizer import TextTokenizer
from paperlm.errors import DataError
from paperlm.jobs.base import Inputs, Machine, Result
from paperlm.jobs.text_to_sql import PREFIX
from paperlm.models.folder import save_model, transformers_tokenizer
from paperlm.train.language_model import of_weights, store_weights

if TYPE_CHECKING:
    from paperlm.jobs.text_to_sql import TextToSQL

IGNORED = -100
AT_ONCE = 50
"Questions that are answered together."


def build(job: TextToSQL, tokenizer: TextTokenizer, device: torch.device) -> Any:
    """The model at update 0, its weights in stores. Raises DataError for a tokenizer without padding."""
    from transformers import T5Config, T5ForConditionalGeneration

    if tokenizer.pad < 0:
        raise DataError(f"tokenizer {job.tokenizer} has no padding, with which T5's decoder begins: choose another")
    torch.manual_seed(job.seed)
    config = T5Config(
        vocab_size=job.vocab_size, d_model=job.hidden_size, d_ff=job.intermediate_size, d_kv=job.head_size,
        num_layers=job.n_layers, num_heads=job.n_heads, dropout_rate=0.0, pad_token_id=tokenizer.pad,
        eos_token_id=tokenizer.eos, decoder_start_token_id=tokenizer.pad,
    )  # fmt: skip
    model = T5ForConditionalGeneration(config).bfloat16().to(device).train()
    store_weights(job, model)
    return model


def train(job: TextToSQL, inputs: Inputs, machine: Machine) -> dict[str, Any]:
    """Train and evaluate: outcome, metrics, curve."""
    device, tokenizer = machine.torch_device(), TextTokenizer(job.tokenizer)
    items = read_items(inputs.data[0], "train")
    model = build(job, tokenizer, device)
    parameters = sum(weight.store.shape.numel() for weight in _stored(model)) + sum(
        p.numel() for p in model.parameters()
    )
    step = updates(job, model, tokenizer, items, device)
    curve: list[list[float]] = []
    for update in tqdm(range(job.steps), desc=job.job_id, unit="update", disable=not machine.progress):
        loss = step(update)
        if not math.isfinite(loss):
            return {"outcome": "not_finite"}
        curve.append([update + 1, loss])
    metrics = {"parameters": parameters, "examples": job.steps * job.batch, **of_weights(job, model)}
    if inputs.model is not None:
        leave(job, model, inputs.model)
    held_out = read_items(inputs.data[0], "validation")
    return {"outcome": "trained", "curve": curve, "metrics": metrics | judged(job, model, tokenizer, held_out, device)}


def leave(job: TextToSQL, model: Any, folder: Path) -> None:
    """Write the model with plain weights, whatever stores they lie in, and its tokenizer into `folder`."""
    plain = type(model)(model.config).bfloat16()
    plain.load_state_dict(model.state_dict())
    save_model(folder, plain, transformers_tokenizer(job.tokenizer, job.source_length))


def updates(
    job: TextToSQL, model: Any, tokenizer: TextTokenizer, items: list[dict[str, Any]], device: torch.device
) -> Callable[[int], float]:
    """update (from 0) -> its loss; makes it. Order and batch follow from the seed."""
    optimizer = LomoSgd(model, lambda step: job.peak_lr * (1 - step / job.steps), fused=job.optimizer == "lomo")
    order = np.random.default_rng(job.seed)
    rows = np.concatenate([order.permutation(len(items)) for _ in range(-(-job.steps * job.batch // len(items)))])

    def step(update: int) -> float:
        chosen = [items[row] for row in rows[update * job.batch : (update + 1) * job.batch]]
        loss = model(**batch(job, tokenizer, chosen, device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def batch(
    job: TextToSQL, tokenizer: TextTokenizer, items: Sequence[dict[str, Any]], device: torch.device
) -> dict[str, torch.Tensor]:
    """input_ids, attention_mask and labels, padded on the right to the longest of the batch."""
    sources = tokenizer.encode([f"{PREFIX}{item['context']} {item['question']}" for item in items])
    targets = tokenizer.encode([item["answer"] for item in items])
    sources = [_cut(ids, job.source_length) for ids in sources]
    targets = [_cut(ids, job.target_length) for ids in targets]
    return {
        "input_ids": _padded(sources, tokenizer.pad, device),
        "attention_mask": _padded([[1] * len(ids) for ids in sources], 0, device),
        "labels": _padded(targets, IGNORED, device),
    }


def _cut(ids: list[int], length: int) -> list[int]:
    """At most so many, the last one its end-of-sequence id."""
    return ids if len(ids) <= length else [*ids[: length - 1], ids[-1]]


def _padded(rows: list[list[int]], value: int, device: torch.device) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows], device=device)


@torch.no_grad()
def judged(
    job: TextToSQL, model: Any, tokenizer: TextTokenizer, items: list[dict[str, Any]], device: torch.device
) -> dict[str, float]:
    """bleu, exact and loss of the validation items; answers are written greedily."""
    from sacrebleu import corpus_bleu

    model.eval()
    written, sums, tokens = [], 0.0, 0
    for start in range(0, len(items), AT_ONCE):
        given = batch(job, tokenizer, items[start : start + AT_ONCE], device)
        logits = model(**given).logits.float()
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), given["labels"], ignore_index=IGNORED, reduction="sum"
        )
        sums, tokens = sums + losses.double().item(), tokens + int((given["labels"] != IGNORED).sum())
        ids = model.generate(
            input_ids=given["input_ids"], attention_mask=given["attention_mask"], max_new_tokens=job.target_length,
            do_sample=False, num_beams=1,
        )  # fmt: skip
        written += [tokenizer.inner.decode(row, skip_special_tokens=True).strip() for row in ids.tolist()]
    right = [item["answer"].strip() for item in items]
    exact = sum(one == other for one, other in zip(written, right, strict=True)) / len(right)
    return {"bleu": corpus_bleu(written, [right]).score, "exact": exact, "loss": sums / tokens}


def speed(job: TextToSQL, inputs: Inputs, machine: Machine) -> Result:
    """Updates a second, on a GPU."""
    from paperlm.jobs.stored_speed import timed

    device, tokenizer = machine.torch_device(), TextTokenizer(job.tokenizer)
    step = updates(job, build(job, tokenizer, device), tokenizer, read_items(inputs.data[0], "train"), device)
    torch.cuda.reset_peak_memory_stats(device)
    numbers = itertools.cycle(range(job.steps))
    seconds = timed(lambda: step(next(numbers)), 20, lambda: torch.cuda.synchronize(device))
    return Result(
        outcome="measured",
        metrics={
            "iterations_per_second": 1 / sorted(seconds)[len(seconds) // 2],
            "peak_bytes": torch.cuda.max_memory_allocated(device),
        },
    )


def _stored(model: Any) -> list[Any]:
    from paperlm_kernels.stored import stored_weights

    return list(stored_weights(model).values())
