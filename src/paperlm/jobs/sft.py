"""Supervised fine-tuning: a language model trained on instructions with answers, or on chosen answers, by trl."""

from __future__ import annotations

import time
from typing import Any, ClassVar, Literal

from pydantic import Field

from paperlm.data.settings import DataSettings
from paperlm.errors import DataError, JobError
from paperlm.finetune import examples as texts
from paperlm.finetune.settings import Training, named_after
from paperlm.jobs.base import Head, Inputs, Job, Machine, parent
from paperlm.result import Result, Series


class SFT(Training):
    """Every weight is trained to predict the next token of prompt and answer, or of the answer alone."""

    kind: ClassVar[str] = "sft"
    priority: ClassVar[int] = 1
    summary: ClassVar[str] = "fine-tunes a language model on instructions or on chosen answers (trl's SFTTrainer)"
    leaves_model: ClassVar[bool] = True

    of: parent("pretrain", "hub_model")
    "model to start from"
    examples: int = Field(gt=0)
    "at most so many of its training items"
    validation_examples: int = Field(gt=1)
    """at most so many of its validation items, for the held-out loss; where validation_split is train_split, so many of
    its last items"""
    template: Literal["llm_adapters", "chosen"]
    """llm_adapters: instruction, input, output in the Alpaca format of LLM-Adapters; chosen: prompt and chosen answer
    of preference pairs as a dialogue, at most half a block for each"""
    block: int = Field(gt=1)
    "longest text in ids; the specs take the length of pre-training, behind which the model saw no position"
    loss_on: Literal["sequence", "answer"]
    "which tokens the loss counts: all but the first, or those of the answer"
    cut: Literal["end", "start"] = "end"
    "what a longer llm_adapters text loses; end, as LLM-Adapters cuts, takes the answer away first"
    packing: bool = False
    """texts share blocks, filled by trl (best fit, decreasing), and do not see each other: only for models that read
    the borders from position ids, as transformers' own do; others are refused"""
    loss: Literal["plain"] = "plain"
    "plain: the cross-entropy of trl, summed over chunks of tokens"
    eval_every: int = Field(0, ge=0)
    "held-out loss after every so many updates; 0: before the first and after the last only"

    def needs_head(self) -> Head:
        return "tokens"

    def data(self) -> list[DataSettings]:
        fields = ("instruction", "output") if self.template == "llm_adapters" else ("chosen", "rejected")
        if self.train_split != self.validation_split:
            return [self.items(self.examples, self.validation_examples, *fields)]
        return [self.items(None, None, *fields)]  # the set has one split: its last items are held out

    def metrics(self) -> tuple[str, ...]:
        return (
            "train_loss", "eval_loss", "eval_ppl", "eval_loss_before", "updates", "tokens", "examples",
            "examples_left_out", "cut_share", "eval_examples", "eval_examples_seen",
        )  # fmt: skip

    def series(self) -> dict[str, tuple[str, ...]]:
        return {"train": ("update", "loss", "lr"), "eval": ("update", "loss", "ppl")}

    def most(self) -> tuple[int, int, int]:
        return self.examples, 1, self.block

    def slug(self) -> str:
        return named_after(self, self.of)


