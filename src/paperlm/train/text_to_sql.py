"""Training and judgement of a T5 that writes SQL. What is special: one backward pass is an update (LOMO).

With an adapter (QLoRA) the weights are frozen, in bitsandbytes' types, and ordinary descent trains peft's matrices
beside them.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from paperlm_kernels.stored import LomoSgd, named_plain_tensors, stored_weights

from paperlm.data.items import read_items
from paperlm.data.tokenizer import TextTokenizer
from paperlm.errors import DataError
from paperlm.evaluate.bleu import bleu
from paperlm.jobs.base import Inputs, Machine
from paperlm.jobs.pretrain import OF_WEIGHTS
from paperlm.models.folder import load_model, save_model, transformers_tokenizer
from paperlm.result import Result, Series
from paperlm.train import qlora
from paperlm.train.distributed import start_world
from paperlm.train.engine import Batch, Engine
from paperlm.train.language_model import of_weights, store_weights
from paperlm.train.repeatable import repeatable

if TYPE_CHECKING:
    from paperlm.jobs.text_to_sql import Questions, TextToSQL

IGNORED = -100
AT_ONCE = 50
"Questions that are answered together."


def build(job: TextToSQL, tokenizer: TextTokenizer, device: torch.device, published: Path | None) -> Any:
    """The model at update 0, without dropout, its weights in stores; `published`: folder of the one that the job is
    `of`. Raises JobError for an unusable folder."""
    from transformers import T5ForConditionalGeneration

    torch.manual_seed(job.seed)
    if published is not None:
        model = load_model(published, head="own", dtype=torch.bfloat16, dropout_rate=0.0)
    else:
        config = shape_of(job, tokenizer)
        model = drawn_on(device, config) if job.timed else T5ForConditionalGeneration(config)
    model = model.bfloat16().to(device).train()
    store_weights(job, model)
    return model


def shape_of(job: TextToSQL, tokenizer: TextTokenizer) -> Any:
    """The configuration of a T5 with fresh weights."""
    from transformers import T5Config

    return T5Config(
        vocab_size=job.vocab_size, d_model=job.hidden_size, d_ff=job.intermediate_size, d_kv=job.head_size,
        num_layers=job.n_layers, num_heads=job.n_heads, dropout_rate=0.0, pad_token_id=tokenizer.pad,
        eos_token_id=tokenizer.eos, decoder_start_token_id=tokenizer.pad,
    )  # fmt: skip


def drawn_on(device: torch.device, config: Any) -> Any:
    """A T5 whose weights are drawn on the device, in bfloat16. Other weights than a CPU draws of the same seed, but of
    the same distribution, and updates that are timed depend on no more; a CPU takes minutes to draw 11 billion."""
    from transformers import AutoModelForSeq2SeqLM

    with device:
        return AutoModelForSeq2SeqLM.from_config(config, dtype=torch.bfloat16)


def build_adapter(
    job: TextToSQL, tokenizer: TextTokenizer, device: torch.device, published: Path | None, room: Path
) -> tuple[Any, int]:
    """`qlora.build` beside the model that the job is `of`; of a timed job without one beside weights that are drawn,
    which lie in `room` until bitsandbytes has read them, as it would read published ones."""
    if published is not None:
        return qlora.build(published, job.adapter, job.seed, device)
    room.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=room) as folder:
        torch.manual_seed(job.seed)
        drawn_on(device, shape_of(job, tokenizer)).save_pretrained(folder)
        return qlora.build(Path(folder), job.adapter, job.seed, device)


class Answering(torch.nn.Module):
    """forward(input_ids, attention_mask, labels) -> the mean loss of the target tokens: what the engine calls."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, attention_mask=mask, labels=labels).loss


