"""`paperlm bench train`: tokens per second of a whole update, ours against transformers' LlamaForCausalLM.

Both train the same shape in bfloat16 on 512 sequences of 256 tokens an update, compiled, with a fused Adam; each side
gets the micro-batch it is fastest at. Ours takes part once with each loss asked for. The timed updates of the sides
alternate, so that clocks drift for all.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from paperlm.bench.report import OURS
from paperlm.bench.rows import append, percentiles, row
from paperlm.errors import PaperLMError, SpecError, unknown
from paperlm.models.llama import PaperLlamaConfig, PaperLlamaForCausalLM
from paperlm.models.losses import FUSED, MATERIALISED, UNFILTERED
from paperlm.models.sizes import SIZES, Size, flops_per_token
from paperlm.train.loop import SummedLoss

BATCH, SEQ_LEN, VOCAB = 512, 256, 32_000
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}
"Dense bfloat16 by the vendors' datasheets."


Builder = Callable[[Size, int, torch.device], "Side"]
"Size, micro-batch and device -> a contender."


class Side:
    """One contender: a model with its optimizer, and one update."""

    def __init__(
        self, name: str, model: torch.nn.Module, loss: Callable[[torch.Tensor], torch.Tensor], micro: int
    ) -> None:
        self.name, self.model, self.loss, self.micro = name, model, loss, micro
        adam = torch.optim.Adam if name.startswith(OURS) else torch.optim.AdamW
        self.optimizer = adam(model.parameters(), lr=1e-4, fused=True)

    def update(self, ids: torch.Tensor) -> None:
        """One optimizer step over BATCH sequences in micro-batches."""
        for start in range(0, len(ids), self.micro):
            self.loss(ids[start : start + self.micro]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def ours(size: Size, micro: int, device: torch.device, loss: str = MATERIALISED) -> Side:
    """The project's decoder (Pre-LN, the wiring LlamaForCausalLM has) with one of the training loop's losses."""
    config = PaperLlamaConfig(
        vocab_size=VOCAB, hidden_size=size.hidden_size, intermediate_size=size.intermediate_size,
        num_hidden_layers=size.n_layers, num_attention_heads=size.n_heads, norm={"name": "pre_ln"},
    )  # fmt: skip
    model = PaperLlamaForCausalLM(config).to(device)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    summed = torch.compile(SummedLoss(model, loss), dynamic=False)
    scale = 1.0 / (BATCH * (SEQ_LEN - 1))
    name = OURS if loss == MATERIALISED else f"{OURS}, {loss}"
    return Side(name, model.train(), lambda ids: summed(ids, ids) * scale, micro)


def transformers_llama(size: Size, micro: int, device: torch.device) -> Side:
    """transformers' own model: compiled, SDPA attention, fused AdamW, its own loss."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=size.hidden_size, intermediate_size=size.intermediate_size,
        num_hidden_layers=size.n_layers, num_attention_heads=size.n_heads, use_cache=False, tie_word_embeddings=False,
        max_position_embeddings=2048, attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(device=device, dtype=torch.bfloat16).train()
    compiled = torch.compile(model, dynamic=False)
    scale = micro / BATCH
    name = f"transformers {transformers.__version__}"
    return Side(name, model, lambda ids: compiled(input_ids=ids, labels=ids).loss * scale, micro)


