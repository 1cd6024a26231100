"""Subclasses of nn.Linear, such as Falcon's: which of them compute what nn.Linear computes, found out by a probe."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LIBRARIES = {
    "torch", "torchao", "bitsandbytes", "peft", "auto_gptq", "gptqmodel", "awq", "awq_ext", "hqq", "quanto", "optimum",
    "eetq", "aqlm", "vptq", "quark", "fbgemm_gpu", "compressed_tensors", "transformer_engine", "auto_round",
    "spqr_quant", "neural_compressor", "brevitas",
}  # fmt: skip
"""Packages whose layers lie beside their values otherwise, or are read by others: torch's own attention multiplies by
the weight of its output layer, and never calls it."""
INTEGRATIONS = "transformers.integrations."
"where transformers has the layers of quantization libraries"
REPLACED = {
    "forward", "extra_repr", "reset_parameters", "in_features", "out_features", "weight", "bias", "__init__",
    "__constants__", "__module__", "__qualname__", "__doc__", "__annotations__", "__annotate__", "__annotate_func__",
    "__annotations_cache__", "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__",
}  # fmt: skip
"What a class may define that a StoredLinear has another of, or that is not called after construction."
ROWS = 3
"Rows of a probe's input."
SLACK = 4
"Roundings to a result, at most, by which it may differ: a sum of a product and a bias that is rounded twice, and more."


def why_left(module: nn.Linear) -> str | None:
    """Why a layer of a subclass of nn.Linear is not stored; None for one that a StoredLinear can replace.

    It can if its forward gives, for random rows and the layer's own weight, the outputs and gradients of F.linear up to
    rounding, in training and evaluation, and if the layer has nothing beside. The module is not run: a copy is.
    """
    cls = type(module)
    bases = cls.__mro__[: cls.__mro__.index(nn.Linear)]
    for base in bases:
        if base.__module__.partition(".")[0] in LIBRARIES or base.__module__.startswith(INTEGRATIONS):
            return f"a layer of {base.__module__}"
    if type(module.weight) is not nn.Parameter or not module.weight.is_floating_point():
        return f"its weight is a {type(module.weight).__name__} of {module.weight.dtype}"
    further = [n for n in module._parameters if n not in ("weight", "bias")]
    further += [*module._buffers, *module._modules]
    if further:
        return f"it has {', '.join(further)} as well"
    own = sorted({n for base in bases for n in vars(base)} - REPLACED)
    if own:
        return f"its class defines {', '.join(own)}"
    # a hook of accelerate, which stands in the same place, is refused by convert()
    if "forward" in vars(module) and not hasattr(module, "_hf_hook"):
        return "its forward was replaced"
    # in float32 too, where the roundings of bfloat16 do not hide those of a layer that quantizes its inputs
    for dtype in dict.fromkeys((torch.float32, module.weight.dtype)):
        for training in (True, False):
            if not _computes_linear(module, dtype, training):
                return "its forward computes something else than nn.Linear's"
    return None


def further_attributes(module: nn.Module) -> dict[str, object]:
    """What code has set on a layer beyond what nn.Linear sets: its model may ask for it."""
    return {name: value for name, value in vars(module).items() if name not in _PLAIN}


_PLAIN = frozenset(vars(nn.Linear(1, 1)))


def _computes_linear(module: nn.Linear, dtype: torch.dtype, training: bool) -> bool:
    """Compared on a CPU, where no setting lowers the precision of float32's products."""
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(ROWS, module.weight.shape[1], generator=draw).to(dtype)
        g = torch.randn(ROWS, module.weight.shape[0], generator=draw).to(dtype)
        twin = _twin(module, dtype, draw).train(training)
        before = [x.clone(), *(p.detach().clone() for p in twin.parameters())]
        known = dict(vars(twin))
        state = torch.get_rng_state()
        leaves = [x.clone().requires_grad_(), *twin.parameters()]
        try:
            y = type(module).forward(twin, leaves[0])
            if not isinstance(y, Tensor) or y.shape != g.shape or y.dtype != dtype:
                return False
            found = [y, *torch.autograd.grad(y, leaves, g)]
        except Exception:  # whatever a stranger's code raises, it is no product
            return False
        kept = all(torch.equal(old, new) for old, new in zip(before, leaves, strict=True))
        same = vars(twin).keys() == known.keys() and all(vars(twin)[key] is value for key, value in known.items())
        if not kept or not same or not torch.equal(state, torch.get_rng_state()):
            return False
        right = [p.clone().requires_grad_() for p in before]
        y = F.linear(*right)
        expected = [y, *torch.autograd.grad(y, right, g)]
        # what roundings are relative to: the same sums of absolute values
        sizes = [p.abs().requires_grad_() for p in before]
        y = F.linear(*sizes)
        scales = [y, *torch.autograd.grad(y, sizes, g.abs())]
    eps = torch.finfo(dtype).eps
    return all(
        bool(((a - b).abs() <= SLACK * eps * scale).all()) for a, b, scale in zip(found, expected, scales, strict=True)
    )


def _twin(module: nn.Linear, dtype: torch.dtype, draw: torch.Generator) -> nn.Linear:
    """The layer with a copy of its weight: whatever its forward changes is not the model's."""
    twin = object.__new__(type(module))
    # dictionaries are shared by a shallow copy, and hold the parameters
    twin.__dict__ = {key: value.copy() if isinstance(value, dict) else value for key, value in vars(module).items()}
    for name, parameter in module._parameters.items():
        if parameter is not None:
            # on the meta device there are no values, and any will do
            values = torch.randn(parameter.shape, generator=draw) if parameter.is_meta else parameter.detach().cpu()
            twin._parameters[name] = nn.Parameter(values.to(dtype, copy=True))
    return twin
