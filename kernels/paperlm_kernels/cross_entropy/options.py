"""Keywords of `linear_cross_entropy`: their values, the presets, the filter thresholds, and what is refused.

Presets carry the names of the paper's variants (arXiv 2411.09009, Table 1) and fix these keywords; the others stay
free:

| preset                 | filter_eps | filter_grads | accumulate | vocab_order | memory | backend |
|------------------------|------------|--------------|------------|-------------|--------|---------|
| cce                    | auto       | both         | input      | mean_logit  | lean   |         |
| cce_kahan              | auto       | both         | fp32       |             |        |         |
| cce_kahan_full_c       | auto       | hidden       | fp32       |             |        |         |
| cce_kahan_full_e       | auto       | weight       | fp32       |             |        |         |
| cce_exact              | None       | none         | fp32       |             |        |         |
| cce_kahan_full         | as cce_exact                                                             |
| cce_kahan_full_c_full_e| as cce_exact                                                             |
| torch_compile          | None       | none         | fp32       | None        |        | compile |
| torch_eager            | None       | none         | fp32       | None        |        | eager   |

`cce` is the published scheme: gradients summed in the input's precision, ids sorted by mean logit (but for
probabilities below a 4096th of the threshold, which the kernels round to zero in 16 bits). The Kahan variants
are those whose sums are compensated; here that means sums in fp32 that are rounded once. "Full C" and "full E" leave
the gradient of the classifier (`weight`) or of the embeddings (`hidden`) unfiltered.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

CHOICES: dict[str, tuple[str, ...]] = {
    "reduction": ("mean", "sum", "none"),
    "filter_grads": ("both", "hidden", "weight", "none"),
    "accumulate": ("fp32", "input"),
    "memory": ("fast", "balanced", "lean"),
    "backend": ("auto", "triton", "reference", "compile", "eager"),
}
DENSE_BACKENDS = ("compile", "eager")

# The keywords that a preset may set, with the defaults of `linear_cross_entropy`.
DEFAULTS: dict[str, object] = {
    "filter_eps": "auto",
    "filter_grads": "both",
    "accumulate": "fp32",
    "memory": "balanced",
    "vocab_order": None,
    "backend": "auto",
}

_EXACT = {"filter_eps": None, "filter_grads": "none", "accumulate": "fp32"}
PRESETS: dict[str, dict[str, object]] = {
    "cce": {
        "filter_eps": "auto",
        "filter_grads": "both",
        "accumulate": "input",
        "vocab_order": "mean_logit",
        "memory": "lean",
    },
    "cce_kahan": {"filter_eps": "auto", "filter_grads": "both", "accumulate": "fp32"},
    "cce_kahan_full_c": {"filter_eps": "auto", "filter_grads": "hidden", "accumulate": "fp32"},
    "cce_kahan_full_e": {"filter_eps": "auto", "filter_grads": "weight", "accumulate": "fp32"},
    "cce_exact": _EXACT,
    "cce_kahan_full": _EXACT,
    "cce_kahan_full_c_full_e": _EXACT,
    "torch_compile": {**_EXACT, "vocab_order": None, "backend": "compile"},
    "torch_eager": {**_EXACT, "vocab_order": None, "backend": "eager"},
}


class Options(NamedTuple):
    """Checked keywords. `filter_eps` is a number or None, and None exactly when `filter_grads` is "none"."""

    filter_eps: float | None
    filter_grads: str
    accumulate: str
    memory: str
    vocab_order: str | Tensor | None
    backend: str


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """Message for an unknown name: the nearest known one first, then all of them.

    >>> unknown("reduction", "avg", ["mean", "sum"])
    "unknown reduction 'avg'; known: mean, sum"
    """
    names = [str(k) for k in known]
    near = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ";"
    return f"unknown {kind} {str(name)!r}{hint} known: {', '.join(names)}"


def check_choice(keyword: str, value: object) -> None:
    """Raise ValueError unless `value` is one of the choices of `keyword`."""
    if value not in CHOICES[keyword]:
        raise ValueError(unknown(keyword, value, CHOICES[keyword]))


def apply_preset(preset: str | None, given: Mapping[str, object]) -> dict[str, object]:
    """The keywords of `DEFAULTS` with those that the preset sets.

    A keyword that is given another value than its default and than the preset's contradicts the preset: ValueError.
    """
    if preset is None:
        return dict(given)
    if not isinstance(preset, str) or preset not in PRESETS:
        raise ValueError(unknown("preset", preset, PRESETS))
    merged = dict(given)
    for keyword, value in PRESETS[preset].items():
        mine = given[keyword]
        # A tensor is never equal to a preset's value, and comparing one would give a tensor.
        if isinstance(mine, Tensor) or (mine != DEFAULTS[keyword] and mine != value):
            raise ValueError(
                f"preset {preset!r} sets {keyword}={value!r}, which contradicts the {keyword} given; drop one"
            )
        merged[keyword] = value
    return merged


def auto_filter_eps(dtype: torch.dtype) -> float:
    """Machine epsilon of the compute dtype / 32: bf16 2^-12, fp16 2^-15, fp32 2^-28 (the authors' table)."""
    return torch.finfo(dtype).eps / 32


def resolve(preset: str | None, given: Mapping[str, object], dtype: torch.dtype, vocab: int) -> Options:
    """Check the keywords of `DEFAULTS`, apply the preset, and turn "auto" into the threshold of `dtype`."""
    merged = apply_preset(preset, given)
    for keyword in ("filter_grads", "accumulate", "memory", "backend"):
        check_choice(keyword, merged[keyword])
    eps, grads, order, backend = (merged[k] for k in ("filter_eps", "filter_grads", "vocab_order", "backend"))
    _check_eps(eps)
    _check_order(order, vocab)
    if backend in DENSE_BACKENDS:
        _refuse_for_dense(merged)
        eps = None
    if eps == "auto":
        eps = auto_filter_eps(dtype)
    # No probability is below 0, so a threshold of 0 drops nothing.
    if eps is None or eps == 0 or grads == "none":
        eps, grads = None, "none"
    return Options(eps, grads, merged["accumulate"], merged["memory"], order, backend)


def _check_eps(eps: object) -> None:
    if eps is None or eps == "auto":
        return
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < 1:
        raise ValueError(f"filter_eps is 'auto', None (no filter) or a probability below 1, not {eps!r}")


def _check_order(order: object, vocab: int) -> None:
    if isinstance(order, Tensor):
        if order.shape != (vocab,) or order.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"a vocab_order tensor is a permutation of the {vocab} rows of weight, int32 or int64 of "
                f"shape ({vocab},), e.g. from torch.argsort; not {order.dtype} of shape {tuple(order.shape)}"
            )
    elif order is not None and order != "mean_logit":
        raise ValueError(
            unknown("vocab_order", order, ["mean_logit"]) + ", an integer tensor, or None for the natural order"
        )


