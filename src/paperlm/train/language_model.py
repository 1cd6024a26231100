"""Language-model pre-training as a task of the engine.

What is special: each token's weight in the loss follows from the job's `loss_group`, whatever the micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from paperlm_kernels.stored import LomoSgd, PackedStore, RawStore, convert, model_hash, stored_weights, weight_bytes

from paperlm.data.shards import BatchOrder, TokenShards
from paperlm.data.tokenizer import TextTokenizer
from paperlm.errors import DataError
from paperlm.evaluate.perplexity import ValidationLosses, perplexity
from paperlm.jobs.base import Inputs, Machine
from paperlm.jobs.pretrain import DESCENT, OF_WEIGHTS
from paperlm.models.folder import save_model, transformers_tokenizer
from paperlm.models.llama import IGNORE_INDEX, PaperLlamaConfig, PaperLlamaForCausalLM
from paperlm.models.losses import MATERIALISED
from paperlm.models.quantized import fuse_norms
from paperlm.result import Result, Series
from paperlm.train import checkpoint
from paperlm.train.distributed import World, start_world
from paperlm.train.engine import Batch, Engine, Progress, run_task
from paperlm.train.schedule import rate_and_decay
from paperlm.train.task import ScheduledTask, start_dtype

if TYPE_CHECKING:
    from paperlm.jobs.continue_pretrain import ContinuePretrain
    from paperlm.jobs.pretrain import Pretrain


class SummedLoss(torch.nn.Module):
    """forward(ids, labels) -> summed loss, the shape that DistributedDataParallel and torch.compile wrap."""

    def __init__(self, model: PaperLlamaForCausalLM, loss: str = MATERIALISED) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model.summed_loss(ids, labels, self.loss)


def config_of(job: Pretrain) -> PaperLlamaConfig:
    """The model's configuration."""
    return PaperLlamaConfig(
        vocab_size=job.vocab_size,
        hidden_size=job.hidden_size,
        intermediate_size=job.intermediate_size,
        num_hidden_layers=job.n_layers,
        num_attention_heads=job.n_heads,
        max_position_embeddings=max(2048, job.seq_len),
        rms_norm_eps=job.rms_norm_eps,
        rope_theta=job.rope_theta,
        initializer_range=job.initializer_range,
        embed_init_std=job.embed_init_std,
        zero_last_embedding_row=job.zero_last_embedding_row,
        norm=job.norm,
        quantization=job.quantization,
        sub_norm=job.sub_norm,
        hidden_act=job.hidden_act,
        tie_word_embeddings=job.tie_word_embeddings,
    )


def build_model(job: Pretrain, first_batch: torch.Tensor, device: torch.device) -> PaperLlamaForCausalLM:
    """The model at update 0. first_batch: (B, S) ids, for methods that start from a forward pass."""
    torch.manual_seed(job.seed)
    model = PaperLlamaForCausalLM(config_of(job))
    fuse_norms(model, job.fused_norms)
    job.method().initialize_from_batch(model, first_batch)
    start_dtype(model, job.numerics)
    return model.to(device).train()


def decay_groups(model: torch.nn.Module, norms: bool) -> list[dict[str, Any]]:
    """The model's parameters for an optimizer: those that weight decay is on, and, without `norms`, gains and biases of
    norms apart from them."""
    exempt: list[torch.nn.Parameter] = []
    for module in model.modules() if not norms else ():
        if isinstance(weight := getattr(module, "weight", None), torch.nn.Parameter) and weight.ndim == 1:
            exempt += module.parameters(recurse=False)
    known = set(map(id, exempt))
    found = [{"params": [p for p in model.parameters() if id(p) not in known], "decays": True}]
    return [*found, {"params": exempt, "decays": False}] if exempt else found


def store_weights(job: Any, model: Any) -> None:
    """Put the weights of the projections into the job's stores, and recompute activations, as NeuZip trains.

    A weight is decoded for each of its uses: one that waited for its layer's backward would be memory that
    `state_bytes` does not count.
    """
    if job.weights != "plain":
        convert(model, {"raw": RawStore, "packed": PackedStore}[job.weights])
        recompute_activations(model)


def recompute_activations(model: Any) -> None:
    """Keep of each block its input alone, and compute the rest again for its backward pass."""
    # transformers 5.23 has another name for it
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(model, name) for name in names if hasattr(model, name))
    enable({"use_reentrant": False})


def build_optimizer(job: Pretrain, model: PaperLlamaForCausalLM) -> torch.optim.Optimizer:
    """The job's optimizer of all parameters."""
    if job.optimizer in DESCENT:
        return LomoSgd(model, job.peak_lr, fused=job.optimizer == "lomo")
    optimizer = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[job.optimizer]
    groups = decay_groups(model, job.decay_norms)
    return optimizer(groups, lr=job.peak_lr, betas=job.adam_betas, eps=job.adam_eps, fused=True)


