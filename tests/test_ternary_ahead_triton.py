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


def bytes_of(asked, tensor):
    """How often each byte of a tensor is asked for; fails where something behind or before its memory is."""
    times, begin = np.zeros(tensor.nbytes, int), tensor.data_ptr()
    for address, size in asked:
        if begin <= address < begin + tensor.nbytes:
            assert address + size <= begin + tensor.nbytes
            times[address - begin : address - begin + size] += 1
    return times


@pytest.mark.parametrize("rows,width,gated,splits", [
    (300, 500, False, 1), (300, 500, False, 3), (130, 1100, False, 2), (256, 500, True, 1), (300, 500, True, 2),
])  # fmt: skip
def test_a_product_behind_a_norm_asks_once_for_each_row_of_its_weights(asked, rows, width, gated, splits):
    packed, (codes, scale) = pack_ternary(ternary(rows, width)), activations(1, width)
    codes = torch.nn.functional.pad(codes, (0, -width % 128))
    given = (codes, scale, codes.sum(1, dtype=torch.int32), packed.data, torch.ones(rows), rows, torch.float32)
    launch.run_linear(*given, splits=splits, gated=gated)
    assert not asked  # behind another product
    with_it = launch.run_linear(*given, splits=splits, gated=gated, behind_norm=True)
    assert torch.equal(with_it, launch.run_linear(*given, splits=splits, gated=gated))
    row = packed.data.shape[1]
    times = bytes_of(asked, packed.data)[: rows * row].reshape(rows, row)
    # shares are whole numbers of bytes, the rest of which the next program's begins with
    assert len(asked) and times.min() == 1 and (times > 1).sum() <= 16 * splits * len(asked)
    assert sum(size for _, size in asked) < packed.data.nbytes + 16 * len(asked)


def test_what_is_more_than_memory_brings_in_meanwhile_is_not_asked_for(asked, monkeypatch):
    packed, (codes, scale) = pack_ternary(ternary(128, 256)), activations(1, 256)
    given = (codes, scale, codes.sum(1, dtype=torch.int32), packed.data, torch.ones(128), 128, torch.float32)
    monkeypatch.setattr(launch, "MOST_AHEAD", packed.data.nbytes - 1)
    launch.run_linear(*given, behind_norm=True)
    assert not asked
    monkeypatch.setattr(launch, "MOST_AHEAD", packed.data.nbytes)
    launch.run_linear(*given, behind_norm=True)
    assert asked


@pytest.mark.parametrize("bits,head_dim", [(4, 64), (4, 100), (3, 64), (3, 100)])
def test_attention_asks_once_for_the_rows_that_are_there_and_for_none_behind(asked, bits, head_dim):
    length, capacity, kv_heads = 70, 96, 2
    cache = QuantizedKV.empty(1, kv_heads, head_dim, capacity, bits=bits)
    k, v = (normal(1, length, kv_heads, head_dim, seed=i) for i in range(2))
    cache.append(k, v, backend="reference")
    cache.decode(normal(1, kv_heads, head_dim, seed=3), backend="triton")
    size = cache.layout.row_bytes
    for data in (cache.k_data, cache.v_data):
        times = bytes_of(asked, data).reshape(kv_heads, capacity, -1)[..., :size]
        assert (times[:, :length] == 1).all() and not times[:, length:].any()


def test_a_norm_asks_for_its_gains(asked):
    gain = torch.ones(200, dtype=torch.float16)
    rmsnorm_quantize(normal(2, 200, dtype=torch.float16), gain, "int8_absmax", backend="triton")
    assert (bytes_of(asked, gain) == 2).all()  # by each of two rows
