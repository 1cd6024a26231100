"""The benchmark of decoding: both sides make tokens, at the paper's shapes, from the context that a row says."""

from __future__ import annotations

import json

import pytest
import torch

from paperlm.bench import main, with_ours

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    out = tmp_path_factory.mktemp("decode") / "rows.jsonl"
    chosen = "--cases 3B_b16 --scale small --measure decode,memory,kernels --repeats 2 --warmup 1"
    assert main(["decode", "--device", "cpu", *chosen.split(), "--out", str(out)]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_every_method_has_a_rate_and_its_shape_beside_it(rows):
    rates = {row["name"]: row for row in rows if row["metric"] == "throughput"}
    assert set(rates) == {"ours", "ours_kv4", "ours_kv3", "transformers", "transformers padded"}
    assert all(row["value"] > 0 and row["unit"] == "tokens/s" for row in rates.values())
    assert all(row["shape"]["batch"] == 2 and row["shape"]["context"] == 12 for row in rates.values())
    for row in rates.values():  # of the fastest round, which makes no fewer tokens than the 80th percentile
        assert 1e6 * row["shape"]["batch"] / row["fastest_token_us"] >= 0.999 * row["high"]
    launched = {row["name"]: row for row in rows if row["metric"] == "kernel"}
    assert set(launched) == set(rates) and all(row["unit"] == "us" for row in launched.values())
    said = {row["name"]: row["outcome"] for row in rows if row["metric"] == "outcome"}
    assert said.pop("transformers compiled") == "absent: it is compiled for a GPU"
    assert set(said) == set(rates) and all("on a GPU only" in one for one in said.values())  # memory


@pytest.mark.parametrize("method", ["ours", "ours_kv4"])
def test_keys_and_values_of_ours_are_those_of_the_seed(method):
    with_ours()
    from paperlm_kernels.bench.ops.decode import CASES
    from paperlm_kernels.bench.ops.decode.sides import Ours

    def held(seed: int) -> torch.Tensor:
        cache = Ours(CASES["3B_b1"].small(), method, CPU, seed).decoder.blocks[0].cache
        return cache.keys if method == "ours" else cache.k_data

    assert torch.equal(held(0), held(0)) and not torch.equal(held(0), held(1))


def test_the_shapes_are_the_papers():
    with_ours()
    from paperlm_kernels.bench.ops.decode import CASES

    case = CASES["3B_b16"]
    assert (case.size.hidden_size, case.size.intermediate_size, case.size.n_heads, case.size.n_layers) == (
        3200, 8640, 32, 26,
    )  # fmt: skip
    assert (case.batch, case.context) == (16, 2048)


def test_the_compiled_peer_makes_the_tokens_of_the_padded_one(monkeypatch):
    """Traced as for a GPU; what PyTorch then makes of it is left out, which takes a minute here."""
    with_ours()
    from paperlm_kernels.bench.ops.decode import CASES
    from paperlm_kernels.bench.ops.decode.sides import Peer, a_round

    calls, compile_ = [], torch.compile

    def traced(model, **options):
        compiled = compile_(model, backend="eager", **options)
        return lambda **given: (calls.append(1), compiled(**given))[1]

    monkeypatch.setattr(torch, "compile", traced)
    case, found = CASES["3B_b16"].small(), []
    for method in ("transformers padded", "transformers compiled"):
        side = Peer(case, method, CPU, 0)
        for layer in side.cache.layers:
            layer.keys.fill_(0.1)
            layer.values.fill_(0.2)
        a_round(side, side.advance, case.tokens, CPU)
        found.append((side.ids.clone(), side.cache.layers[0].keys.clone()))
    (ids, keys), (its_ids, its_keys) = found
    assert torch.equal(ids, its_ids) and torch.equal(keys, its_keys) and len(calls) == case.tokens + 1


def caches_width(side) -> int:
    return side.cache.layers[0].keys.shape[-1]


@pytest.mark.parametrize("method", ["ours", "ours_kv4", "ours_kv3", "transformers", "transformers padded"])
def test_a_round_begins_at_the_context_and_its_tokens_are_in_the_caches_behind_it(method):
    with_ours()
    from paperlm_kernels.bench.ops.decode import CASES
    from paperlm_kernels.bench.ops.decode.sides import Ours, Peer, a_round

    case = CASES["3B_b16"].small()
    of_peer = method.startswith("transformers")
    side = (Peer if of_peer else Ours)(case, method, CPU, 0)
    if of_peer:
        assert caches_width(side) == (24 if method.endswith("padded") else 20)

    def caches():
        if of_peer:
            return [layer.keys for layer in side.cache.layers]
        return [b.cache.keys if method == "ours" else b.cache.k_data for b in side.decoder.blocks]

    start = [held.clone() for held in caches()]
    assert all(held[:, :, : case.context].ne(0).any(-1).all() for held in start)
    ids = (side if of_peer else side.decoder).ids
    found = []
    for _ in range(2):
        ids.zero_()
        a_round(side, side.advance, case.tokens, CPU)
        found.append(ids.clone())
        position = side.position if of_peer else side.decoder.position
        assert set(position.flatten().tolist()) == {case.context + case.tokens}
    assert torch.equal(*found)  # the second round is the first again
    for held, old in zip(caches(), start, strict=True):
        changed = held.ne(old).flatten(3).any(-1)
        assert not changed[:, :, : case.context].any() and changed[:, :, case.context :].all()
