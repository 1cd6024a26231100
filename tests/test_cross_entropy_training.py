"""Ten steps of training with the linear cross-entropy, against PyTorch's loss and the reference."""

import pytest
import torch
import torch.nn.functional as F
from paperlm_kernels import linear_cross_entropy
from support_cross_entropy import everywhere, gpu, kernels
from torch import nn


def losses_of(loss_function, place, autocast=None):
    """Losses of a two-layer network that predicts the next of random ids, AdamW."""
    g = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    body = nn.Sequential(nn.Embedding(211, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    head = nn.Linear(32, 211, bias=False)
    model = nn.ModuleList([body, head]).to(place.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.randint(0, 211, (4, 40), generator=g).to(place.device)
    losses = []
    for _ in range(10):
        with torch.autocast(place.device, autocast, enabled=autocast is not None):
            loss = loss_function(body(ids), head.weight, ids)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses


@everywhere
def test_training_with_it_follows_pytorchs_loss(place):
    def stock(hidden, weight, ids):
        return F.cross_entropy(F.linear(hidden, weight)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    def mine(hidden, weight, ids):
        return linear_cross_entropy(hidden, weight, ids, shift=1, backend=place.backend)

    golden = losses_of(stock, place)
    assert golden[-1] < golden[0] - 0.1
    assert losses_of(mine, place) == pytest.approx(golden, abs=2e-5)


@gpu
@kernels
def test_training_in_16_bits_follows_the_reference(place):
    if place.dtype == torch.float32:
        pytest.skip("the test above")

    def with_backend(backend):
        return lambda hidden, weight, ids: linear_cross_entropy(hidden, weight, ids, shift=1, backend=backend)

    golden = losses_of(with_backend("reference"), place, place.dtype)
    assert golden[-1] < golden[0] - 0.1
    assert losses_of(with_backend("triton"), place, place.dtype) == pytest.approx(golden, abs=1e-3)
