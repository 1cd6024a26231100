"""Which behaviour of each operation this version has: the number to write beside a result that came from one.

A number is raised when the same inputs and options give another loss or gradient on a GPU, be it in the last bits, for
over a run of training such a difference grows. Two results with the same number differ by hardware and library versions
alone. Importing this module imports neither PyTorch nor Triton.

History of the fused losses, with the commits that changed something:

1. The first recorded runs, by the kernels of 0087b86 (2026-11-21) and 9723b5e (2026-11-22), which differ from each
   other in the last bits, too (f402b0b, aa2260b).
2. Since 3008eb3 at the latest (2026-11-22; 5e808de computes the same): sums in another order (b295d07, 5e62ead,
   1235945) and, with a filter, other tiles kept next to its threshold (1235945, 22fbcee).
3. With a filter, since 0a35f7d (2026-11-23): other tiles kept next to the threshold again; where both gradients are
   filtered, in 16 bits, probabilities below a 4096th of the threshold are stored as zeros. Without a filter nothing
   changed but where the logits are rounded if there is a softcap, which no recorded run has.

On a CPU the reference cut its chunks otherwise from 2026-11-23 on, which rounds sums in another order and changes
nothing else; its results are made again in minutes, so the numbers were not raised for it. Before, a filtered loss
inside a function that Inductor had compiled for a CPU had wrong gradients; no recorded run is one.
"""

import difflib

UNFILTERED, FILTERED = 2, 3

CROSS_ENTROPY = {
    "cce": FILTERED,
    "cce_kahan": FILTERED,
    "cce_kahan_full_c": FILTERED,
    "cce_kahan_full_e": FILTERED,
    "cce_exact": UNFILTERED,
    "cce_exact_kept": UNFILTERED,
}
"""Variant of the loss -> its behaviour. Names are presets of `linear_cross_entropy`; cce_exact_kept is cce_exact with
kept logits."""

BITNET = {"rmsnorm_quantize": 1, "ternary_linear": 1, "kv_attention": 1}
"""Operation for models in few bits -> its behaviour. 1: it has given the same numbers since the first record."""

NEUZIP = {"codec": 2, "nbytes": 2}
"""Packed weights -> their behaviour. codec: that of the bytes and of the rounding; 2: the code of 2^24 weights and more
is made of counts of some blocks, so that their bytes may be others than before; what they decode to is the same.
nbytes: what is counted as theirs; 2: a codebook's tables on every device, not on a GPU alone."""


def loss_behaviour(variant: str) -> int:
    """The behaviour of a variant of the fused loss. Raises ValueError for a name that is not in CROSS_ENTROPY.

    >>> loss_behaviour("cce_kahan") > loss_behaviour("cce_exact")
    True
    """
    if variant not in CROSS_ENTROPY:
        near = difflib.get_close_matches(str(variant), CROSS_ENTROPY, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ";"
        raise ValueError(f"unknown variant {variant!r}{hint} known: {', '.join(CROSS_ENTROPY)}")
    return CROSS_ENTROPY[variant]