def timed(side: Side, ids: torch.Tensor, updates: int) -> list[float]:
    """Seconds of each of `updates` updates."""
    seconds = []
    for _ in range(updates):
        torch.cuda.synchronize()
        start = time.perf_counter()
        side.update(ids)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def bench_train(
    sizes: list[str],
    out: Path | None,
    seconds: float,
    micro_batches: list[int],
    losses: Sequence[str] = (MATERIALISED,),
) -> None:
    """Measure, print a table with ratios to the peer, append rows to `out`. Raises PaperLMError without a GPU."""
    for name in sizes:
        if name not in SIZES:
            raise SpecError(unknown("model size", name, SIZES))
    for loss in losses:
        if loss not in (MATERIALISED, *FUSED):
            raise SpecError(unknown("loss", loss, [MATERIALISED, *FUSED]))
        if loss not in UNFILTERED:
            # A filter skips nearly everything in a model that has learnt nothing.
            raise SpecError(f"{loss} is filtered: on random ids its speed means nothing; give {', '.join(UNFILTERED)}")
    builders: list[Builder] = [functools.partial(ours, loss=loss) for loss in losses] + [transformers_llama]
    if not torch.cuda.is_available():
        raise PaperLMError("bench train needs a CUDA GPU: a CPU's training speed is in each record (tokens_per_second)")
    device = torch.device("cuda")
    card = torch.cuda.get_device_name()
    console = Console(width=120)
    table = Table(title=f"training throughput on {card}, {BATCH} x {SEQ_LEN} tokens an update, bfloat16")
    for column in ("size", "side", "micro-batch", "tokens/s", "20th-80th", "of peak", "ratio"):
        table.add_column(column, justify="right")
    rows: list[dict[str, Any]] = []
    for name in sizes:
        ids = torch.randint(2, VOCAB, (BATCH, SEQ_LEN), device=device, generator=torch.Generator(device).manual_seed(0))
        best = [_best_micro(build, SIZES[name], ids, micro_batches, console) for build in builders]
        sides = [build(SIZES[name], micro, device) for build, micro in zip(builders, best, strict=True)]
        for side in sides:
            timed(side, ids, 3)
        times: list[list[float]] = [[] for _ in sides]
        started = time.monotonic()
        while time.monotonic() - started < seconds * len(sides) or len(times[0]) < 6:
            for side, values in zip(sides, times, strict=True):
                values += timed(side, ids, 2)
        rates = [[BATCH * SEQ_LEN / s for s in values] for values in times]
        peer = percentiles(rates[-1])[0]
        size = SIZES[name]
        per_token = flops_per_token(size.hidden_size, size.intermediate_size, size.n_layers, VOCAB, SEQ_LEN)
        peak = next((flops for key, flops in PEAK_FLOPS.items() if key in card), None)
        case = f"{name}, {BATCH} x {SEQ_LEN}, bf16"
        for side, values in zip(sides, rates, strict=True):
            value, low, high = percentiles(values)
            share = "" if peak is None else f"{value * per_token / peak:.0%}"
            table.add_row(
                name, side.name, str(side.micro), f"{value:,.0f}", f"{low:,.0f}-{high:,.0f}", share,
                f"{value / peer:.3f}" if side is not sides[-1] else "",
            )  # fmt: skip
            settings = {"micro_batch": side.micro}
            rows.append(row("pretrain", case, side.name, "throughput", "tokens/s", values, card, settings=settings))
        del sides, ids
        _clear()
    console.print(table)
    if out is not None:
        append(out, rows)
        console.print(f"rows appended to {out}")


def _best_micro(build: Builder, size: Size, ids: torch.Tensor, choices: list[int], console: Console) -> int:
    """The micro-batch with the highest throughput in a short trial; ones that do not fit are skipped."""
    if len(choices) == 1:
        return choices[0]
    speed, label = {}, "transformers" if build is transformers_llama else f"{OURS}, {build.keywords['loss']}"
    for micro in choices:
        try:
            side = build(size, micro, ids.device)
            timed(side, ids, 2)
            speed[micro] = BATCH * SEQ_LEN / min(timed(side, ids, 3))
        except torch.cuda.OutOfMemoryError:
            console.print(f"{label}: micro-batch {micro} does not fit")
        side = None
        _clear()
    console.print(f"{label}: " + ", ".join(f"{m}: {s:,.0f} tokens/s" for m, s in speed.items()))
    return max(speed, key=speed.__getitem__)


def _clear() -> None:
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.empty_cache()
