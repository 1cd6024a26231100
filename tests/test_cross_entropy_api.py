"""The interface of the linear cross-entropy: keywords, presets, errors, autocast, tracing, and training with it."""

import copy
import inspect
import logging
import math
import re
import types

import paperlm_kernels
import pytest
import torch
from paperlm_kernels import LinearCrossEntropyLoss, linear_cross_entropy
from paperlm_kernels.cross_entropy import function, options
from support_cross_entropy import (
    CPU,
    DENSE,
    Place,
    also_dense,
    check_gradients,
    check_values,
    everywhere,
    gradients,
    kernels,
    problem,
    run,
    truth,
)

BF16 = Place("reference", "cpu", torch.bfloat16)


def test_the_package_names_what_it_has():
    assert all(hasattr(paperlm_kernels, name) for name in paperlm_kernels.__all__ if name != "use_fused_loss")
    with pytest.raises(AttributeError, match="linear_cross_entropy"):
        _ = paperlm_kernels.linear_crossentropy


# --- presets ---


def documented_presets():
    """The table in the module's docstring, as keywords."""
    lines = [line.strip("|").split("|") for line in options.__doc__.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in cells] for cells in lines]
    names, table = rows[0][1:], {}
    for name, *cells in rows[1:]:
        if cells[0].startswith("as "):
            table[name] = table[cells[0].removeprefix("as ")]
        else:
            table[name] = {k: None if c == "None" else c for k, c in zip(names, cells, strict=True) if c}
    return table


def test_presets_set_what_their_table_says():
    assert documented_presets() == options.PRESETS
    for name, sets in options.PRESETS.items():
        assert options.apply_preset(name, options.DEFAULTS) == {**options.DEFAULTS, **sets}


@pytest.mark.parametrize("preset", sorted(set(options.PRESETS) - {"torch_compile"}))
def test_every_preset_gives_the_loss_and_nearly_the_gradients(preset):
    p = problem(BF16, ignore="some")
    loss = run(BF16._replace(backend="auto"), p, preset=preset)
    right, _, leaves = truth(p)
    # Logits rounded to bf16 are what the eager preset is measured for.
    torch.testing.assert_close(loss.double(), right, rtol=1e-2 if preset == "torch_eager" else 2e-5, atol=0)
    bounds = dict.fromkeys(range(3), 0.02)
    check_gradients(BF16, torch.autograd.grad(loss, p.leaves), torch.autograd.grad(right, leaves), bounds)


@pytest.mark.parametrize(
    "preset,keyword",
    [
        ("cce", {"filter_eps": None}),
        ("cce", {"vocab_order": torch.arange(300)}),
        ("cce", {"memory": "fast"}),
        ("cce_kahan", {"accumulate": "input"}),
        ("cce_kahan_full_c", {"filter_grads": "weight"}),
        ("cce_exact", {"filter_eps": 1e-3}),
        ("torch_compile", {"backend": "reference"}),
    ],
)
def test_a_keyword_that_contradicts_the_preset_is_refused(preset, keyword):
    with pytest.raises(ValueError, match=f"preset '{preset}' sets {next(iter(keyword))}"):
        linear_cross_entropy(*problem(CPU, bias=False)[:2], torch.zeros(2, 65).long(), preset=preset, **keyword)


def test_a_keyword_that_agrees_with_the_preset_or_is_free_is_taken():
    p = problem(CPU)
    assert run(CPU, p, preset="cce", accumulate="input", memory="lean") == run(CPU, p, preset="cce")
    run(CPU, p, preset="cce_kahan", vocab_order="mean_logit", memory="fast")


@pytest.mark.parametrize("dtype,eps", [(torch.bfloat16, 2**-12), (torch.float16, 2**-15), (torch.float32, 2**-28)])
def test_the_default_threshold_is_the_authors(dtype, eps):
    assert options.resolve(None, options.DEFAULTS, dtype, 300).filter_eps == eps


@pytest.mark.parametrize("change", [{"filter_eps": None}, {"filter_eps": 0}, {"filter_grads": "none"}])
def test_an_absent_filter_is_one_thing(change):
    chosen = options.resolve(None, {**options.DEFAULTS, **change}, torch.bfloat16, 300)
    assert (chosen.filter_eps, chosen.filter_grads) == (None, "none")


# --- errors ---

