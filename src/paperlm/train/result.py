"""From a finished trainer to its record."""

from __future__ import annotations

import math
import resource
from typing import TYPE_CHECKING

import torch

from paperlm.evaluate.perplexity import perplexity
from paperlm.models.sizes import flops_per_token
from paperlm.record.environment import capture
from paperlm.record.record import Cost, Outcome, Record
from paperlm.spec.run import BEHAVIOUR

if TYPE_CHECKING:
    from paperlm.train.loop import Trainer


def make_record(trainer: Trainer, outcome: Outcome) -> Record:
    """Everything a table needs, after `Trainer.train`; a run on the plateau becomes `diverged` here."""
    run, manifest = trainer.run, trainer.train_shards.manifest
    slots = trainer.update * run.global_batch * run.seq_len
    final = trainer.final
    loss_true = final.loss_true() if final else math.nan
    loss_paper = final.loss_paper(run.published_eval_batches, run.loss_group) if final else math.nan
    threshold = run.diverged.threshold(manifest["unigram_perplexity"])
    ppl_true = perplexity(loss_true) if math.isfinite(loss_true) else None
    if outcome == "trained" and (ppl_true is None or ppl_true > threshold):
        outcome = "diverged"
    per_token = flops_per_token(run.hidden_size, run.intermediate_size, run.n_layers, run.vocab_size, run.seq_len)
    metrics = {
        "ppl_true": ppl_true,
        "ppl_paper": perplexity(loss_paper) if math.isfinite(loss_paper) else None,
        "loss_true": loss_true if math.isfinite(loss_true) else None,
        "validation_tokens": int(final.counts.sum()) if final else None,
        "unigram_perplexity": manifest["unigram_perplexity"],
        "diverged_above": threshold,
        "updates": trainer.update,
        "tokens_nonpad": trainer.tokens,
        "tokens_slots": slots,
        "epochs": trainer.update * run.global_batch / len(trainer.train_shards),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
    }
    if run.curve == "every_update":
        metrics["ppl_sequences"] = final.ppl_sequences() if final else None
    on_gpu = trainer.world.device.type == "cuda"
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    timed_slots = trainer.timed_updates * run.global_batch * run.seq_len
    cost = Cost(
        wall_seconds=round(trainer.wall_seconds, 2),
        train_seconds=round(trainer.timed_seconds, 2),
        tokens_per_second=round(timed_slots / trainer.timed_seconds, 1) if trainer.timed_updates else None,
        flops=per_token * slots,
        peak_memory_mib=round(peak / 2**20, 1),
        micro_batch=trainer.micro,
        compiled=trainer.compiled,
        loss=trainer.loss,
        world_size=trainer.world.size,
        resumed_from=trainer.resumed_from,
    )
    labels = ["leaks the future: this preset's statistics span the sequence"] if run.method().leaks_future else []
    return Record(
        run_id=run.run_id,
        behaviour=BEHAVIOUR,
        run=run,
        outcome=outcome,
        metrics=metrics,
        curve=_curve(trainer),
        data={k: manifest[k] for k in ("data_id", "dataset", "licence", "checksums")},
        cost=cost,
        environment=capture(trainer.world.device),
        labels=labels,
    )


def _curve(trainer: Trainer) -> dict[str, list[list[float | None]]]:
    if trainer.curve is None:
        return {"train": [], "eval": []}
    return trainer.curve.every_update() if trainer.run.curve == "every_update" else trainer.curve.thinned()
