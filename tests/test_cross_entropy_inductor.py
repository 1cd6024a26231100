"""torch.compile with its default backend, Inductor, gives the gradients of the uncompiled function.

Inductor of PyTorch 2.13 compiles a mask made by `repeat_interleave` wrongly on a CPU where one block of tokens meets a
number of ids that is no multiple of 128, and not at all at 256 ids; backends that do not generate code (`aot_eager`) do
not show it.
"""

import copy
import math
import shutil

import pytest
import torch
from paperlm_kernels import linear_cross_entropy, use_fused_loss
from paperlm_kernels.cross_entropy import options
from support_cross_entropy import CPU, Problem, problem, relative
from support_huggingface import batch_of, model_of
from torch._dynamo.testing import CompileCounterWithBackend

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")

TILE, WIDTH, IGNORED, GAP = 128, 16, 2, 4.0
BOUND = 2e-5
"Of a relative error in float32: up to 25,000 probabilities sum to nearly 1 and cancel against the target's."
VOCABULARIES = (256, 301, 1000, 50257)


def striped(vocab, dtype=torch.float32, tokens=160):
    """Tokens and ids of which a filter between the two likelihoods drops every second tile, and that threshold.

    Block r of the counting tokens finds every second group of ids, from the r-th on, less likely by a factor of e^GAP;
    its targets are likely ones. The first two tokens are ignored.
    """
    p = problem(CPU, (tokens,), WIDTH, vocab)
    block = (torch.arange(tokens) - IGNORED).clamp(min=0) // TILE % 2
    group = torch.arange(vocab) // TILE
    with torch.no_grad():
        for noise in (p.hidden, p.weight, p.bias):
            noise.mul_(0.1)
        p.hidden[:, :2] = torch.eye(2, dtype=torch.float64)[block]
        p.weight[:, :2] = -GAP * torch.stack([group % 2 == 0, group % 2 == 1], 1)
        p.target.remainder_(100).add_(TILE * (block == 0))
        p.target[:IGNORED] = -100
    leaves = (t.detach().to(dtype).requires_grad_() for t in p.leaves)
    return Problem(*leaves, p.target), math.exp(-GAP / 2) / (vocab / 2)


def gradients(p, loss_of, dtype):
    leaves = [t.detach().to(dtype).requires_grad_() for t in p.leaves]
    loss = loss_of(*leaves, p.target)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def loss_with(keywords):
    def loss_of(hidden, weight, bias, target):
        result = linear_cross_entropy(hidden, weight, target, bias=bias, **keywords)
        return result[0] + 0.1 * result[1].square().mean() if isinstance(result, tuple) else result

    return loss_of


def check(vocab, keywords, tokens=160, dtype=torch.float32, bound=BOUND):
    """Compiled and uncompiled loss and gradients against the uncompiled ones of float64, from the same inputs."""
    p, between = striped(vocab, dtype, tokens)
    keywords = {k: between if v == "between" else v for k, v in keywords.items()}
    loss_of = loss_with(keywords)
    torch.compiler.reset()
    compiled = gradients(p, torch.compile(loss_of, fullgraph=True), dtype)
    eager = gradients(p, loss_of, dtype)
    in_float64 = (
        {**keywords, **options.PRESETS[keywords["preset"]], "preset": None} if "preset" in keywords else keywords
    )
    if in_float64.get("filter_eps", "auto") == "auto":
        in_float64 = {**in_float64, "filter_eps": options.auto_filter_eps(dtype)}  # that of float64 is another
    right = gradients(p, loss_with(in_float64), torch.float64)
    for mine, same, truth in zip(compiled, eager, right, strict=True):
        assert relative(mine, truth) <= bound and relative(mine, same) <= bound / 4


@pytest.mark.parametrize("tokens", [60, 160])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_the_filter_between_drops_tiles_and_no_probability_is_near_it(vocab, tokens):
    p, between = striped(vocab, tokens=tokens)
    by_threshold = [
        gradients(p, loss_with({"filter_eps": eps}), torch.float64) for eps in (between / 2, between * 2, None)
    ]
    for low, high, exact in zip(*by_threshold, strict=True):
        assert torch.equal(low, high)
        assert low.ndim == 0 or relative(low, exact) > 30 * BOUND


FILTERED = [
    {},
    {"filter_eps": "between"},
    {"filter_eps": "between", "filter_grads": "hidden", "softcap": 9.0},
    {"filter_eps": "between", "filter_grads": "weight", "logit_scale": 0.9, "reduction": "sum"},
    {"filter_eps": "between", "z_loss": 0.01, "return_lse": True},
]
EXACT = [
    {"filter_eps": None, "shift": 1, "softcap": 9.0},
    {"filter_eps": None, "backend": "compile", "z_loss": 0.01},
    {"filter_eps": None, "backend": "eager", "shift": 1},
]


@pytest.mark.parametrize(
    "vocab,tokens,keywords",
    [(256, 160, {}), (301, 60, {}), (1000, 60, FILTERED[4]), (50257, 60, {}), (50257, 160, FILTERED[2])],
    ids=str,
)
def test_compiled_gradients_are_those_of_float64(vocab, tokens, keywords):
    check(vocab, keywords, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("keywords", FILTERED + EXACT, ids=str)
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_compiled_gradients_are_those_of_float64_with_every_option(vocab, keywords):
    check(vocab, keywords, tokens=60)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("order", ["mean_logit", "given"])
def test_compiled_gradients_are_those_of_float64_with_an_order(vocab, order):
    if order == "given":
        order = torch.argsort(torch.arange(vocab) // TILE % 2, stable=True)
    check(vocab, {"filter_eps": "between", "vocab_order": order})


@pytest.mark.slow
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("preset,bound", [("cce", 5e-2), ("cce_kahan", 5e-3), ("cce_kahan_full_c", 5e-3)])
def test_compiled_presets_in_bfloat16_are_the_uncompiled_ones(vocab, preset, bound):
    check(vocab, {"preset": preset}, dtype=torch.bfloat16, bound=bound)


def test_another_number_of_tokens_needs_one_more_compilation_and_no_third():
    """torch.compile makes a size a symbol when it changes for the first time."""
    torch.compiler.reset()
    backend = CompileCounterWithBackend("inductor")
    compiled = torch.compile(loss_with({}), fullgraph=True, backend=backend)
    for tokens in (300, 160, 700):
        p, _ = striped(301, tokens=tokens)
        mine, right = (gradients(p, f, torch.float32) for f in (compiled, loss_with({})))
        assert all(relative(a, b) <= BOUND / 4 for a, b in zip(mine, right, strict=True))
    assert backend.frame_count == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_compiled_model_with_the_fused_loss_has_the_stock_models_loss_and_gradients(name):
    model = model_of(name, vocab_size=301)
    stock = copy.deepcopy(model)
    compiled = torch.compile(use_fused_loss(model))
    torch.compiler.reset()
    results = []
    for each, called in ((model, compiled), (stock, stock)):
        loss = called(**batch_of()).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in each.parameters())])
    assert all(relative(mine, right) <= 2e-5 for mine, right in zip(*results, strict=True))