def run(job: Job, inputs: Inputs, machine: Machine) -> Result:
    """Train and leave the model; metrics are token losses in nats, of the tokens that `loss_on` names.

    Raises DataError for a bad item, JobError for a model that cannot be read, Interrupted and CheckpointError.
    """
    assert isinstance(job, SFT)
    started = time.monotonic()
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from paperlm.evaluate.perplexity import perplexity
    from paperlm.finetune.common import Checkpointed, arguments, cast, train
    from paperlm.finetune.measure import keeps_texts_apart, ratio_and_error, token_losses
    from paperlm.models.folder import load_model, load_tokenizer, save_model

    class Trainer(Checkpointed, SFTTrainer):
        pass

    tokenizer = load_tokenizer(inputs.models["of"])
    train_items, validation_items = _items(job, inputs)
    examples, left_out = _examples(job, tokenizer, train_items)
    held_out, _ = _examples(job, tokenizer, validation_items)
    learned = [e for e in examples if job.loss_on == "sequence" or e.answer < len(e.ids)]
    measured = [e for e in held_out if job.loss_on == "sequence" or e.answer < len(e.ids)]
    _require(job, learned, measured)
    rows = [{"input_ids": e.ids, "labels": _targets(job, e.ids, e.answer)} for e in learned]
    device = machine.torch_device()

    def held_out_loss(model: Any) -> list[float]:
        sums, counts = token_losses(model, measured, job.loss_on == "answer", job.numerics)
        return list(ratio_and_error(sums, counts))

    def build(micro: int) -> Trainer:
        special = {"max_length": job.block, "packing": job.packing}
        options = arguments(SFTConfig, job, device, inputs.work, updates, micro, job.batch, **special)
        model = cast(load_model(inputs.models["of"]), job.numerics)
        if job.packing and not keeps_texts_apart(model):
            raise JobError(f"{job.of.slug()}: this model would mix the texts of a packed block; set packing: false")
        dataset = Dataset.from_list(rows)
        return Trainer(model=model, args=options, train_dataset=dataset, processing_class=tokenizer)

    updates = job.updates(_blocks(rows, job.block) if job.packing else len(rows))
    trained = train(
        build,
        job,
        inputs,
        machine,
        updates=updates,
        rows=job.batch,
        width=job.block,
        started=started,
        evaluate=held_out_loss,
        every=job.eval_every,
    )
    if trained.model is None:
        return Result(outcome="out_of_memory", cost=trained.cost)
    evaluations = trained.held_out("loss", "standard_error")
    finite = trained.finite and evaluations.column("loss")[-1] is not None
    if finite:
        save_model(inputs.model, trained.model, tokenizer)
    loss = evaluations.column("loss")[-1] if finite else None
    metrics = {
        "train_loss": trained.final("loss", 0.1),
        "eval_loss": loss,
        "eval_ppl": None if loss is None else perplexity(loss),
        "eval_loss_before": evaluations.column("loss")[0],
        "updates": trained.updates,
        "tokens": trained.tokens,
        "examples": len(learned),
        "examples_left_out": left_out + len(examples) - len(learned),
        "cut_share": sum(e.cut for e in examples) / len(examples),
        "eval_examples": len(measured),
        "eval_examples_seen": _seen(learned, measured),
    }
    return Result(
        outcome="trained" if finite else "not_finite",
        metrics=metrics,
        standard_errors={"eval_loss": evaluations.column("standard_error")[-1]} if finite else {},
        series={"train": trained.series(loss="loss", lr="learning_rate"), "eval": _with_perplexity(evaluations)},
        cost=trained.cost,
        labels=_labels(metrics),
    )


def _items(job: SFT, inputs: Inputs) -> tuple[texts.Items, texts.Items]:
    """Items to train on, and items held out."""
    items = texts.placed_items(inputs.data[0], job.train_split)
    if job.train_split != job.validation_split:
        return items, texts.placed_items(inputs.data[0], job.validation_split)
    kept = len(items) - job.validation_examples
    if kept < 1:
        raise DataError(f"{inputs.data[0]}: {len(items)} items; holding {job.validation_examples} out leaves none")
    return items[: min(kept, job.examples)], items[kept:]


def _examples(job: SFT, tokenizer: Any, items: texts.Items) -> tuple[list[texts.Example], int]:
    """Examples, and how many pairs were left out because their prompt fills more than half a block."""
    if job.template == "llm_adapters":
        found = texts.instructions(items)
        return [texts.encode_instruction(tokenizer, prompt, answer, job.block, job.cut) for prompt, answer in found], 0
    half = job.block // 2
    chosen = [(texts.encode(tokenizer, pair.prompt), pair.chosen) for pair in texts.pairs(items)]
    kept = [texts.encode_answer(tokenizer, prompt, answer, half) for prompt, answer in chosen if len(prompt) <= half]
    return kept, len(chosen) - len(kept)


def _require(job: SFT, learned: list[texts.Example], measured: list[texts.Example]) -> None:
    for split, found in (("training", learned), ("validation", measured)):
        if len(found) < 2:
            raise DataError(
                f"{job.dataset}: {len(found)} {split} examples fit into a block of {job.block} ids; raise block, or "
                "set cut: start to keep the answers"
            )


def _targets(job: SFT, ids: list[int], answer: int) -> list[int]:
    return ids if job.loss_on == "sequence" else [-100] * answer + ids[answer:]


def _blocks(rows: list[dict[str, list[int]]], block: int) -> int:
    from datasets import Dataset
    from trl.data_utils import pack_dataset

    return len(pack_dataset(Dataset.from_list(rows), block, "bfd"))


def _seen(learned: list[texts.Example], measured: list[texts.Example]) -> int:
    known = {tuple(e.ids) for e in learned}
    return sum(tuple(e.ids) in known for e in measured)


def _with_perplexity(evaluations: Series) -> Series:
    from paperlm.evaluate.perplexity import perplexity

    rows = [[update, loss, None if loss is None else perplexity(loss)] for update, loss, _ in evaluations.rows]
    return Series(columns=["update", "loss", "ppl"], rows=rows)


def _labels(metrics: dict[str, Any]) -> list[str]:
    labels = []
    if metrics["cut_share"] > 0:
        labels.append(f"{100 * metrics['cut_share']:.0f} % of the training texts were cut to the block")
    if metrics["eval_examples_seen"]:
        labels.append(f"{metrics['eval_examples_seen']} held-out texts are among those trained on")
    return labels
