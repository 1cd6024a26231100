"""Subclasses of nn.Linear, such as Falcon's: which of them compute what nn.Linear computes, found out by a probe."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LIBRARIES = {
    "torch", "torchao", "bitsandbytes", "peft", "auto_gptq", "gptqmodel", "awq", "awq_ext", "hqq", "quanto", "optimum",
    "eetq", "aqlm", "vptq", "quark", "fbgemm_gpu", "compressed_tensors", "transformer_engine", "auto_round",
    "spqr_quant", "neural_compressor", "brevitas",
}  # fmt: skip
"""Packages whose subclasses are never replaced: they keep their weight in a form of their own, or other code reads it:
torch's attention multiplies by its output layer's weight and never calls the layer."""
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


def changed_by_hand(module: nn.Module) -> str | None:
    """Why a layer is not what its class says; None for one that is."""
    if "weight" not in module._parameters:
        return "its weight is computed, no parameter: torch.nn.utils.remove_weight_norm or prune.remove makes it one"
    # a hook of accelerate, which stands in the same place, is refused by convert()
    if "forward" in vars(module) and not hasattr(module, "_hf_hook"):
        return "its forward was replaced"
    return None


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
    weight = module.weight
    if type(weight) is not nn.Parameter or not weight.is_floating_point() or weight.ndim != 2:
        return f"its weight is a {type(weight).__name__} of {weight.dtype} and shape {tuple(weight.shape)}"
    further = [n for n in module._parameters if n not in ("weight", "bias")]
    further += [*module._buffers, *module._modules]
    if further:
        return f"it has {', '.join(further)} as well"
    own = sorted({n for base in bases for n in vars(base)} - REPLACED)
    if own:
        return f"its class defines {', '.join(own)}"
    if why := changed_by_hand(module):
        return why
    # in float32 too, where the roundings of bfloat16 do not hide those of a layer that quantizes its inputs
    for dtype in dict.fromkeys((torch.float32, module.weight.dtype)):
        for training in (True, False):
            if not _computes_linear(module, dtype, training):
                return "its forward computes something else than nn.Linear's"
    return None


def further_attributes(module: nn.Module) -> dict[str, object]:
    """What code has set on a layer beyond what nn.Linear sets: its model may ask for it."""
    return {name: value for name, value in vars(module).items() if name not in _PLAIN}


# on the meta device, where nothing is drawn from the generator that a program has seeded
_PLAIN = frozenset(vars(nn.Linear(1, 1, device="meta")))


def _computes_linear(module: nn.Linear, dtype: torch.dtype, training: bool) -> bool:
    """Compared on a CPU, where no setting lowers the precision of float32's products."""
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(ROWS, module.weight.shape[1], generator=draw).to(dtype)
        g = torch.randn(ROWS, module.weight.shape[0], generator=draw).to(dtype)
        twin = _twin(module, dtype, draw).train(training)
        given = [x, *(p.detach() for p in (twin.weight, twin.bias) if p is not None)]
        before = [t.clone() for t in given]
        found = _of_stranger(twin, given, g)
        if found is None or not all(map(torch.equal, before, given)):
            return False
        expected = _and_gradients(F.linear, [t.clone().requires_grad_() for t in before], g)
        # what roundings are relative to: the same sums of absolute values
        scales = _and_gradients(F.linear, [t.abs().requires_grad_() for t in before], g.abs())
    eps = torch.finfo(dtype).eps
    return all(
        bool(((a - b).abs() <= SLACK * eps * scale).all()) for a, b, scale in zip(found, expected, scales, strict=True)
    )


def _and_gradients(function: Callable[..., Tensor], leaves: list[Tensor], g: Tensor) -> list[Tensor]:
    """A function's result, and the gradients of its leaves for the gradient `g` of the result."""
    y = function(*leaves)
    return [y, *torch.autograd.grad(y, leaves, g)]


def _of_stranger(twin: nn.Linear, given: list[Tensor], g: Tensor) -> list[Tensor] | None:
    """Result and gradients of a layer's own forward; None if it raises, has not a product's shape and dtype, draws
    random numbers, or leaves other attributes behind. given: the input, and the parameters without their gradients."""
    known, state = dict(vars(twin)), torch.get_rng_state()
    leaves = [given[0].requires_grad_(), *(p for p in (twin.weight, twin.bias) if p is not None)]
    try:
        y = type(twin).forward(twin, leaves[0])
        if not isinstance(y, Tensor) or y.shape != g.shape or y.dtype != given[0].dtype:
            return None
        found = [y, *torch.autograd.grad(y, leaves, g)]
    except Exception:  # whatever a stranger's code raises, it is no product
        return None
    same = vars(twin).keys() == known.keys() and all(vars(twin)[key] is value for key, value in known.items())
    return found if same and torch.equal(state, torch.get_rng_state()) else None


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
