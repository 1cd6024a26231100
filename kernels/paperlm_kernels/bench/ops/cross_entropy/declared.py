"""What can be measured, by name: cases, methods, and what their rows hold. Free of torch, so that names can be checked
before anything is measured."""

from __future__ import annotations

import dataclasses

ITEM_BYTES = {"bfloat16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True)
class Case:
    """A loss layer to measure: `tokens` x `width` hidden states against `vocab` x `width` weights.

    `counting` is the share of tokens that enter the loss, `softcap` the logit cap (None = uncapped).
    """

    name: str
    model: str
    vocab: int
    width: int
    softcap: float | None = None
    tokens: int = 8192
    counting: float = 1.0
    dtype: str = "bfloat16"
    "as torch calls it"

    @property
    def lower_bound(self) -> float:
        """MiB of the two gradients, which any method has to write: (tokens + vocab) x width entries."""
        return (self.tokens + self.vocab) * self.width * ITEM_BYTES[self.dtype] / 2**20

    def floor(self, rate: float) -> float:
        """Milliseconds of one matrix product of all tokens with all ids at `rate` operations a second."""
        return 2e3 * self.tokens * self.vocab * self.width / rate

    def listed(self) -> str:
        """One line about it."""
        return (
            f"{self.model}: {self.tokens} tokens x {self.vocab} ids x {self.width}; lower bound of memory "
            f"{self.lower_bound:.0f} MiB"
        )

    def small(self) -> Case:
        """An eighth of each size: to try out the benchmark, not to report."""
        sizes = {key: max(8, getattr(self, key) // 8) for key in ("tokens", "vocab", "width")}
        return dataclasses.replace(self, **sizes)

    def for_cpu(self) -> Case:
        """What a CPU does in seconds: an eighth of the tokens and ids, a 32nd of the width, float32."""
        return dataclasses.replace(
            self, name=f"{self.name}_cpu", model=f"{self.model}, a CPU's size", vocab=self.vocab // 8,
            width=self.width // 32, tokens=self.tokens // 8, dtype="float32",
        )  # fmt: skip


_FURTHER_MODELS = (
    Case("gemma2_9b", "Gemma 2 (9B)", 256_000, 3584, 30.0),
    Case("gemma2_27b", "Gemma 2 (27B)", 256_000, 4608, 30.0),
    Case("llama3_8b", "Llama 3 (8B)", 128_256, 4096),
    Case("mistral_nemo", "Mistral NeMo", 131_072, 5120),
    Case("phi35_mini", "Phi 3.5 Mini", 32_064, 3072),
    Case("qwen25_7b", "Qwen 2.5 (7B)", 152_064, 3584),
)
_ON_GPU = (
    Case("gemma2_2b", "Gemma 2 (2B)", 256_000, 2304, 30.0),
    Case("gemma2_2b_uncapped", "Gemma 2 (2B), no softcap", 256_000, 2304),
    Case("gemma2_2b_invalids", "Gemma 2 (2B), ignored tokens", 256_000, 2304, 30.0, counting=0.36),
    *_FURTHER_MODELS,
    Case("ours_32k", "32,000 ids, width 768", 32_000, 768),
)
_ON_CPU = (
    Case("tiny_cpu", "a CPU's size", 32_768, 128, 30.0, tokens=1024, dtype="float32"),
    Case("tiny_cpu_invalids", "a CPU's size, ignored tokens", 32_768, 128, 30.0, 1024, 0.36, "float32"),
    *(case.for_cpu() for case in _FURTHER_MODELS),
)
CASES = {case.name: case for case in (*_ON_GPU, *_ON_CPU)}


GROUPS = {
    "table1": ("gemma2_2b",),
    "tableA1": ("gemma2_2b_invalids",),
    "tableA2": tuple(case.name for case in _FURTHER_MODELS),
    "all": tuple(case.name for case in _ON_GPU),
    "cpu": tuple(case.name for case in _ON_CPU),
}
"Cases of each table of the paper, all of a GPU, and those of a CPU."


METHODS: dict[str, str] = {
    "ours": "our default: balanced memory, natural order, dead tiles are not recomputed (row 1b)",
    "ours_published_scheme": "lean memory, ids sorted by mean logit, every tile recomputed: published but for faint "
    "probabilities (row 1)",
    "ours_sorted": "the same in our default's memory",
    "ours_lean": "as row 1 in natural order (row 6)",
    "ours_lean_unfiltered": "row 6 unfiltered (row 7)",
    "ours_fast": "more scratch memory",
    "ours_full_c": "classifier's gradient unfiltered (row 9)",
    "ours_full_e": "hidden states' gradient unfiltered (row 10)",
    "ours_exact": "no filter, logits recomputed",
    "ours_auto_exact": "no filter, logits kept where they are small beside free memory",
    "ours_eps_2^-10": "the threshold of the authors' first release",
    "ours_rounded": "running sums rounded to the inputs' dtype, as published but for faint probabilities",
    "eager": "logits held, PyTorch's cross-entropy (row 5, baseline)",
    "torch.compile": "the same, compiled (row 4)",
    "chunked": "8 chunks, each one's cross-entropy compiled, as in Torch Tune (row 3)",
    "liger-kernel": "Liger's fused linear cross-entropy (row 2)",
    "cut-cross-entropy": "the authors' kernels (row 1)",
    "cut-cross-entropy unfiltered": "the same without the filter (row 7)",
    "cut-cross-entropy full_c": "their row 9; not in the release on PyPI",
    "cut-cross-entropy full_e": "their row 10; not in the release on PyPI",
    "cut-cross-entropy exact": "no filter, accurate sums; not in the release on PyPI",
}
"Method -> what it is."

TILES = ((128, 256), (128, 128), (128, 64), (128, 32), (64, 128))
"Tokens and ids of the tiles whose share alive is told."
METRICS: dict[str, dict[str, tuple[str, ...]]] = {
    "time": {"measure": ("loss", "gradient", "both", "both_cold")},
    "peak_memory": {"measure": ("loss", "gradient", "both")},
    "error": {"measure": ("dE", "dC", "nll", "lse")},
    "norm": {"measure": ("dE", "dC")},
    "product": {"measure": ("logits", "dE", "dC")},
    "determinism": {},
    "alive_share": {"tiles": tuple(f"{n}x{v}{order}" for n, v in TILES for order in ("", " sorted"))},
    "softmax_share": {},
    "softmax_rank": {},
}
"Metric of a row -> what tells its rows apart, and the values that has. Times of single kernels are not for tables."
NUMBERS = ("value", "low", "high", "mean", "over_floor", "over_floor_measured", "over_bound")
"Fields of a row with a number that a table can show."