BAD_KEYWORDS = [
    ({"reduction": "avg"}, "unknown reduction 'avg'.*mean, sum, none"),
    ({"keep_logits": "yes"}, "keep_logits is True, False or None .*'yes'"),
    ({"reduction": "means"}, "did you mean 'mean'"),
    ({"backend": "tritn"}, "did you mean 'triton'"),
    ({"preset": ["cce"]}, "unknown preset"),
    ({"preset": "cce_full_c"}, "did you mean 'cce_kahan_full_c'.*cce_exact"),
    ({"memory": "low"}, "fast, balanced, lean"),
    ({"filter_grads": "weights"}, "did you mean 'weight'"),
    ({"accumulate": "bf16"}, "fp32, input"),
    ({"vocab_order": "sorted"}, "mean_logit"),
    ({"vocab_order": torch.arange(7)}, "permutation of the 300 rows"),
    ({"vocab_order": torch.zeros(300)}, "int32 or int64"),
    ({"filter_eps": 1.5}, "filter_eps"),
    ({"filter_eps": "high"}, "filter_eps"),
    ({"filter_eps": True}, "filter_eps"),
    ({"softcap": 0.0}, "softcap is None"),
    ({"softcap": -3}, "softcap"),
    ({"logit_scale": 0}, "logit_scale"),
    ({"logit_scale": float("nan")}, "logit_scale"),
    ({"z_loss": -1}, "z_loss"),
    ({"shift": -1}, "shift"),
    ({"shift": 1.0}, "shift"),
    ({"ignore_index": None}, "ignore_index"),
    ({"vocab_range": (0, 300)}, "process_group"),
    ({"backend": "eager", "filter_eps": 1e-3}, "exact gradients"),
    ({"backend": "eager", "filter_grads": "hidden"}, "exact gradients"),
    ({"backend": "compile", "accumulate": "input"}, "exact gradients"),
    ({"backend": "eager", "vocab_order": "mean_logit"}, "exact gradients"),
    ({"backend": "eager", "vocab_order": torch.arange(300)}, "exact gradients"),
]


@pytest.mark.parametrize("keywords,message", BAD_KEYWORDS, ids=lambda v: str(v)[:40] if isinstance(v, dict) else "")
def test_keywords_that_cannot_be_meant_are_refused(keywords, message):
    p = problem(CPU)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(p.hidden, p.weight, p.target, bias=p.bias, **keywords)


BAD_TENSORS = [
    (lambda p: p._replace(weight=p.weight.T), ValueError, "pass weight.T"),
    (lambda p: p._replace(weight=p.weight[:, :5]), ValueError, "share D"),
    (lambda p: p._replace(weight=p.weight[0]), ValueError, "share D"),
    (lambda p: p._replace(weight=p.weight[:0], bias=p.bias[:0]), ValueError, "no rows"),
    (lambda p: p._replace(bias=p.bias[:5]), ValueError, "one entry per row"),
    (lambda p: p._replace(target=p.target[:, 1:]), ValueError, "shape of hidden without its last axis"),
    (lambda p: p._replace(target=p.target.double()), ValueError, r"target.long\(\)"),
    (lambda p: p._replace(target=p.target.tolist()), TypeError, "target is a tensor"),
    (lambda p: p._replace(weight=p.weight.float()), ValueError, r"weight.to\(hidden.dtype\).*autocast"),
    (lambda p: p._replace(bias=p.bias.float()), ValueError, "bias is torch.float32"),
    (
        lambda p: p._replace(hidden=p.hidden.long(), weight=p.weight.long(), bias=None),
        ValueError,
        "not torch.int64",
    ),
    (lambda p: p._replace(hidden=p.hidden.to(torch.float8_e4m3fn)), ValueError, r"not torch.float8_e4m3fn; cast it"),
    (lambda p: p._replace(weight=p.weight.to("meta")), ValueError, r"weight.to\(hidden.device\)"),
]


@pytest.mark.parametrize("change,error,message", BAD_TENSORS, ids=[m for _, _, m in BAD_TENSORS])
def test_tensors_that_do_not_fit_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        run(CPU, change(problem(CPU)))


@also_dense
@pytest.mark.parametrize("wrong", [300, -1, 2**31 - 1])
def test_a_target_id_outside_the_vocabulary_is_named(place, wrong, monkeypatch):
    monkeypatch.setenv(function.DEBUG, "1")
    p = problem(place)
    p.target[1, 3] = wrong
    with pytest.raises(ValueError, match=re.escape(f"target id {wrong} at [1, 3] is not in [0, 300)")):
        run(place, p)


def test_kernels_on_the_cpu_need_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        run(CPU._replace(backend="triton"), problem(CPU))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=r"bfloat16 wrongly.*float16 or float32"):
        run(BF16._replace(backend="triton"), problem(BF16))


