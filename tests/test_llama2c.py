"""Checkpoints of llama2.c: what they hold computes what its program computes, and damage is refused."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from paperlm.data.model_files import ModelData, model_files, prepare_model_files
from paperlm.data.registry import HERE, model_entry
from paperlm.errors import JobError, SpecError
from paperlm.jobs.base import Inputs, Machine
from paperlm.jobs.hub_model import HubModel, run
from paperlm.jobs.stored_perplexity import StoredPerplexity
from paperlm.jobs.weight_entropy import WeightEntropy
from paperlm.jobs.weight_entropy import run as entropy
from paperlm.models.folder import load_model
from paperlm.models.llama2c import read_checkpoint

NAME = "bundled:stories260k"
QUIET = Machine(device="cpu", progress=False)


@pytest.fixture(scope="module")
def path() -> Path:
    return HERE / model_entry(NAME)[1].files[0].path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model as the job leaves it."""
    root = tmp_path_factory.mktemp("stories")
    manifest = prepare_model_files(ModelData(model=NAME), root / "data")
    (root / "model").mkdir()
    found = run(HubModel(name=NAME), Inputs(data=(manifest,), model=root / "model", work=root), QUIET)
    assert found.metrics["blocks"] == 5 and found.metrics["parameters"] == 260_032
    return root / "model"


def norm(x, weight):
    return x / np.sqrt((x * x).mean() + 1e-5) * weight


def turned(heads, place):
    """Neighbours of each head turned by their angle, as llama2.c's program turns them."""
    size = heads.shape[1]
    angle = place / 10_000 ** (np.arange(0, size, 2) / size)
    even, odd = heads[:, ::2], heads[:, 1::2]
    both = np.stack([even * np.cos(angle) - odd * np.sin(angle), even * np.sin(angle) + odd * np.cos(angle)], axis=2)
    return both.reshape(heads.shape)


def logits(path: Path, ids: list[int]) -> np.ndarray:
    """What llama2.c's program computes, token by token, in float64."""
    data = path.read_bytes()
    wide, inner, blocks, heads, keys, rows, _ = struct.unpack("<7i", data[:28])
    numbers, head = iter(np.frombuffer(data, "<f4", offset=28).astype(np.float64)), wide // heads
    take = lambda *shape: np.fromiter(numbers, float, int(np.prod(shape))).reshape(shape)  # noqa: E731
    embedding, before = take(rows, wide), take(blocks, wide)
    q, k, v = take(blocks, wide, wide), take(blocks, keys * head, wide), take(blocks, keys * head, wide)
    o, between = take(blocks, wide, wide), take(blocks, wide)
    gate, down, up, last = take(blocks, inner, wide), take(blocks, wide, inner), take(blocks, inner, wide), take(wide)
    kept, found = {block: ([], []) for block in range(blocks)}, []
    for place, token in enumerate(ids):
        x = embedding[token]
        for block, (ks, vs) in kept.items():
            y = norm(x, before[block])
            query = turned((q[block] @ y).reshape(heads, head), place)
            ks.append(turned((k[block] @ y).reshape(keys, head), place))
            vs.append((v[block] @ y).reshape(keys, head))
            mixed = []
            for index in range(heads):
                own = index // (heads // keys)
                score = np.exp([key[own] @ query[index] / np.sqrt(head) for key in ks])
                mixed.append(score / score.sum() @ np.array([value[own] for value in vs]))
            x = x + o[block] @ np.concatenate(mixed)
            y = norm(x, between[block])
            a = gate[block] @ y
            x = x + down[block] @ (a / (1 + np.exp(-a)) * (up[block] @ y))
        found.append(embedding @ norm(x, last))
    return np.array(found)


def test_the_model_computes_what_the_program_of_its_format_computes(path, folder):
    ids = [1, 403, 407, 261, 378, 7, 500, 33, 33, 12]
    wanted = logits(path, ids)
    for model in (read_checkpoint(path), load_model(folder, head="own")):
        with torch.no_grad():
            got = model(torch.tensor([ids])).logits[0].double().numpy()
        np.testing.assert_allclose(got, wanted, atol=2e-4)


def test_weights_without_a_tokenizer_are_read_as_weights_and_refused_as_a_reader_of_text(folder):
    assert not (folder / "tokenizer.json").exists()
    job = WeightEntropy(of=HubModel(name=NAME))
    found = entropy(job, Inputs(models={"of": folder}, work=folder), QUIET).metrics
    assert 2.4 < found["exponent"] < 3 and found["mantissa"] > 6.9
    assert found["weights"] == 5 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 172)
    with pytest.raises((SpecError, ValueError), match="here without its tokenizer: no text can be given to it"):
        StoredPerplexity(of=HubModel(name=NAME), store="plain", text="bundled:c4_sample", documents=4, window=32)


def test_a_file_that_is_cut_or_of_another_format_is_refused(path, tmp_path):
    data = path.read_bytes()
    for name, wrong, words in (
        ("cut.bin", data[:-4], "where its header means 1056540: damaged"),
        ("short.bin", data[:20], "no checkpoint of llama2.c"),
        ("heads.bin", struct.pack("<7i", 64, 172, 5, 7, 4, 512, 512) + data[28:], "no checkpoint of llama2.c"),
        ("own_head.bin", struct.pack("<7i", 64, 172, 5, 8, 4, -512, 512) + data[28:], "its head the embedding"),
    ):
        (tmp_path / name).write_bytes(wrong)
        with pytest.raises(JobError, match=words):
            read_checkpoint(tmp_path / name)


def test_the_prepared_file_is_the_packages_and_named_with_its_licence(tmp_path):
    manifest = prepare_model_files(ModelData(model=NAME), tmp_path)
    assert [file.name for file in model_files(manifest)] == ["stories260K.bin"]
    assert '"licence": "MIT, copyright 2023 Andrej Karpathy"' in manifest.read_text()