class LanguageModelling(ScheduledTask):
    """Next-token prediction on prepared shards. Raises DataError if the shards are not those of the job.

    A job that continues another one gets `trunk`, the folder with the state of training that it goes on from.
    """

    def __init__(
        self,
        job: Pretrain | ContinuePretrain,
        manifest: Path,
        micro_batch: int,
        world: World,
        trunk: Path | None = None,
    ) -> None:
        self.job, self.world, self.trunk_folder = job, world, trunk
        self.settings = job = job.settings()
        self.train_shards = TokenShards(manifest, "train")
        self.validation_shards = TokenShards(manifest, "validation")
        settings, wanted = self.train_shards.manifest["settings"], job.token_data().model_dump(mode="json")
        if settings != wanted:
            wrong = [k for k, v in wanted.items() if settings.get(k) != v]
            raise DataError(f"{manifest}: prepared for other settings ({', '.join(wrong)}); run the data rule again")
        self.updates, self.evaluate_every = job.steps, job.eval_every
        self.slots_per_update = job.global_batch * job.seq_len
        self.micro_batch = self._micro_batch(micro_batch)
        self.order = BatchOrder(len(self.train_shards), job.global_batch, job.seed)
        first = torch.from_numpy(self.train_shards.rows(self.order.indices(0))[: job.loss_group])
        self.model = build_model(job, first, world.device)
        self.loss_module = SummedLoss(self.model, job.loss)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        store_weights(job, self.model)
        self.compiles = job.weights == "plain"  # a stored weight is decoded, by code that is not traced
        self.optimizer = build_optimizer(job, self.model)
        self.final: ValidationLosses | None = None

    def trunk(self) -> Progress | None:
        if self.trunk_folder is None:
            return None
        state = checkpoint.read(self.trunk_folder, self.job.of, self.model, self.optimizer)
        return Progress(state["update"], state["counted"])

    def begin(self, update: int) -> Mapping[str, float]:
        rate, decay = rate_and_decay(update, self.settings)
        if (held := getattr(self.job, "rate_held_at", None)) is not None:
            rate, _ = rate_and_decay(min(update, held), self.settings)
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = rate, decay if group.get("decays") else 0.0
        return {"lr": rate, "weight_decay": decay}

    def _micro_batch(self, wish: int) -> int:
        """Sequences per forward pass: the loss group on a CPU, up to 64k tokens on a GPU, or as wished."""
        per_rank = self.share()
        if self.settings.optimizer == "lomo":
            # one backward pass an update, in which it is made: gradients of parts cannot be added up
            if wish not in (0, per_rank) or self.world.size > 1:
                raise DataError(
                    f"optimizer lomo takes the {self.settings.global_batch} sequences of an update in one pass of one "
                    "process: leave --micro-batch out and start without torchrun"
                )
            return per_rank
        largest = math.gcd(self.settings.loss_group, per_rank)
        if wish:
            if wish < 1 or largest % wish:
                raise DataError(
                    f"micro_batch {wish} must divide the loss group {self.settings.loss_group} and the {per_rank} "
                    f"sequences of a process: choose a divisor of {largest}"
                )
            return wish
        if self.world.device.type == "cuda":
            while largest % 2 == 0 and largest * self.settings.seq_len > 65_536:
                largest //= 2
        return largest

    def _labels(self, ids: np.ndarray) -> np.ndarray:
        return np.where(ids == self.train_shards.pad_id, IGNORE_INDEX, ids)

    def batch(self, update: int) -> Batch:
        ids = self.train_shards.rows(self.order.indices(update))
        labels = self._labels(ids)
        counted = (labels[:, 1:] != IGNORE_INDEX).sum(1)
        group = np.arange(len(ids)) // self.settings.loss_group
        per_group = np.maximum(1, np.bincount(group, counted))
        weights = 1.0 / (per_group[group] * len(per_group))
        share = self.share()
        start = self.world.rank * share
        parts = []
        for i in range(start, start + share, self.micro_batch):
            rows = slice(i, i + self.micro_batch)
            parts.append(((self.to_device(ids[rows]), self.to_device(labels[rows])), float(weights[i])))
        return Batch(parts, int((ids != self.train_shards.pad_id).sum()))

    @torch.no_grad()
    def evaluate(self) -> Mapping[str, float | None]:
        """Perplexity over every validation example, shared out over the processes; `final` holds the losses."""
        self.model.eval()
        shards = self.validation_shards
        rows = np.arange(self.world.rank, len(shards), self.world.size)
        sums, counts = [], []
        for start in range(0, len(rows), batch := max(self.micro_batch, 8)):
            ids = shards.rows(rows[start : start + batch])
            labels = self._labels(ids)
            with self.autocast():
                losses = self.model.token_losses(self.to_device(ids), self.to_device(labels))
            sums.append(losses.double().sum(1).cpu().numpy())
            counts.append((labels[:, 1:] != IGNORE_INDEX).sum(1))
        self.model.train()
        whole = ValidationLosses(np.zeros(len(shards)), np.zeros(len(shards), dtype=np.int64))
        empty = [np.zeros(0)]
        parts = self.world.gather((rows, np.concatenate(sums or empty), np.concatenate(counts or empty)))
        for indices, part_sums, part_counts in parts:
            whole.sums[indices], whole.counts[indices] = part_sums, part_counts
        self.final = whole
        return {"ppl_true": perplexity(whole.loss_true()), "ppl_sequences": whole.ppl_sequences()}

    def save(self, folder: Path) -> None:
        save_model(folder, self.model, transformers_tokenizer(self.settings.tokenizer, self.settings.seq_len))