def _refuse_for_dense(merged: Mapping[str, object]) -> None:
    """The dense backends hold the logits and differentiate them: nothing is filtered, ordered or rounded there."""
    asked = [k for k in ("accumulate", "vocab_order") if merged[k] is not DEFAULTS[k] and merged[k] != DEFAULTS[k]]
    if merged["filter_eps"] not in (None, "auto"):
        asked.append("filter_eps")
    if merged["filter_grads"] in ("hidden", "weight"):
        asked.append("filter_grads")
    if asked:
        names = ", ".join(f"{k}={merged[k]!r}" for k in asked)
        raise ValueError(
            f"backend {merged['backend']!r} has exact gradients and no {names}; drop it, or use backend='auto'"
        )


def check_keep_logits(keep_logits: object) -> None:
    """Refuse what is neither None nor a truth value."""
    if keep_logits not in (None, True, False):
        raise ValueError(f"keep_logits is True, False or None (decided by size), not {keep_logits!r}")


def check_numbers(softcap: float | None, logit_scale: float, z_loss: float, shift: int, ignore_index: int) -> None:
    """Refuse scalars that cannot be meant. Under torch.compile they may be symbols: the conditions become guards."""
    if softcap is not None and not (_is_number(softcap) and 0 < softcap < math.inf):
        raise ValueError(f"softcap is None (no cap) or a positive number{_not(softcap)}")
    if not (_is_number(logit_scale) and -math.inf < logit_scale < math.inf and logit_scale != 0):
        raise ValueError(f"logit_scale is a finite number other than 0{_not(logit_scale)}")
    if not (_is_number(z_loss) and 0 <= z_loss < math.inf):
        raise ValueError(f"z_loss is a weight of 0 or more{_not(z_loss)}")
    if not isinstance(shift, (int, torch.SymInt)) or shift < 0:
        raise ValueError(
            f"shift is the number of positions between an embedding and its target, 0 or more{_not(shift)}"
        )
    if not isinstance(ignore_index, (int, torch.SymInt)):
        raise ValueError(f"ignore_index is an integer{_not(ignore_index)}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and not isinstance(value, bool)


def _not(value: object) -> str:
    """End of a message about a number; torch.compile cannot print a symbol."""
    return "" if torch.compiler.is_compiling() else f", not {value!r}"


def check_tensors(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    """Refuse tensors that do not fit together; each message names the fix."""
    named = {"hidden": hidden, "weight": weight, "target": target, "bias": bias}
    for name, tensor in named.items():
        if tensor is None and name == "bias":
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a tensor, not {type(tensor).__name__}")
        if hasattr(tensor, "device_mesh"):
            raise TypeError(
                f"{name} is a DTensor; pass {name}.full_tensor(), or the local slice of the vocabulary "
                f"({name}.to_local()) with process_group= and vocab_range="
            )
        if tensor.device != hidden.device:
            raise ValueError(
                f"{name} is on {tensor.device} and hidden on {hidden.device}; move it: {name}.to(hidden.device)"
            )
    if target.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"target holds ids, int32 or int64, not {target.dtype}; use target.long()")
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden (..., D) and weight (V, D) share D, as in nn.Linear; got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}" + _transposed(hidden, weight)
        )
    if hidden.shape[:-1] != target.shape:
        raise ValueError(
            f"target has the shape of hidden without its last axis, {tuple(hidden.shape[:-1])}, "
            f"not {tuple(target.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"bias has one entry per row of weight, shape {tuple(weight.shape[:1])}, not {tuple(bias.shape)}"
        )


def _transposed(hidden: Tensor, weight: Tensor) -> str:
    fits = weight.ndim == 2 and hidden.ndim >= 1 and hidden.shape[-1] == weight.shape[0]
    return "; weight looks transposed, pass weight.T" if fits else ""


def check_dtypes(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Refuse mixed dtypes (after autocast) and those without arithmetic."""
    if hidden.dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise ValueError(
            f"hidden is bfloat16, float16, float32 or float64, not {hidden.dtype}; cast it: hidden.to(torch.bfloat16)"
        )
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise ValueError(
                f"{name} is {tensor.dtype} and hidden {hidden.dtype}; cast one, e.g. {name}.to(hidden.dtype), "
                "or run under torch.autocast"
            )
