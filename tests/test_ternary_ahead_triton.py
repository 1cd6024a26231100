"""What kernels ask for before the one in front has ended is what they read, and nothing else; in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support_ternary import SPOTS, activations, normal, ternary

if len(SPOTS) < 2 or SPOTS[1].device != "cpu":
    pytest.skip("the interpreter is what is asked for here", allow_module_level=True)

from paperlm_kernels.kv_attention import (
    QuantizedKV,
    kernel_bytes,
)
from paperlm_kernels.kv_attention import kernel as kv
from paperlm_kernels.kv_attention import launch as kv_launch
from paperlm_kernels.rmsnorm_quantize import kernel as norm
from paperlm_kernels.rmsnorm_quantize import launch as norm_launch
from paperlm_kernels.rmsnorm_quantize import rmsnorm_quantize
from paperlm_kernels.ternary_linear import gemv, launch, pack_ternary


@pytest.fixture
def asked(monkeypatch):
    """(address, bytes) of all that is asked for by kernels that are started early, as on Hopper."""
    found = []

    def fetch(address, size):
        one = lambda value: int(np.ravel(value.handle.data)[0]) if hasattr(value, "handle") else int(value)  # noqa: E731
        if one(size) > 0:
            found.append((one(address), one(size)))

    for module in (gemv, kv, kernel_bytes, norm):
        monkeypatch.setattr(module, "fetch", fetch, raising=False)
        monkeypatch.setattr(module, "gdc_wait", lambda: None)
        monkeypatch.setattr(module, "gdc_launch_dependents", lambda: None)
    for host in (launch, kv_launch, norm_launch):
        monkeypatch.setattr(host, "launched", lambda pdl: {"PDL": bool(pdl)})
        monkeypatch.setattr(host, "overlaps", lambda device: True)
    return found


def times_asked(asked, *tensors):
    """How often each byte of the tensors is asked for; fails where anything else is."""
    times = [np.zeros(tensor.nbytes, int) for tensor in tensors]
    for address, size in asked:
        (found,) = (
            (count, address - tensor.data_ptr())
            for count, tensor in zip(times, tensors, strict=True)
            if tensor.data_ptr() <= address and address + size <= tensor.data_ptr() + tensor.nbytes
        )
        found[0][found[1] : found[1] + size] += 1
    return times


@pytest.mark.parametrize("rows,width,gated,splits", [
    (300, 500, False, 1), (300, 500, False, 3), (130, 1100, False, 2), (256, 500, True, 1), (300, 500, True, 2),
])  # fmt: skip
def test_a_product_behind_a_norm_asks_once_for_each_row_of_its_weights(asked, rows, width, gated, splits):
    packed, (codes, scale) = pack_ternary(ternary(rows, width)), activations(1, width)
    codes = torch.nn.functional.pad(codes, (0, -width % 128))
    given = (codes, scale, codes.sum(1, dtype=torch.int32), packed.data, torch.ones(rows), rows, torch.float32)
    options = {"tiles": launch.FewTiles(8, 32, 1, 4), "splits": splits, "gated": gated}  # 8 rows, as on Hopper
    without = launch.run_linear(*given, **options)
    assert not asked  # behind another product
    assert torch.equal(without, launch.run_linear(*given, **options, behind_norm=True))
    row, blocks = packed.data.shape[1], -(-rows // 8)
    (times,) = times_asked(asked, packed.data)
    assert times[: rows * row].min() == 1 and len(asked) == blocks * splits * (1 + gated)
    # twice: bytes where shares of a block, in whole numbers, meet; and of gate's rows those up's begin with
    assert (times > 1).sum() <= len(asked) * (splits - 1) + gated * (-rows % 8) // 2 * row
    # padding that follows the rows, of the last block alone, and what its shares are rounded up by
    assert (times[rows * row :] > 0).sum() <= (8 if gated else -rows % 8) * row + splits - 1


def test_what_is_more_than_memory_brings_in_meanwhile_is_not_asked_for(asked, monkeypatch):
    packed, (codes, scale) = pack_ternary(ternary(128, 256)), activations(1, 256)
    given = (codes, scale, codes.sum(1, dtype=torch.int32), packed.data, torch.ones(128), 128, torch.float32)
    monkeypatch.setattr(launch, "MOST_AHEAD", packed.data.nbytes - 1)
    launch.run_linear(*given, behind_norm=True)
    assert not asked
    monkeypatch.setattr(launch, "MOST_AHEAD", packed.data.nbytes)
    launch.run_linear(*given, behind_norm=True)
    assert asked
    asked.clear()
    two = (codes.expand(2, -1).contiguous(), scale.expand(2), codes.sum(1, dtype=torch.int32).expand(2), *given[3:])
    launch.run_linear(*two, behind_norm=True)
    assert not asked  # which was measured with one token


def cache_of(bits, head_dim, batch=1, kv_heads=2, length=70, capacity=96):
    cache = QuantizedKV.empty(batch, kv_heads, head_dim, capacity, bits=bits)
    k, v = (normal(batch, length, kv_heads, head_dim, seed=i) for i in range(2))
    cache.append(k, v, backend="reference")
    return cache


@pytest.mark.parametrize("batch,shared_by", [(1, 1), (2, 3)])
@pytest.mark.parametrize("bits,head_dim", [(4, 64), (4, 100), (3, 64), (3, 100)])
def test_attention_asks_once_for_the_rows_that_are_there_and_for_none_behind(asked, bits, head_dim, batch, shared_by):
    cache = cache_of(bits, head_dim, batch)
    cache.decode(normal(batch, 2 * shared_by, head_dim, seed=3), backend="triton")
    for times in times_asked(asked, cache.k_data, cache.v_data):
        times = times.reshape(batch * 2, 96, -1)
        assert (times[:, :70] == 1).all() and not times[:, 70:].any()


@pytest.mark.parametrize("head_dim", [64, 100])
def test_attention_to_more_than_the_limit_asks_for_rows_that_begin_anywhere_alone(asked, head_dim, monkeypatch):
    cache = cache_of(4, head_dim)
    bytes_there = 2 * 2 * 70 * cache.layout.row_bytes  # keys and values of two heads
    q = normal(1, 4, head_dim, seed=3)  # two of which share each
    monkeypatch.setattr(kv, "MOST_AHEAD", bytes_there)
    cache.decode(q, backend="triton")
    assert sum(size for _, size in asked) == bytes_there
    asked.clear()
    monkeypatch.setattr(kv, "MOST_AHEAD", bytes_there - 1)
    cache.decode(q, backend="triton")
    assert sum(size for _, size in asked) == (bytes_there if head_dim == 100 else 0)


def test_a_norm_asks_for_its_gains(asked):
    gain = torch.ones(200, dtype=torch.float16)
    rmsnorm_quantize(normal(2, 200, dtype=torch.float16), gain, "int8_absmax", backend="triton")
    assert (times_asked(asked, gain)[0] == 2).all()  # by each of two rows
