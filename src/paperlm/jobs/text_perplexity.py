"""Perplexity of a language model on documents of a text, packed into chunks: the column PPL of BitNet's tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, model_validator

from paperlm.data.chunks import Chunks, Longer, packed_chunks
from paperlm.data.registry import DatasetName
from paperlm.data.settings import DataSettings
from paperlm.data.texts import TextData, read_documents
from paperlm.errors import JobError
from paperlm.jobs.base import Head, Inputs, KVCacheOptions, LooksAtModel, Machine
from paperlm.result import Result, Series


class TextPerplexity(LooksAtModel):
    """exp of the mean loss of a token, over all tokens of all chunks but the BOS that each begins with.

    The protocol of the public evaluation of BitNet b1.58: documents without special tokens, an EOS behind each, those
    that are longer than a chunk left out, the others packed greedily. Tokens are of the model's own tokenizer; weights
    are taken in the numbers they are stored in, losses in float32, sums in float64.
    """

    kind: ClassVar[str] = "text_perplexity"
    summary: ClassVar[str] = "perplexity of a model on documents packed into chunks"

    text: DatasetName
    "a text of the registry, whose validation documents are read"
    documents: int = Field(gt=0)
    "so many of its first"
    chunk: int = Field(gt=2)
    "tokens of a chunk at most, the BOS among them"
    longer: Longer = "drop"
    "what becomes of documents that do not fit into a chunk; drop, as published, leaves little of short chunks"
    kv_cache: KVCacheOptions = None
    "numbers of queries, keys and values, as the model's configuration has it; null: as it was trained"

    @model_validator(mode="after")
    def text_exists(self) -> TextPerplexity:
        self.data()
        return self

    def needs_head(self) -> Head:
        return "tokens"

    def data(self) -> list[DataSettings]:
        return [TextData(dataset=self.text, documents=self.documents)]

    def metrics(self) -> tuple[str, ...]:
        return ("perplexity", "loss", "tokens", "chunks", "documents", "documents_longer")

    def series(self) -> dict[str, tuple[str, ...]]:
        return {"chunks": ("chunk", "tokens", "summed_loss")}

    def slug(self) -> str:
        cache = "" if self.kv_cache is None else f"-q{self.kv_cache['q_bits']}_kv{self.kv_cache['kv_bits']}"
        return f"text_perplexity{cache}-{self.of_what()}"


def run(job: TextPerplexity, inputs: Inputs, machine: Machine) -> Result:
    """Metrics: perplexity, loss (nats a token), tokens (predicted ones), chunks, documents (read ones),
    documents_longer (than a chunk). Standard errors of the first two are over chunks. Series `chunks`: of each its
    predicted tokens and their summed loss, in order, so that two models of one tokenizer can be compared in pairs.

    Raises JobError for a model or tokenizer that does not serve, DataError for damaged documents. Losses that are no
    finite numbers make the outcome `blocked`.
    """
    import numpy as np

    from paperlm.evaluate.perplexity import perplexity
    from paperlm.finetune.measure import ratio_and_error
    from paperlm.models.folder import load_tokenizer

    folder = inputs.models["of"]
    found, labels = _chunks(job, load_tokenizer(folder), inputs.data[0])
    sums = np.array(_summed_losses(job, folder, found.ids, machine))
    counts = np.array([len(ids) - 1 for ids in found.ids])
    if not np.isfinite(sums).all():
        return Result(outcome="blocked", reason="losses of this model are no finite numbers", labels=labels)
    loss, error = ratio_and_error(sums, counts)
    ppl = perplexity(loss)
    rows = [[n, int(count), round(float(sums[n]), 4)] for n, count in enumerate(counts)]
    return Result(
        outcome="measured",
        metrics={
            "perplexity": ppl,
            "loss": loss,
            "tokens": int(counts.sum()),
            "chunks": len(found.ids),
            "documents": found.documents,
            "documents_longer": found.longer,
        },
        standard_errors={"loss": error, "perplexity": None if ppl is None else ppl * error},
        series={"chunks": Series(columns=["chunk", "tokens", "summed_loss"], rows=rows)},
        labels=labels,
    )


def _chunks(job: TextPerplexity, tokenizer: Any, documents: Path) -> tuple[Chunks, list[str]]:
    """The chunks, and what has to be said of them. JobError without a token that ends a text."""
    eos, bos, labels = tokenizer.eos_token_id, tokenizer.bos_token_id, []
    if eos is None:
        raise JobError(f"{job.of.slug()}: its tokenizer has no EOS, which stands behind each document; set eos_token")
    if bos is None:
        bos = eos
        labels.append("its tokenizer has no BOS: each chunk begins with its EOS")
    texts = tokenizer(read_documents(documents), add_special_tokens=False, verbose=False)["input_ids"]
    found = packed_chunks(([*ids, eos] for ids in texts), job.chunk, bos, job.longer)
    if found.longer:
        what = "left out" if job.longer == "drop" else "cut"
        labels.append(
            f"{found.longer} of {found.documents} documents do not fit into {job.chunk} tokens and are {what}"
        )
    return found, labels


def _summed_losses(job: TextPerplexity, folder: Path, chunks: list[list[int]], machine: Machine) -> list[float]:
    """Of each chunk, over all its tokens but the first."""
    import torch
    from tqdm import tqdm

    from paperlm.models.folder import model_with_cache
    from paperlm.probe.text import LOGITS, SEQUENCES

    device = machine.torch_device()
    model = model_with_cache(folder, job.kv_cache).to(device)
    room = LOGITS[device.type] // (model.config.vocab_size * job.chunk)
    at_once = machine.micro_batch or max(1, min(SEQUENCES, room))
    sums: list[float] = []
    starts = range(0, len(chunks), at_once)
    with torch.no_grad():
        for start in tqdm(starts, desc=job.job_id, unit="batch", disable=not machine.progress):
            rows = chunks[start : start + at_once]
            width = max(map(len, rows))
            ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
            mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].float()
            losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
            sums += (losses.double() * mask[:, 1:]).sum(1).tolist()
    return sums