class WritingSQL:
    """The task of the engine. An update is one batch in one backward pass; order and batches follow from the seed."""

    compiles = False  # a stored weight is decoded, by code that is not traced

    def __init__(self, job: TextToSQL, inputs: Inputs, device: torch.device) -> None:
        manifest, published = inputs.data[0], inputs.models.get("of")
        self.job, self.device, self.tokenizer = job, device, TextTokenizer(job.tokenizer)
        if self.tokenizer.pad < 0:
            raise DataError(f"tokenizer {job.tokenizer} has no padding, with which T5's decoder begins: choose another")
        self.items, self.held_out = read_items(manifest, "train"), read_items(manifest, "validation")
        if job.adapter == "none":
            self.whole = self.model = build(job, self.tokenizer, device, published)
            stored = stored_weights(self.model).values()
            self.parameters = sum(weight.store.shape.numel() for weight in stored) + sum(
                p.numel() for p in self.model.parameters()
            )
            self.optimizer = LomoSgd(self.model, job.peak_lr, fused=job.optimizer == "lomo")
        else:
            # the folder of the model that is left is cleared when a job begins again, whatever a kill left there
            room = inputs.model or inputs.work
            self.whole, self.parameters = build_adapter(job, self.tokenizer, device, published, room)
            self.model = qlora.trained(self.whole)  # what a checkpoint has to hold: the rest never changes
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=job.peak_lr)
        self.loss_module = Answering(self.whole)
        self.updates, self.evaluate_every = job.steps, job.steps
        self.micro_batch = self.slots_per_update = job.batch
        order, epochs = np.random.default_rng(job.seed), -(-job.steps * job.batch // len(self.items))
        self.rows = np.concatenate([order.permutation(len(self.items)) for _ in range(epochs)])
        self.final: dict[str, Any] = {}
        self.errors: dict[str, float | None] = {}

    def trunk(self) -> None:
        return None

    def begin(self, update: int) -> Mapping[str, float]:
        rate = self.job.peak_lr * (1 - update / self.job.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return {"lr": rate}

    def batch(self, update: int) -> Batch:
        size = self.job.batch
        chosen = [self.items[row] for row in self.rows[update * size : (update + 1) * size]]
        given = batch(self.job.held_out(), self.tokenizer, chosen, self.device)
        return Batch([(tuple(given.values()), 1.0)], size)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def clip(self) -> None:
        """Gradients stay as they are: in a fused update they are gone."""

    def evaluate(self) -> Mapping[str, float | None]:
        """Called once, behind the last update; `final` has the metrics, `errors` their standard errors."""
        found, self.errors = judged(self.job, self.whole, self.tokenizer, self.held_out, self.device)
        weights = of_weights(self.job, self.model) if self.job.adapter == "none" else qlora.of_weights(self.whole)
        self.final = {"parameters": self.parameters, **weights, **found}
        return found

    def save(self, folder: Path) -> None:
        leave(self.job, self.model, folder)


def train(job: TextToSQL, inputs: Inputs, machine: Machine) -> Result:
    """Train and evaluate, from the newest checkpoint of the job if there is one."""
    world = start_world(machine.device)
    engine = Engine(WritingSQL(job, inputs, world.device), inputs.work, machine, world)
    try:
        with repeatable(world.device):
            ended = engine.train()
    except torch.cuda.OutOfMemoryError:
        return Result(outcome="out_of_memory")
    if ended == "not_finite":
        return Result(outcome=ended, cost=engine.cost())
    if inputs.model is not None and job.adapter == "none":
        engine.hand_over(inputs.model)
    curve = [[row["update"], row["loss"]] for row in engine.curve.rows if "loss" in row]
    return Result(
        outcome=ended,
        metrics=engine.task.final | {"examples": engine.at.counted},
        standard_errors=dict.fromkeys(OF_WEIGHTS, 0.0) | engine.task.errors,  # of weights: counted, not sampled
        series={"train": Series(columns=["update", "loss"], rows=curve)},
        cost=engine.cost(),
    )


def leave(job: TextToSQL, model: Any, folder: Path) -> None:
    """Write the model with plain weights, whatever stores they lie in, and its tokenizer into `folder`."""
    plain = type(model)(model.config).bfloat16()
    own = dict(plain.named_parameters())
    for name, tensor in named_plain_tensors(model):  # two of them decoded at most
        own.pop(name).detach().copy_(tensor)
    assert not own, sorted(own)
    save_model(folder, plain, transformers_tokenizer(job.tokenizer, job.source_length))


def batch(
    read: Questions, tokenizer: TextTokenizer, items: Sequence[dict[str, Any]], device: torch.device
) -> dict[str, torch.Tensor]:
    """input_ids, attention_mask and labels, padded on the right to the longest of the batch."""
    texts = [" ".join(item[name] for name in ("context", "question") if name in item) for item in items]
    sources = [_cut(ids, read.source_length) for ids in tokenizer.encode([read.prefix + text for text in texts])]
    targets = [_cut(ids, read.target_length) for ids in tokenizer.encode([item["answer"] for item in items])]
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
) -> tuple[dict[str, float], dict[str, float | None]]:
    """bleu, exact and loss of the validation items, and the standard errors of bleu and exact over items; answers are
    written greedily. Raises StreamError if a packed weight was found damaged on the way."""
    from paperlm_kernels.neuzip import raise_decode_errors

    model.eval()
    written, sums, tokens = [], 0.0, 0
    for start in range(0, len(items), AT_ONCE):
        given = batch(job.held_out(), tokenizer, items[start : start + AT_ONCE], device)
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
    raise_decode_errors(device)
    right = [item["answer"].strip() for item in items]
    exact = sum(one == other for one, other in zip(written, right, strict=True))
    score, error = bleu(written, right)
    numbers = {"bleu": score, "exact": exact / len(right), "loss": sums / tokens}
    return numbers, {"bleu": error, "exact": error_of_share(exact, len(right))}


def error_of_share(right: int, of: int) -> float:
    """Standard error of a share of items, as if one more were right and one more wrong: where none is right, or all
    are, the plain one is 0 and the share looks certain (Agresti and Caffo 2000, who compare two shares so)."""
    share = (right + 1) / (of + 2)
    return math.sqrt(share * (1 - share) / (of + 2))


def speed(job: TextToSQL, inputs: Inputs, machine: Machine) -> Result:
    """Updates a second, on a GPU."""
    from paperlm.jobs.stored_speed import speed_of

    world = start_world(machine.device)
    engine = Engine(WritingSQL(job, inputs, world.device), inputs.work, machine, world)

    def step() -> None:
        engine.at.update %= job.steps
        engine.step()

    return speed_of(step, 20, world.device)
