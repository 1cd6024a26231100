"""A model with its caches filled, and rounds of tokens of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import torch
from paperlm_kernels.bench import clocks
from paperlm_kernels.bench.operation import Operation, Row, Task
from paperlm_kernels.bench.ops.decode import CASES, PEER, PEER_COMPILED, PRESET, Case
from torch import Tensor

from paperlm.models.decoding import FAST_HEADS, PackedDecoder
from paperlm.models.llama import PaperLlamaConfig
from paperlm.quantizers.presets import PRESETS

GIB = 2**30
KV_BITS = {"ours": None, "ours_kv4": 4, "ours_kv3": 3}
"Method -> bits of keys and values."


class RandomWeights:
    """Weights of a shape, drawn as they are asked for: of the size that the model's are."""

    def __init__(self, case: Case, device: torch.device, seed: int) -> None:
        self.width, self.inner, self.vocab = case.size.hidden_size, case.size.intermediate_size, case.vocab
        self.device, self.generator = device, torch.Generator(device).manual_seed(seed)

    def ternary(self, name: str) -> tuple[Tensor, Tensor]:
        rows = self.inner if name.endswith(("gate_proj", "up_proj")) else self.width
        columns = self.inner if name.endswith("down_proj") else self.width
        codes = torch.randint(-1, 2, (rows, columns), generator=self.generator, device=self.device, dtype=torch.int8)
        return codes, torch.tensor(1 / math.sqrt(columns), device=self.device)

    def plain(self, name: str) -> Tensor:
        if name == "model.embed_tokens.weight":
            return torch.randn(self.vocab, self.width, generator=self.generator, device=self.device)
        return torch.ones(self.inner if name.endswith("mlp.sub_norm.weight") else self.width, device=self.device)


