"""A contender: a model with its optimizer, and whole updates of it, timed in turns."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

import torch
from paperlm_kernels.bench import clocks
from paperlm_kernels.bench.operation import TURN, Operation, Row, Task
from paperlm_kernels.bench.ops.pretrain import CASES, OURS, PEER, Case
from paperlm_kernels.bench.rows import percentiles, short

from paperlm.models.llama import PaperLlamaConfig, PaperLlamaForCausalLM
from paperlm.models.losses import MATERIALISED
from paperlm.models.sizes import flops_per_token

if TYPE_CHECKING:
    import transformers

UPDATES = 2
"timed in a turn"


@dataclasses.dataclass
class Side:
    """One contender; `loss` of (B, S) ids is its share of the update's mean loss."""

    loss: Callable[[torch.Tensor], torch.Tensor]
    optimizer: torch.optim.Optimizer
    micro: int

    def update(self, ids: torch.Tensor) -> None:
        """One optimizer step over all sequences in micro-batches."""
        for part in ids.split(self.micro):
            self.loss(part).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class _Summed(torch.nn.Module):
    """forward(ids) -> summed loss: what training compiles."""

    def __init__(self, model: PaperLlamaForCausalLM, loss: str) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model.summed_loss(ids, ids, self.loss)


def our_model(case: Case) -> PaperLlamaForCausalLM:
    """The project's decoder (Pre-LN, the wiring LlamaForCausalLM has) in the shape of a case, float32."""
    size = case.size
    config = PaperLlamaConfig(
        vocab_size=case.vocab, hidden_size=size.hidden_size, intermediate_size=size.intermediate_size,
        num_hidden_layers=size.n_layers, num_attention_heads=size.n_heads, norm={"name": "pre_ln"},
    )  # fmt: skip
    return PaperLlamaForCausalLM(config)


def peer_model(case: Case) -> transformers.LlamaForCausalLM:
    """transformers' own model in that shape, SDPA attention, float32."""
    import transformers

    size = case.size
    config = transformers.LlamaConfig(
        vocab_size=case.vocab, hidden_size=size.hidden_size, intermediate_size=size.intermediate_size,
        num_hidden_layers=size.n_layers, num_attention_heads=size.n_heads, use_cache=False, tie_word_embeddings=False,
        max_position_embeddings=2048, attn_implementation="sdpa",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def ours(case: Case, micro: int, device: torch.device, loss: str) -> Side:
    """The project's decoder with one of its training losses."""
    model = our_model(case).to(device).train()
    for parameter in model.parameters():  # buffers keep theirs
        parameter.data = parameter.data.to(getattr(torch, case.dtype))
    summed = torch.compile(_Summed(model, loss), dynamic=False) if case.compiled else _Summed(model, loss)
    scale = 1.0 / (case.batch * (case.seq_len - 1))
    return Side(lambda ids: summed(ids) * scale, torch.optim.Adam(model.parameters(), lr=1e-4, fused=True), micro)


def transformers_llama(case: Case, micro: int, device: torch.device) -> Side:
    """transformers' own model: its own loss, fused AdamW."""
    model = peer_model(case).to(device=device, dtype=getattr(torch, case.dtype)).train()
    called = torch.compile(model, dynamic=False) if case.compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return Side(lambda ids: called(input_ids=ids, labels=ids).loss * (len(ids) / case.batch), optimizer, micro)


def rows_of(operation: Operation, task: Task) -> Generator[Row | None, bool | None, None]:
    """The throughput of a method, over as many turns as there are; or that no micro-batch fits."""
    device, case = torch.device(task.device), task.sized(CASES)
    torch.manual_seed(task.seed)
    name = clocks.device_name(device)
    generator = torch.Generator(device).manual_seed(task.seed)
    ids = torch.randint(2, case.vocab, (case.batch, case.seq_len), device=device, generator=generator)

    def build(micro: int) -> Side:
        if task.method == PEER:
            return transformers_llama(case, micro, device)
        loss = MATERIALISED if task.method == OURS else task.method.removeprefix(f"{OURS}_")
        return ours(case, micro, device, loss)

    # the usual ones need not divide a small batch, which is then one
    choices = [micro for micro in task.options["micro_batches"] if case.batch % micro == 0] or [case.batch]
    speeds = _speeds(build, ids, choices) if len(choices) > 1 else dict.fromkeys(choices, 0.0)
    if not speeds:
        yield operation.outcome(task, name, f"out of memory at micro-batches of {', '.join(map(str, choices))}")
        return
    side = build(max(speeds, key=speeds.__getitem__))
    _timed(side, ids, task.warmup)
    seconds: list[float] = []
    while (yield TURN):
        if device.type == "cuda":
            _timed(side, ids, 1)  # takes the memory again that the others had meanwhile
        seconds += _timed(side, ids, UPDATES)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    rates = [case.batch * case.seq_len / taken for taken in seconds]
    size = case.size
    flops = flops_per_token(size.hidden_size, size.intermediate_size, size.n_layers, case.vocab, case.seq_len)
    settings = {"micro_batch": side.micro, "compiled": case.compiled}
    tflops = short(percentiles(rates)[0] * flops / 1e12)
    yield operation.row(task, name, "throughput", "tokens/s", rates, settings=settings, tflops=tflops)


def _timed(side: Side, ids: torch.Tensor, updates: int) -> list[float]:
    """Seconds of each of `updates` updates."""
    seconds = []
    for _ in range(updates):
        clocks.synchronize(ids.device)
        start = time.perf_counter()
        side.update(ids)
        clocks.synchronize(ids.device)
        seconds.append(time.perf_counter() - start)
    return seconds


def _speeds(build: Callable[[int], Side], ids: torch.Tensor, choices: list[int]) -> dict[int, float]:
    """Tokens a second of each micro-batch in a short trial, without those that do not fit."""
    speeds: dict[int, float] = {}
    for micro in choices:
        try:
            side = build(micro)
            _timed(side, ids, 2)
            speeds[micro] = ids.numel() / min(_timed(side, ids, 3))
        except RuntimeError as error:
            if not clocks.out_of_memory(error):
                raise
        side = None
        gc.collect()
        torch._dynamo.reset()
        if ids.is_cuda:
            torch.cuda.empty_cache()
    return speeds
