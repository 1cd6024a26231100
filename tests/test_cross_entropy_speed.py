"""On a CPU the loss with its gradients costs about what PyTorch's costs, which holds the logits.

`pytest -m slow -s tests/test_cross_entropy_speed.py` prints the ratios that kernels/MEASURED.md quotes.
"""

import statistics
import time

import pytest
import torch
import torch.nn.functional as F
from paperlm_kernels import linear_cross_entropy

ROUNDS = 15
METHODS = {
    "PyTorch": lambda hidden, weight, target: F.cross_entropy(F.linear(hidden, weight).float(), target),
    "default": linear_cross_entropy,
    "exact": lambda *tensors: linear_cross_entropy(*tensors, filter_eps=None),
}


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tokens,vocab,width,dtype",
    [(1024, 16000, 128, torch.float32), (1024, 16000, 128, torch.bfloat16), (4096, 1024, 64, torch.float32),
     (4096, 1024, 64, torch.bfloat16), (1024, 16000, 512, torch.float32)],
    ids=str,
)  # fmt: skip
def test_loss_and_gradients_take_at_most_half_more_than_pytorchs(tokens, vocab, width, dtype, one_thread):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=g).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, width, generator=g) / width**0.5).to(dtype).requires_grad_()
    target = torch.randint(0, vocab, (tokens,), generator=g)
    seconds = {name: [] for name in METHODS}
    for _ in range(ROUNDS + 1):  # in turn, so that what else the machine does falls on all of them
        for name, method in METHODS.items():
            start = time.perf_counter()
            torch.autograd.grad(method(hidden, weight, target), (hidden, weight))
            seconds[name].append(time.perf_counter() - start)
    median = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    ratios = {name: median[name] / median["PyTorch"] for name in METHODS if name != "PyTorch"}
    said = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    print(f"\n{tokens} x {vocab} x {width} {dtype}: PyTorch {1e3 * median['PyTorch']:.0f} ms; of it {said}")
    assert max(ratios.values()) <= 1.5
