"""A model with its optimizer, and updates of it."""

from __future__ import annotations

import functools
import itertools
import re
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
from paperlm_kernels.bench import clocks
from paperlm_kernels.bench.cores import quiet_core
from paperlm_kernels.bench.operation import TURN, Operation, Row, Task
from paperlm_kernels.bench.ops.descent import CAP, CASES, TEXT, UPDATES, Case
from paperlm_kernels.bench.rows import percentiles
from paperlm_kernels.stored import LomoSgd, PackedStore, RawStore, convert, model_hash, weight_bytes
from torch import Tensor, nn

from paperlm.data.sources import documents
from paperlm.data.tokenizer import TextTokenizer
from paperlm.evaluate.cap import capped
from paperlm.train.repeatable import repeatable

GIB = 2**30
PHASES = {
    "decoding": re.compile(r"\bdecode_(fix4_)?kernel"),
    "encoding": re.compile(r"\b(normalizer|count|codebook|lowest|pairs|size|scan|write|fix4|patch)_kernel"),
    "others": re.compile(r"fmha|flash|sdpa", re.IGNORECASE),  # attention, whose kernels cutlass has too
    "products": re.compile(r"gemm|gemv|nvjet|cutlass|xmma|splitK", re.IGNORECASE),
}
"Phase -> names of its kernels; a kernel is of the first that fits, and of others if none does."
A_TURN = 3
"Updates that are timed in a turn, behind one that is not."
Turns = Generator[Row | None, bool | None, None]
"Rows, and the end of each turn."
STORES: dict[str, dict] = {"neuzip": {}, "neuzip keep": {}, "neuzip fix4": {"profile": "fix4"}}
"Method -> options of the packed store."


def rows_of(operation: Operation, task: Task) -> Turns:
    """Rows of a task: updates whose losses, and weights behind them, tell whether methods agree, `warmup` that are not
    timed, then A_TURN a turn that are. On a GPU under the cap."""
    device = torch.device("cuda:0" if task.device == "cuda" else task.device)
    with capped(device, CAP if device.type == "cuda" else None):
        yield from _measured(operation, task, device)


def _measured(operation: Operation, task: Task, device: torch.device) -> Turns:
    case, name = task.sized(CASES), clocks.device_name(device)
    try:
        model = fresh(case, device, task.seed)
        update = updates(model, task.method, case.rate)
        resident = _allocated(device)
        count = task.options.get("updates", UPDATES)
        texts = itertools.cycle(batches(case, device, count, task.options))
        with repeatable(device):
            losses = [update(ids).item() for ids in itertools.islice(texts, count)]
        sha256, bits = model_hash(model), weight_bytes(model).bits_per_weight or 16.0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for _ in range(task.warmup):
            update(next(texts))
        clocks.synchronize(device)
        seconds: list[float] = []
        loops: list[float] = []
        while (yield TURN):
            with quiet_core(device) as loop:
                update(next(texts))
                seconds += [_seconds(update, next(texts), device) for _ in range(A_TURN)]
                loops += [] if loop is None else [loop]
            if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < CAP * GIB:
                torch.cuda.empty_cache()  # the others may need it; the update that is not timed takes it again
        kernels: dict[str, tuple[float, float]] = {}
        if "kernels" in task.measures and device.type == "cuda":
            once = clocks.Step(lambda: next(texts), update)
            kernels = clocks.kernel_times(once, device, warmup=task.warmup, name_of=phase_of)
    except RuntimeError as error:
        if not clocks.out_of_memory(error):
            raise
        yield operation.outcome(task, name, f"out of memory{_why_full(device)}")
        return
    if "update" in task.measures:
        rate = 1 / percentiles(seconds)[0]
        extra = {"loop_us": round(percentiles(loops)[0], 1)} if loops else {}
        yield operation.row(
            task, name, "time", "ms", [1e3 * s for s in seconds], measure="update", per_second=round(rate, 4), **extra
        )
        # repr of a float tells losses apart that differ in the last bit
        yield operation.row(task, name, "loss", "nats per token", [losses[-1]], updates=len(losses), exact=repr(losses))
        # a number of a row has six digits
        short = int(sha256, 16) % 10**6
        yield operation.row(
            task, name, "weights_hash", "last six digits of sha256", [short], updates=len(losses), exact=sha256
        )
        yield operation.row(task, name, "bits_per_weight", "bits of a stored weight", [bits])
    if "kernels" in task.measures and device.type != "cuda":
        yield operation.outcome(task, name, "absent: on a CPU there are no kernels, ask for a GPU", measure="kernels")
    for phase, (ms, launches) in kernels.items():
        yield operation.row(task, name, "kernel", "ms", [ms], measure=phase, launches=launches)
    if "memory" in task.measures:
        if device.type != "cuda":
            yield operation.outcome(
                task, name, "absent: PyTorch counts what is allocated on a GPU only", measure="memory"
            )
            return
        peak = torch.cuda.max_memory_allocated(device)
        yield operation.row(task, name, "memory", "GiB", [peak / GIB], cap_gib=CAP)
        yield operation.row(task, name, "resident", "GiB", [resident / GIB])


