"""The linear cross-entropy against PyTorch's own in float64: values and gradients, in every backend that runs here."""

import inspect
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from paperlm_kernels import compute_z_loss, linear_cross_entropy
from paperlm_kernels.cross_entropy import reference
from support_cross_entropy import (
    CPU,
    IGNORE,
    KERNELS,
    also_dense,
    check_gradients,
    check_values,
    compare,
    everywhere,
    pairwise,
    problem,
    relative,
    run,
    scalar,
    truth,
)
from torch.utils._python_dispatch import TorchDispatchMode

SETTINGS = pairwise(
    {
        "reduction": ("mean", "sum", "none"),
        "shift": (0, 1, 3),
        "ignore": IGNORE,
        "softcap": (None, 3.0),
        "bias": (False, True),
        "return_lse": (False, True),
        "z_loss": (0.0, 1e-3),
        "logit_scale": (1.0, 0.25, -0.4),
    }
)


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of one tile, so that every problem has several of them."""
    monkeypatch.setattr(reference, "chunk_sizes", lambda device: (128, 128))


@also_dense
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
def test_loss_and_gradients_equal_pytorchs(place, setting, small_chunks):
    keywords = dict(setting)
    lse_too = keywords.pop("return_lse")
    p = problem(place, bias=keywords.pop("bias"), ignore=keywords.pop("ignore"))
    if setting["ignore"] == "all" and setting["reduction"] == "mean":
        keywords["reduction"] = "sum"
    result = run(place, p, return_lse=lse_too, filter_eps=None, **keywords)
    right, right_lse, leaves = truth(p, **keywords)
    loss, lse = result if lse_too else (result, None)
    check_values(place, loss, right)
    if lse_too:
        check_values(place, lse, right_lse)
    mine = torch.autograd.grad(scalar(loss, lse), p.leaves)
    expected = torch.autograd.grad(scalar(right, right_lse if lse_too else None), leaves)
    check_gradients(place, mine, expected)


@also_dense
@pytest.mark.parametrize("ignore", ["all", "empty"])
def test_a_batch_without_a_counting_token_is_nan_with_zero_gradients(place, ignore):
    p = problem(place, tokens=(2, 65) if ignore == "all" else (2, 0), ignore="all")
    for keywords in ({}, {"z_loss": 0.1, "shift": 2}, {"return_lse": True}):
        result = run(place, p, **keywords)
        loss = result[0] if keywords.get("return_lse") else result
        assert loss.isnan()
        for gradient in torch.autograd.grad(loss, p.leaves):
            assert not gradient.count_nonzero()
    assert run(place, p, reduction="sum") == 0
    assert run(place, p, reduction="none", shift=1).count_nonzero() == 0


@everywhere
@pytest.mark.parametrize(
    "tokens,vocab,width",
    [(1, 1, 8), (252, 507, 123), (255, 507, 128), (256, 512, 128), (130, 1030, 96), (130, 4099, 96), (1, 300, 16)],
)
def test_odd_shapes(place, tokens, vocab, width):
    if place in KERNELS and place.device == "cpu" and vocab > 4000:
        pytest.skip("the interpreter is slow; 1,030 ids are as odd")
    p = problem(place, (tokens,), width, vocab)
    if vocab == 1:
        # The gradient is zero up to rounding, so there is no relative error to speak of.
        gradients = torch.autograd.grad(run(place, p), p.leaves)
        assert all(g.abs().max() < 1e-6 for g in gradients)
    else:
        compare(place, p)


@everywhere
def test_all_ids_equal(place):
    p = problem(place)
    p.target.fill_(7)
    compare(place, p)


@also_dense
def test_int32_targets_and_other_ignore_indices(place):
    p = problem(place, ignore="some")
    right, _, leaves = truth(p)
    target = torch.where(p.target == -100, 11, torch.where(p.target == 11, -100, p.target))
    p.target[target == -100] = -100
    right, _, leaves = truth(p)
    target = torch.where(p.target == -100, 11, p.target)
    loss = linear_cross_entropy(
        p.hidden, p.weight, target.int(), bias=p.bias, ignore_index=11, filter_eps=None, backend=place.backend
    )
    check_values(place, loss, right)
    check_gradients(place, torch.autograd.grad(loss, p.leaves), torch.autograd.grad(right, leaves))


def strided(tensor, step=2):
    """The same numbers, every second element of a larger tensor."""
    wide = tensor.detach().new_zeros(*tensor.shape[:-1], tensor.shape[-1] * step)
    wide[..., ::step] = tensor.detach()
    return wide[..., ::step].requires_grad_()


VIEWS = {
    "hidden with strided columns": lambda p: p._replace(hidden=strided(p.hidden)),
    "hidden with strided rows": lambda p: p._replace(hidden=p.hidden.detach().mT.contiguous().mT.requires_grad_()),
    "transposed weight": lambda p: p._replace(weight=p.weight.detach().T.contiguous().T.requires_grad_()),
    "weight with strided rows": lambda p: p._replace(
        weight=F.pad(p.weight.detach(), (0, 5))[:, : p.weight.shape[1]].requires_grad_()
    ),
    "strided bias": lambda p: p._replace(bias=strided(p.bias)),
    "expanded bias": lambda p: p._replace(bias=p.bias.detach()[:1].clone().requires_grad_()),
    "misaligned target": lambda p: p._replace(target=F.pad(p.target, (1, 0))[:, 1:]),
    "misaligned weight": lambda p: p._replace(
        weight=F.pad(p.weight.detach().flatten(), (1, 0))[1:].view(p.weight.shape).requires_grad_()
    ),
}


@everywhere
@pytest.mark.parametrize("view", VIEWS)
def test_views_give_the_result_of_contiguous_tensors(place, view):
    p = VIEWS[view](problem(place))
    if view == "expanded bias":
        bias = p.bias.expand(p.weight.shape[0])
        loss = linear_cross_entropy(p.hidden, p.weight, p.target, bias=bias, filter_eps=None, backend=place.backend)
        full = p._replace(bias=bias.detach().clone().requires_grad_())
        right, _, leaves = truth(full)
        check_values(place, loss, right)
        check_gradients(place, torch.autograd.grad(loss, p.leaves[:2]), torch.autograd.grad(right, leaves[:2]))
    else:
        compare(place, p)


@everywhere
@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)], ids=str)
def test_only_the_gradients_that_are_needed_are_given(place, needed):
    p = problem(place)
    everything = torch.autograd.grad(run(place, p), p.leaves)
    for k, leaf in enumerate(p.leaves):
        leaf.requires_grad_(k in needed)
    run(place, p).backward()
    for k, leaf in enumerate(p.leaves):
        assert (leaf.grad is not None) == (k in needed)
        if k in needed:
            torch.testing.assert_close(leaf.grad, everything[k], rtol=0, atol=0)


@everywhere
def test_an_ignored_embedding_reaches_nothing(place):
    p = problem(place, ignore="some")
    clean = torch.autograd.grad(run(place, p), p.leaves)
    with torch.no_grad():
        p.hidden[p.target == -100] = torch.nan
    loss, lse = run(place, p, return_lse=True)
    dirty = torch.autograd.grad(loss + lse.sum() * 0, p.leaves)
    assert not dirty[0][p.target == -100].count_nonzero() and not lse[p.target == -100].count_nonzero()
    for mine, right in zip(dirty, clean, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=0)


@everywhere
def test_upstream_gradients_of_ignored_tokens_are_dropped(place):
    p = problem(place, ignore="some")
    loss, lse = run(place, p, return_lse=True, reduction="none")
    counts = p.target != -100
    both = torch.autograd.grad((loss + lse).sum(), p.leaves, retain_graph=True)
    masked = torch.autograd.grad(((loss + lse) * counts).sum(), p.leaves)
    for mine, right in zip(both, masked, strict=True):
        torch.testing.assert_close(mine, right, rtol=0, atol=0)


@everywhere
def test_a_token_with_zero_upstream_gradient_adds_nothing(place):
    p = problem(place)
    weights = torch.rand(p.target.shape, generator=torch.Generator().manual_seed(1)).to(place.device)
    weights[0] = 0
    gradients = torch.autograd.grad((run(place, p, reduction="none", filter_eps=None) * weights).sum(), p.leaves)
    right, _, leaves = truth(p, reduction="none")
    check_gradients(place, gradients, torch.autograd.grad((right * weights.cpu()).sum(), leaves))
    assert not gradients[0][0].count_nonzero()


@everywhere
def test_backward_twice_and_three_runs_are_bitwise_equal(place):
    p = problem(place, ignore="some")
    runs = []
    for _ in range(3):
        loss = run(place, p)
        runs.append((loss, *torch.autograd.grad(loss, p.leaves, retain_graph=True)))
        runs.append((loss, *torch.autograd.grad(loss, p.leaves)))
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@everywhere
def test_the_loss_is_as_close_to_float64_as_pytorchs_in_the_same_dtype(place):
    p = problem(place, (1, 200), 64, 1000, spread=3.0)
    _, lse = run(place, p, return_lse=True)
    _, right, _ = truth(p)
    yardstick = (p.hidden @ p.weight.T + p.bias).to(lse.dtype).logsumexp(-1)
    largest = (p.hidden.double() @ p.weight.double().T + p.bias.double()).abs().max().item()
    error = (lse.double().cpu() - right).abs().max().item()
    assert error <= 2e-5 * max(1.0, largest)
    assert place.dtype.itemsize > 2 or error <= (yardstick.double().cpu() - right).abs().max().item()


@everywhere
def test_permuting_the_ids_changes_the_loss_only_by_rounding(place):
    p = problem(place)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(2)).to(place.device)
    permuted = p._replace(weight=p.weight[order], bias=p.bias[order], target=order.argsort()[p.target])
    torch.testing.assert_close(run(place, permuted), run(place, p), rtol=2e-6, atol=2e-6)


@everywhere
def test_large_logits_neither_overflow_nor_lose_the_target(place):
    p = problem(place, spread=100.0)
    loss, lse = run(place, p, return_lse=True, reduction="none", filter_eps=None)
    right, right_lse, _ = truth(p, reduction="none")
    largest = right_lse.abs().max().item()
    check_values(place, loss, right, largest)
    check_values(place, lse, right_lse, largest)


@everywhere
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_z_loss_from_the_returned_lse_equals_the_keyword(place, reduction):
    p = problem(place, ignore="some")
    keywords = {"reduction": reduction, "shift": 1, "filter_eps": None}
    once = run(place, p, z_loss=0.02, **keywords)
    loss, lse = run(place, p, return_lse=True, **keywords)
    twice = loss + 0.02 * compute_z_loss(lse, p.target, shift=1, reduction=reduction)
    torch.testing.assert_close(twice, once)
    a, b = (torch.autograd.grad(scalar(x), p.leaves) for x in (once, twice))
    assert all(relative(x, y) < 1e-2 for x, y in zip(a, b, strict=True))


def test_z_loss_without_targets_counts_every_position():
    lse = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert compute_z_loss(lse) == 7.5 and compute_z_loss(lse, reduction="sum") == 30
    assert compute_z_loss(lse, torch.tensor([[0, -100], [-100, -100]])) == 1.0
    assert compute_z_loss(lse, torch.full((2, 2), -100)).isnan()
    with pytest.raises(ValueError, match="without its first 1 columns"):
        compute_z_loss(lse, torch.zeros(2, 2, dtype=torch.long), shift=1)


# --- the reference alone ---


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("reduction,shift,ignored", [("mean", 0, 2), ("sum", 1, 0), ("none", 2, 1)])
def test_gradcheck(softcap, reduction, shift, ignored):
    g = torch.Generator().manual_seed(3)
    hidden, weight, bias = (torch.randn(*s, generator=g, dtype=torch.float64) for s in ((2, 4, 3), (9, 3), (9,)))
    target = torch.randint(0, 9, (2, 4), generator=g)
    target[0, -ignored:] = -100 if ignored else target[0, -1:]
    function = partial(
        linear_cross_entropy,
        target=target,
        softcap=softcap,
        logit_scale=1.5,
        reduction=reduction,
        shift=shift,
        z_loss=0.1,
    )
    leaves = tuple(t.requires_grad_() for t in (hidden, weight, bias))
    assert torch.autograd.gradcheck(lambda h, w, b: function(h, w, bias=b, return_lse=True), leaves)


@everywhere
@pytest.mark.parametrize("options", [{}, {"filter_eps": None, "keep_logits": True}])
@pytest.mark.parametrize("constant", [False, True])
def test_a_second_order_gradient_is_refused_and_not_taken_to_be_zero(place, options, constant):
    if place.exact and options:
        pytest.skip("the reference keeps no logits")
    p = problem(place)
    factor = 2.0 if constant else torch.tensor(2.0, device=place.device, requires_grad=True)
    loss = factor * run(place, p, **options)
    (gradient,) = torch.autograd.grad(loss, p.hidden, create_graph=True)
    assert torch.equal(gradient, torch.autograd.grad(factor * run(place, p, **options), p.hidden)[0])
    with pytest.raises(NotImplementedError, match="backend='eager'"):
        (loss + gradient.square().sum()).backward()


def test_the_eager_backend_has_second_order_gradients():
    h, w, target = torch.randn(6, 8, dtype=torch.float64), torch.randn(20, 8, dtype=torch.float64), torch.arange(6)
    function = lambda h: linear_cross_entropy(h, w, target, backend="eager")  # noqa: E731
    assert torch.autograd.gradgradcheck(function, h.requires_grad_())


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default)


class Largest(TorchDispatchMode):
    """Number of elements of the largest result of any operation, and how many matrix products there were."""

    elements = products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.products += func in PRODUCTS
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


def test_nothing_of_tokens_times_vocabulary_is_held(small_chunks):
    p = problem(CPU, (1, 600), 8, 900)
    with Largest() as mode:
        run(CPU, p, vocab_order="mean_logit").backward()
    assert mode.elements <= 128 * 128 < 600 * 900 / 30


def test_what_is_saved_for_the_backward_pass_grows_with_neither_product():
    p = problem(CPU, (1, 600), 8, 900)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        run(CPU, p)
    inputs = {t.data_ptr() for t in p.leaves}
    assert max(t.numel() for t in saved if t.data_ptr() not in inputs) <= 900


@pytest.mark.parametrize("needed,products", [((0, 1, 2), 4), ((0,), 3), ((1,), 3), ((2,), 2)])
def test_gradients_that_are_not_needed_are_not_computed(needed, products):
    p = problem(CPU)
    for k, leaf in enumerate(p.leaves):
        leaf.requires_grad_(k in needed)
    with Largest() as mode:
        run(CPU, p).backward()
    assert mode.products == products


def test_ignored_tokens_enter_no_product():
    sizes = []

    class Rows(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mm.default:
                sizes.append(args[0].shape[0])
            return func(*args, **(kwargs or {}))

    p = problem(CPU, ignore="some")
    with Rows():
        run(CPU, p)
    assert sizes == [int((p.target != -100).sum())]


@pytest.mark.parametrize("threads", [1, 3, 64])
def test_chunks_are_whole_tiles(threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for device in ("cpu", "cuda"):
        assert all(size % reference.TILE == 0 for size in reference.chunk_sizes(torch.device(device)))
    tokens, ids = reference.CPU_CHUNK
    assert reference.chunk_sizes(torch.device("cpu")) == (tokens, min(threads * ids, reference.CPU_MOST_IDS))


def test_what_is_kept_whole_is_not_copied():
    entries = torch.rand(130, 300)
    assert reference.only_tiles(entries, torch.ones(2, 3, dtype=torch.bool)) is entries
    assert reference.only_tiles(entries, torch.zeros(2, 3, dtype=torch.bool)).count_nonzero() == 0


def test_settings_of_the_core_are_given_by_name_and_scale_nothing_unless_asked():
    found = inspect.signature(reference.linear_cross_entropy_core).parameters
    by_place = [name for name, p in found.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert by_place == ["hidden", "weight", "bias", "target"] and found["logit_scale"].default == 1.0


def test_uniform_logits_give_the_logarithm_of_the_vocabulary():
    loss = linear_cross_entropy(torch.zeros(5, 4), torch.randn(1000, 4), torch.arange(5))
    assert loss.item() == pytest.approx(math.log(1000), rel=1e-6)