@also_dense
def test_embeddings_without_a_column_are_worth_the_logarithm_of_the_vocabulary(place):
    p = problem(place, (3,), 0, 5, bias=False)
    loss = run(place, p)
    assert loss.item() == pytest.approx(math.log(5), rel=1e-6)
    assert [g.shape for g in torch.autograd.grad(loss, p.leaves)] == [(3, 0), (5, 0)]


# --- the module ---


def test_the_module_is_the_function():
    p = problem(CPU, ignore="some")
    module = LinearCrossEntropyLoss(softcap=4.0, shift=1, reduction="sum")
    expected = linear_cross_entropy(p.hidden, p.weight, p.target, bias=p.bias, softcap=4.0, shift=1, reduction="sum")
    assert copy.deepcopy(module)(p.hidden, p.weight, p.target, p.bias) == expected
    assert "softcap=4.0" in repr(module)


def test_the_module_checks_its_keywords_when_it_is_made():
    with pytest.raises(TypeError, match="did you mean 'softcap'"):
        LinearCrossEntropyLoss(soft_cap=3.0)
    for keywords in ({"memory": "low"}, {"shift": -1}, {"preset": "cce", "accumulate": "fp16"}):
        with pytest.raises(ValueError, match=list(keywords)[-1]):
            LinearCrossEntropyLoss(**keywords)


# --- dtypes and devices ---


@pytest.mark.parametrize("backend", ["reference", "eager"])
@pytest.mark.parametrize("leaf", [torch.float32, torch.bfloat16])
def test_autocast_casts_the_inputs_and_gradients_come_back_in_the_leafs_dtype(backend, leaf):
    p = problem(CPU._replace(dtype=leaf))
    cast = [t.detach().bfloat16().requires_grad_() for t in p.leaves]
    expected = linear_cross_entropy(cast[0], cast[1], p.target, bias=cast[2], backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        loss, lse = run(CPU._replace(backend=backend), p, return_lse=True)
        inside = torch.autograd.grad(loss, p.leaves, retain_graph=True)
    assert loss.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for outside, mine, right in zip(
        torch.autograd.grad(loss, p.leaves), inside, torch.autograd.grad(expected, cast), strict=True
    ):
        assert mine.dtype == leaf and torch.equal(mine, outside)
        torch.testing.assert_close(mine, right.to(leaf), rtol=1e-2, atol=1e-6)


@kernels
def test_autocast_casts_what_the_kernels_read(place):
    dtype = torch.float16 if place.device == "cpu" else torch.bfloat16  # the interpreter has no right bfloat16
    p = problem(place._replace(dtype=torch.float32), ignore="some")
    cast = p._replace(**{name: getattr(p, name).detach().to(dtype).requires_grad_() for name in p._fields[:3]})
    right = gradients(place, cast)
    with torch.autocast(place.device, dtype):
        mine = gradients(place, p)
    assert torch.equal(mine[0], right[0]) and {g.dtype for g in mine} == {torch.float32}
    assert all(torch.equal(a, b.float()) for a, b in zip(mine[1:], right[1:], strict=True))


def test_autocast_mends_mixed_dtypes_and_leaves_float64_alone():
    p = problem(BF16)
    with torch.autocast("cpu", torch.bfloat16):
        assert run(BF16, p._replace(weight=p.weight.float())) == run(BF16, p)
        assert run(CPU, problem(CPU)).dtype == torch.float64


def test_nothing_reads_a_number_from_the_device():
    """Tensors on the meta device have no numbers: a host synchronization would raise."""
    p = problem(BF16)
    hidden, weight, bias = leaves = [t.detach().to("meta").requires_grad_() for t in p.leaves]
    target = p.target.to("meta")
    for keywords in ({"z_loss": 0.1, "shift": 1, "vocab_order": "mean_logit"}, {"reduction": "none"}):
        loss, lse = linear_cross_entropy(
            hidden, weight, target, bias=bias, return_lse=True, backend="reference", **keywords
        )
        gradients = torch.autograd.grad(loss.sum() + lse.sum(), leaves)
        assert [g.shape for g in gradients] == [t.shape for t in leaves]
        assert loss.dtype == torch.float32 and {g.dtype for g in gradients} == {torch.bfloat16}


def test_a_gpu_without_kernels_falls_back_with_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(function, "_no_triton", lambda hidden: "the kernels are elsewhere")
    function._warn_fallback.cache_clear()
    gpu = types.SimpleNamespace(is_cuda=True)
    with caplog.at_level(logging.WARNING):
        assert [function._automatic(gpu) for _ in range(3)] == ["reference"] * 3
    assert len(caplog.records) == 1 and "the kernels are elsewhere" in caplog.text
    monkeypatch.setattr(function, "_no_triton", lambda hidden: None)
    assert function._automatic(gpu) == "triton" and function._automatic(torch.zeros(1)) == "reference"


def test_logits_are_kept_only_when_exact_and_small_beside_free_memory(monkeypatch):
    free = 10_000
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10 * free))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    function._fits.cache_clear()

    def keep(n, v, eps=None, told=None, memory="balanced"):
        hidden = types.SimpleNamespace(is_cuda=True, device="cuda:0", shape=(n, 8), element_size=lambda: 2)
        return function._keep(told, chosen(eps, memory), hidden, types.SimpleNamespace(shape=(v, 8)))

    def chosen(eps, memory):
        given = {**options.DEFAULTS, "filter_eps": eps, "memory": memory}
        return options.resolve(None, given, torch.bfloat16, 8)

    assert keep(10, 24) and not keep(10, 26)
    assert keep(10, 24, memory="fast") and not keep(10, 24, memory="lean") and keep(10, 24, told=True, memory="lean")
    assert not keep(1, 1, eps=2**-12) and keep(10**6, 10**6, told=True) and not keep(1, 1, told=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert keep(2**14, 2**15 - 1) and not keep(2**14, 2**15)
    assert not function._keep(None, chosen(None, "balanced"), torch.zeros(1, 1), torch.zeros(1, 1))


# --- tracing ---


@everywhere
def test_torch_compile_traces_the_whole_function(place):
    p = problem(place, ignore="some")
    # On a GPU the choice of the kernels is traced too.
    backend = "auto" if place.device == "cuda" else place.backend

    def step(hidden, weight, bias, target):
        loss, lse = linear_cross_entropy(
            hidden, weight, target, bias=bias, shift=1, z_loss=1e-3, return_lse=True, backend=backend
        )
        return 2 * loss + lse.mean()

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*p)
    eager = step(*p)
    torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-6)
    mine, right = (torch.autograd.grad(loss, p.leaves) for loss in (compiled, eager))
    check_gradients(place, mine, right)


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("keyword", ["softcap", "z_loss", "shift"])
def test_a_scalar_that_cannot_be_meant_is_refused_under_torch_compile_too(keyword, fullgraph):
    p = problem(CPU)

    def step(value):
        return linear_cross_entropy(p.hidden, p.weight, p.target, bias=p.bias, backend="reference", **{keyword: value})

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=fullgraph, backend="aot_eager")
    numbers = (1, 2) if keyword == "shift" else (0.5, 0.75, 1.0)  # the second one makes the number a symbol
    for value in numbers:
        torch.testing.assert_close(compiled(value), step(value))
    with pytest.raises(Exception, match=f"{keyword} is"):
        compiled(-1 if keyword == "shift" else -0.5)


