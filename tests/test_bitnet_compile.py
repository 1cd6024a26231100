"""Quantized projections under torch.compile with Inductor have the gradients of the uncompiled ones.

PyTorch 2.11 compiles an autograd.Function to a gradient of 0 where its result comes from an operation in place, or from
a cast to the dtype that it has already: BitNet then trains its embeddings and little else, without a word. Later
versions do not show it.
"""

import shutil

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from paperlm.models.quantized import QuantizedHeads, QuantizedLinear, quantized_input
from paperlm.quantizers.presets import PRESETS
from paperlm.quantizers.scheme import kv_cache_of, quantization_of

WIDTH, OUT, TOKENS = 64, 48, 24
AUTOCAST = pytest.mark.parametrize("autocast", (False, True), ids=("float32", "bfloat16"))


class Projection(nn.Module):
    """A projection as the decoder has it at one place, between two functions that the compiler may fuse it with."""

    def __init__(self, preset, place):
        super().__init__()
        scheme = quantization_of(PRESETS[preset]["quantization"])
        self.input = quantized_input(scheme, place, WIDTH)
        self.product = QuantizedLinear(WIDTH, OUT, scheme.weight)
        nn.init.normal_(self.product.weight)

    def forward(self, x):
        return self.product(*self.input(x * 1.5)).float().square()


class Unquantized(Projection):
    """A ternary weight whose input has no quantizer."""

    def forward(self, x):
        return self.product(x * 1.5).float().square()


class Fused(Projection):
    """A norm and the quantizer behind it as one pass."""

    def __init__(self, preset, place):
        super().__init__(preset, place)
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        return self.product(*self.input(x * 1.5, self.gain, 1e-6)).float().square()


class Heads(nn.Module):
    """Attention's queries, keys and values in few bits."""

    def __init__(self, **options):
        super().__init__()
        self.heads = QuantizedHeads(kv_cache_of({"q_bits": 4, "kv_bits": 3} | options))

    def forward(self, x):
        split = (x * 1.5).view(1, TOKENS, 4, -1).transpose(1, 2)
        sin = torch.arange(TOKENS, dtype=x.dtype)[:, None].sin().expand(TOKENS, WIDTH // 4)
        q, k, v = self.heads(split, split + 1, split.square(), sin)
        return (q * k).float() + v.float().square()


CASES = {
    "int8": lambda: Projection("b158", "qkv"),
    "int4": lambda: Projection("a48_int4", "gate_up"),
    "half of the entries in int8": lambda: Projection("a48_int4", "o"),
    "fp4": lambda: Projection("a48_fp4", "qkv"),
    "no quantized input": lambda: Unquantized("b158", "qkv"),
    "a fused norm": lambda: Fused("a48_int4", "o"),
    "heads": Heads,
    "heads, minmax": lambda: Heads(mapping="minmax"),
}
EVERY = pytest.mark.parametrize("case", CASES)


def gradients(module, function, x, autocast):
    """Of the sum of what comes out: of x and of the weights, float32."""
    x = x.clone().requires_grad_()
    module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        function(x).sum().backward()
    return [x.grad, *(p.grad.clone() for p in module.parameters())]


@EVERY
@AUTOCAST
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_compiled_gradients_are_those_of_the_uncompiled_module(case, autocast):
    torch.manual_seed(0)
    torch._dynamo.reset()
    module, x = CASES[case](), torch.randn(TOKENS, WIDTH)
    expected = gradients(module, module, x, autocast)
    found = gradients(module, torch.compile(module, fullgraph=True), x, autocast)
    assert all(g.abs().max() > 0 for g in expected)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= (5e-2 if autocast else 1e-3) * other.norm()


class Unchanged(TorchFunctionMode):
    """Keeps results that are the operation's first argument itself: of casts with nothing to do, and in place."""

    def __init__(self):
        super().__init__()
        self.results = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and args and result is args[0]:
            self.results.append(result)
        return result


@EVERY
@AUTOCAST
def test_no_function_with_a_gradient_of_its_own_returns_what_an_operation_was_given(case, autocast, monkeypatch):
    returned, apply = [], torch.autograd.Function.apply.__func__

    def noted(cls, *args):
        with Unchanged() as unchanged:
            found = apply(cls, *args)
        results = found if isinstance(found, tuple) else (found,)
        passing = (one for one in results if one.requires_grad)
        returned.extend(any(one is same for same in unchanged.results) for one in passing)
        return found

    monkeypatch.setattr(torch.autograd.Function, "apply", classmethod(noted))
    module = CASES[case]()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        module(torch.randn(TOKENS, WIDTH, requires_grad=True))
    assert returned and not any(returned)