def pretrain(job: Pretrain | ContinuePretrain, inputs: Inputs, machine: Machine) -> Result | None:
    """Train and evaluate; the result on the leading process, None on the others."""
    world, trunk = start_world(machine.device), inputs.models.get("of")
    build = lambda micro: LanguageModelling(job, inputs.data[0], micro, world, trunk)  # noqa: E731
    engine, ended = run_task(build, inputs.work, machine, world, inputs.keep)
    if not world.leads:
        return None
    if ended == "trained" and inputs.model is not None:
        engine.hand_over(inputs.model)
    return _result(job, engine, ended)


def _result(made: Pretrain | ContinuePretrain, engine: Engine, ended: str) -> Result:
    task: LanguageModelling = engine.task
    job = made.settings()
    manifest, final, updates = task.train_shards.manifest, task.final, engine.at.update
    losses = (final.loss_true(), final.loss_batches(job.loss_group)) if final else (math.nan, math.nan)
    finite = [loss if math.isfinite(loss) else None for loss in losses]
    metrics = {
        "ppl_true": perplexity(losses[0]) if finite[0] is not None else None,
        "loss_true": finite[0],
        "loss_batches": finite[1],
        "validation_tokens": int(final.counts.sum()) if final else None,
        "unigram_perplexity": manifest["unigram_perplexity"],
        "updates": updates,
        "tokens_nonpad": engine.at.counted,
        "tokens_slots": updates * task.slots_per_update,
        "epochs": updates * job.global_batch / len(task.train_shards),
        "parameters": task.parameters,
    }
    if job.optimizer in DESCENT:
        metrics |= of_weights(job, task.model) | by_word(job, task.validation_shards, final)
    if job.curve == "every_update":
        metrics["ppl_sequences"] = final.ppl_sequences() if final else None
    per_token = job.flops_of_a_token(job.seq_len)
    leaks = ["leaks the future: this preset's statistics span the sequence"] if job.method().leaks_future else []
    return Result(
        outcome=ended,
        metrics=metrics,
        # counted, not sampled
        standard_errors={name: 0.0 for name in OF_WEIGHTS if metrics.get(name) is not None},
        series=_series(job, engine),
        cost=engine.cost(per_token, made.begins_at),
        labels=leaks,
        model_labels=leaks,
    )


def of_weights(job: Any, model: torch.nn.Module) -> dict[str, float | int | None]:
    """Exact bytes, and 48 bits of the hash of all weights: equal numbers are equal weights, bit for bit."""
    for weight in stored_weights(model).values():
        weight.store.renew()  # so that a run that was killed has the bytes of an unbroken one
    found = weight_bytes(model)
    return {
        "weight_bytes": found.total,
        "state_bytes": found.in_training(fused=job.optimizer == "lomo"),
        "bits_per_weight": found.bits_per_weight,
        "weights_hash": int(model_hash(model)[:12], 16),
    }


def by_word(job: Pretrain, shards: TokenShards, final: ValidationLosses | None) -> dict[str, float | int | None]:
    """Words of the held-out text, and its loss by them, which does not depend on how a tokenizer cuts words."""
    words = TextTokenizer(job.tokenizer).words(shards.rows(np.arange(len(shards))).tolist())
    loss = final.loss_word(words) if final and words else math.nan
    return {"validation_words": words, "loss_word": loss if math.isfinite(loss) else None}


def _series(job: Pretrain, engine: Engine) -> dict[str, Series]:
    every = job.curve == "every_update"
    names = ("ppl_true", "ppl_sequences") if every else ("ppl_true",)
    points = engine.curve.training(None if every else POINTS) if engine.curve else []
    evaluations = engine.curve.evaluations(names) if engine.curve else []
    return {
        "train": Series(columns=["update", "tokens", "loss"], rows=points),
        "eval": Series(columns=["update", "tokens", *names], rows=evaluations),
    }


POINTS = 160
"Points of a thinned curve: enough for a figure, a few kB in a record."