@pytest.mark.parametrize("keywords", [{}, {"return_lse": True, "z_loss": 0.1}], ids=["loss", "lse"])
def test_the_compiled_backend_equals_pytorch(keywords):
    place = DENSE[0]._replace(backend="compile")
    p = problem(place, ignore="some")
    result = run(place, p, softcap=3.0, shift=1, **keywords)
    loss = result[0] if keywords else result
    right, _, leaves = truth(p, softcap=3.0, shift=1, z_loss=keywords.get("z_loss", 0.0))
    check_values(place, loss, right)
    check_gradients(place, torch.autograd.grad(loss, p.leaves), torch.autograd.grad(right, leaves))


def test_the_cores_of_all_backends_have_the_same_keywords_and_left_alone_they_change_no_logit():
    from paperlm_kernels.cross_entropy import ops, reference

    cores = [module.linear_cross_entropy_core for module in (reference, ops)]
    ours, kernel = ({n: p.default for n, p in inspect.signature(core).parameters.items()} for core in cores)
    assert {name: default for name, default in kernel.items() if name in ours} == ours
    hidden, weight = torch.randn(5, 7, dtype=torch.float64), torch.randn(11, 7, dtype=torch.float64)
    target = torch.tensor([0, 3, 10, -1, 5])
    lse, logit = reference.linear_cross_entropy_core(hidden, weight, None, target)
    logits, counts = hidden @ weight.T, target >= 0
    torch.testing.assert_close(lse, torch.logsumexp(logits, 1) * counts)
    torch.testing.assert_close(logit, logits.gather(1, target.clamp(min=0)[:, None])[:, 0] * counts)