class Ours:
    """Our decoder, with random keys and values in its caches."""

    def __init__(self, case: Case, method: str, device: torch.device, seed: int) -> None:
        size, bits = case.size, KV_BITS[method]
        config = PaperLlamaConfig(
            hidden_size=size.hidden_size, intermediate_size=size.intermediate_size, num_hidden_layers=size.n_layers,
            num_attention_heads=size.n_heads, vocab_size=case.vocab, max_position_embeddings=case.capacity,
            kv_cache=None if bits is None else {"kv_bits": bits}, tie_word_embeddings=True, **PRESETS[PRESET],
        )  # fmt: skip
        weights = RandomWeights(case, device, seed)
        self.decoder = PackedDecoder(
            config, weights, batch=case.batch, capacity=case.capacity,
            dtype=getattr(torch, case.dtype), device=device,
        )  # fmt: skip
        self.context = case.context
        shape = (case.batch, case.context, size.n_heads, size.hidden_size // size.n_heads)
        for block in self.decoder.blocks:
            drawn = {"generator": weights.generator, "device": device, "dtype": self.decoder.dtype}
            k, v = (torch.randn(shape, **drawn) for _ in range(2))
            self.decoder.rewind()
            if bits is None:
                for held, new in ((block.cache.keys, k), (block.cache.values, v)):
                    held[:, :, : case.context] = new.transpose(1, 2)
            else:
                block.cache.append(k, v, advance=False)

    def rewind(self) -> None:
        self.decoder.rewind(self.context)

    def advance(self) -> None:
        self.decoder.advance()


class Peer:
    """transformers' LLaMA, alike; `transformers padded` has heads of the next width that PyTorch's attention is fast
    for, with projections so much wider: what somebody would do who fills up the weights of a trained model.
    `transformers compiled` is that one, compiled."""

    def __init__(self, case: Case, method: str, device: torch.device, seed: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

        torch.manual_seed(seed)
        size = case.size
        head_dim = size.hidden_size // size.n_heads
        padded = head_dim + (-head_dim % FAST_HEADS if method != PEER else 0)
        config = LlamaConfig(
            hidden_size=size.hidden_size, intermediate_size=size.intermediate_size, num_hidden_layers=size.n_layers,
            num_attention_heads=size.n_heads, head_dim=padded, vocab_size=case.vocab,
            max_position_embeddings=case.capacity, tie_word_embeddings=True, attn_implementation="sdpa",
            dtype=case.dtype,
        )  # fmt: skip
        with torch.device(device):
            self.model = LlamaForCausalLM._from_config(config, dtype=getattr(torch, case.dtype)).eval()
        self.forward = torch.compile(self.model, dynamic=False) if method == PEER_COMPILED else self.model
        self.cache, self.context = StaticCache(config, max_cache_len=case.capacity), case.context
        self.ids = torch.zeros(case.batch, dtype=torch.long, device=device)
        self.position = torch.zeros(1, 1, dtype=torch.long, device=device)
        self.places = torch.arange(case.capacity, device=device)
        self.advance()  # makes the caches
        for layer in self.cache.layers:
            layer.keys.normal_()
            layer.values.normal_()

    def rewind(self) -> None:
        self.position.fill_(self.context)
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.context)

    @torch.no_grad()
    def advance(self) -> None:
        mask = (self.places <= self.position)[None, None]  # (1, 1, 1, capacity): is given on as it is
        logits = self.forward(
            input_ids=self.ids[:, None], attention_mask=mask, position_ids=self.position, past_key_values=self.cache,
            use_cache=True,
        ).logits  # fmt: skip
        self.ids.copy_(logits[:, -1].argmax(-1))
        self.position += 1


def rows_of(operation: Operation, task: Task) -> Iterator[Row]:
    """Rows of a task: rounds of the case's tokens, from the same context on each time."""
    device, case = torch.device(task.device), task.sized(CASES)
    name, gpu = clocks.device_name(device), task.device == "cuda"
    before = torch.cuda.memory_allocated(device) if gpu else 0
    side = (Ours if task.method in KV_BITS else Peer)(case, task.method, device, task.seed)
    if "memory" in task.measures:
        if gpu:
            held = torch.cuda.memory_allocated(device) - before
            yield operation.row(task, name, "memory", "GiB", [held / GIB])
        else:
            yield operation.outcome(
                task, name, "absent: PyTorch counts what is allocated on a GPU only", measure="memory"
            )
    if "kernels" in task.measures:
        side.rewind()
        token = clocks.Step(lambda: None, lambda _: side.advance())  # the next ones, of which a round has enough
        for kernel, (ms, launches) in clocks.kernel_times(token, device, warmup=task.warmup).items():
            yield operation.row(task, name, "kernel", "us", [1e3 * ms], measure=kernel, launches=launches)
    if "decode" not in task.measures:
        return
    once = graph_of(side) if gpu else side.advance
    seconds = [a_round(side, once, case.tokens, device) for _ in range(max(1, task.warmup))]
    number = clocks.repetitions(seconds[-1], repeats=task.repeats, seconds=task.seconds)
    clock = clocks.clock_and_power() if gpu else None
    seconds = [a_round(side, once, case.tokens, device) for _ in range(number)]
    # rows until 2026-11-29 call it token_us
    fastest = round(1e6 * min(seconds) / case.tokens, 2)
    extra = {"measure": "decode", "graph": gpu, "fastest_token_us": fastest}
    if clock and (after := clocks.clock_and_power()):
        extra["sm_clock_mhz"], extra["power_w"] = zip(clock, after, strict=True)
    rates = [case.batch * case.tokens / s for s in seconds]
    yield operation.row(task, name, "throughput", "tokens/s", rates, **extra)


def graph_of(side: Ours | Peer) -> Callable[[], None]:
    """A token as a CUDA graph."""
    side.rewind()
    side.advance()  # compiles what is still to be compiled
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        side.advance()
    return graph.replay


def a_round(side: Ours | Peer, once: Callable[[], None], tokens: int, device: torch.device) -> float:
    """Seconds of so many tokens, each read before the next."""
    side.rewind()
    clocks.synchronize(device)
    begin = time.perf_counter()
    for _ in range(tokens):
        once()
    clocks.synchronize(device)
    return time.perf_counter() - begin
