"""A model with its optimizer, and updates of it."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator

import torch
from paperlm_kernels.bench import clocks
from paperlm_kernels.bench.operation import Operation, Row, Task
from paperlm_kernels.bench.ops.descent import CAP, Case, sized
from paperlm_kernels.bench.rows import percentiles
from paperlm_kernels.stored import LomoSgd, PackedStore, RawStore, convert
from torch import Tensor, nn

from paperlm.data.sources import documents
from paperlm.data.tokenizer import TextTokenizer
from paperlm.train.repeatable import repeatable

LR = 0.1
"One of the rates the paper sweeps (section 4.1: 1e-3 to 3e-1)."
AGREED = 3
"Updates before all others, whose losses are reported: as many for every method, whatever is timed."
GIB = 2**30
STORES: dict[str, dict] = {"neuzip": {}, "neuzip keep": {}, "neuzip fix4": {"profile": "fix4"}}
"Method -> options of the packed store."


def rows_of(operation: Operation, task: Task) -> Iterator[Row]:
    """Rows of a task: AGREED updates whose losses tell whether methods agree, `warmup` that are not timed, then
    `repeats` that are. On a GPU under the cap."""
    # a GPU with its index, which the allocator's functions ask for
    device, case = torch.device("cuda:0" if task.device == "cuda" else task.device), sized(task)
    name = clocks.device_name(device)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, CAP * GIB / total), device)
    try:
        model = fresh(case, device, task.seed)
        update = updates(model, task.method)
        resident = _allocated(device)
        texts = itertools.cycle(batches(case, device))
        with repeatable(device):
            losses = [update(ids).item() for ids in itertools.islice(texts, AGREED)]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds = []
        for step in range(task.warmup + task.repeats):
            ids = next(texts)
            clocks.synchronize(device)
            start = time.perf_counter()
            update(ids)
            clocks.synchronize(device)
            if step >= task.warmup:
                seconds.append(time.perf_counter() - start)
    except RuntimeError as error:
        if not clocks.out_of_memory(error):
            raise
        yield operation.outcome(task, name, f"out of memory: more than {CAP:g} GiB")
        return
    if "update" in task.measures:
        rate = 1 / percentiles(seconds)[0]
        yield operation.row(
            task, name, "time", "ms", [1e3 * s for s in seconds], measure="update", per_second=round(rate, 4)
        )
        # repr of a float tells losses apart that differ in the last bit
        yield operation.row(task, name, "loss", "nats per token", [losses[-1]], updates=len(losses), exact=repr(losses))
    if "memory" in task.measures:
        if device.type != "cuda":
            yield operation.outcome(
                task, name, "absent: PyTorch counts what is allocated on a GPU only", measure="memory"
            )
            return
        peak = torch.cuda.max_memory_allocated(device)
        yield operation.row(task, name, "memory", "GiB", [peak / GIB], cap_gib=CAP)
        yield operation.row(task, name, "resident", "GiB", [resident / GIB])


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


def updates(model: nn.Module, method: str) -> Callable[[Tensor], Tensor]:
    """ids (B, S) -> the loss of an update, which has been made. LOMO's products are those of packed weights, for
    PyTorch's may add up in another order."""
    if method != "vanilla":
        options = STORES.get(method)
        store = RawStore if options is None else functools.partial(PackedStore, **options)
        convert(model, store, "paper", keep_recomputed=method.endswith("keep"))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR) if method == "vanilla" else LomoSgd(model, LR)

    def update(ids: Tensor) -> Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return update


def batches(case: Case, device: torch.device) -> list[Tensor]:
    """Text of the bundled sample of C4 in pieces of `seq_len` tokens by T5's tokenizer, `batch` of them at a time."""
    tokenizer, found = TextTokenizer("t5"), []
    wanted = 16 * case.batch * case.seq_len
    for text in documents("bundled:c4_sample", "train"):
        found += tokenizer.encode([text])[0]
        if len(found) >= wanted:
            break
    ids = torch.tensor(found[:wanted], device=device)
    return list(ids.view(-1, case.batch, case.seq_len))