def _seconds(update: Callable[[Tensor], Tensor], ids: Tensor, device: torch.device) -> float:
    clocks.synchronize(device)
    start = time.perf_counter()
    update(ids)
    clocks.synchronize(device)
    return time.perf_counter() - start


def _why_full(device: torch.device) -> str:
    """Whether the cap is reached, or the card is full below it."""
    if device.type != "cuda":
        return ""
    (free, total), held = torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device)
    if free + held >= CAP * GIB:
        return f": more than {CAP:g} GiB"
    if total < CAP * GIB + GIB:  # of which it could never have had all
        return ": more than the card has"
    others = (total - free - held) / GIB
    return f": the card is full, of which {others:.1f} GiB are others', as methods take turns: ask for this one alone"


def phase_of(kernel: str) -> str:
    """Phase of an update that a kernel, by its whole name, is of."""
    return next((phase for phase, names in PHASES.items() if names.search(kernel)), "others")


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def fresh(case: Case, device: torch.device, seed: int) -> nn.Module:
    """transformers' model of the case with fresh weights, bfloat16, checkpointing its activations."""
    import transformers

    torch.manual_seed(seed)
    config = getattr(transformers, f"{case.model}Config")(**case.config, use_cache=False, initializer_range=0.02)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def updates(model: nn.Module, method: str, rate: float) -> Callable[[Tensor], Tensor]:
    """ids (B, S) -> the loss of an update at this rate, which has been made. Products of all but vanilla are those
    of packed weights, for PyTorch's may add up in another order."""
    if method != "vanilla":
        options = STORES.get(method)
        store = RawStore if options is None else functools.partial(PackedStore, **options)
        convert(model, store, "paper", keep_recomputed=method.endswith("keep"))
        optimizer: torch.optim.Optimizer = LomoSgd(model, rate, fused=method != "sgd")
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def update(ids: Tensor) -> Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return update


def batches(case: Case, device: torch.device, count: int, options: Mapping[str, Any]) -> list[Tensor]:
    """The text in pieces of `seq_len` tokens by T5's tokenizer, `batch` of them at a time: `count` batches and 16 more,
    or as many as it has."""
    tokenizer, found = TextTokenizer("t5"), []
    size = case.batch * case.seq_len
    wanted = (count + 16) * size
    for text in documents(options.get("text", TEXT), "train", options.get("local_data", "")):
        found += tokenizer.encode([text])[0]
        if len(found) >= wanted:
            break
    ids = torch.tensor(found[: min(wanted, len(found) // size * size)], device=device)
    return list(ids.view(-1, case.batch, case.seq_len))
