"""Damages containers and files of them in every way it knows, and sees that each is refused, or decoded inside of its
buffers.

    python -m paperlm_kernels.neuzip.fuzz --mutations 1000000 --out outcomes.json

A mutation is refused with a ContainerError, or changes no weight. One whose checksums were made to fit again (as nobody
does by accident) may change weights, but raises nothing else; NumPy looks at every index. Six of 100 mutations are of
files (`fuzz_files`): `.nzm`, safetensors, which has no checksum, and those of `save_packed`.
"""

from __future__ import annotations

import argparse
import collections
import json
import struct
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
import torch

from paperlm_kernels.bench.rows import commit_id
from paperlm_kernels.neuzip.errors import ContainerError
from paperlm_kernels.neuzip.fuzz_files import FORGED, Contents, Sort, bytes_changed, damaged, sorts
from paperlm_kernels.neuzip.record import from_bytes, pack

FILES = {22: 0, 25: 1, 28: 2, 62: 0, 65: 1, 68: 2}
"Last two digits of a mutation's number -> the sort of file that it is of: few, as files cost more than bytes."
UNNOTICED = "unnoticed"
_HEADER, _ENTRY = 128, 24


def samples() -> list[bytes]:
    """Small containers of every kind: profiles, mantissa bits, normalizers, patches, three blocks, and one kept as it
    is. Eleven, for every tenth mutation is read without checksums: of ten it would always be the same one."""
    rng = np.random.default_rng(0)
    weights = torch.from_numpy((rng.standard_normal(20_000) * 0.02).astype(np.float32)).bfloat16()
    weights[::100] *= 2.0**40
    few = weights[:1500]
    options = (
        {"profile": "fast"}, {"profile": "default"}, {"profile": "dense"}, {"profile": "fix4"},
        {"profile": "fast", "mant_bits": 3, "block_norm": 64}, {"profile": "fast", "mant_bits": 3},
        {"profile": "default", "mant_bits": 1, "block_norm": 512},
        {"profile": "fast", "mant_bits": 0, "block_norm": 32, "norm_semantics": "authors_v1"},
        {"profile": "fix4", "mant_bits": 1},
    )  # fmt: skip
    found = [pack(few, raw="never", **chosen).to_bytes() for chosen in options]
    blocks = pack(weights, raw="never", profile="fast")
    return [*found, blocks.to_bytes(), pack(few.view(30, 50)).to_bytes()]


def sealed(data: bytearray) -> bytearray:
    """With checksums that fit what is there, as far as the table of sections can be read."""
    count = struct.unpack_from("<I", data, 116)[0]
    size = _HEADER + _ENTRY * count + 4
    if size > len(data):
        return data
    for i in range(count):
        offset, length = struct.unpack_from("<QQ", data, _HEADER + _ENTRY * i + 8)
        crc = zlib.crc32(data[offset : offset + length]) if offset + length <= len(data) else 0
        struct.pack_into("<I", data, _HEADER + _ENTRY * i + 4, crc)
    struct.pack_into("<I", data, size - 4, zlib.crc32(data[: size - 4]))
    return data


def mutated(data: bytes, rng: np.random.Generator) -> tuple[str, bytearray]:
    """A kind of damage and what it makes of a container."""
    kind = rng.choice(["bit", "bytes", "truncate", "extend", "swap", "field", "forged", "forged field"])
    out = bytearray(data)
    head = struct.unpack_from("<I", data, 12)[0]
    if kind in ("bit", "bytes", "truncate", "extend", "forged"):
        bytes_changed(kind, out, rng, head if kind == "forged" else 0)
    elif kind == "swap":
        sections = (head - _HEADER - 4) // _ENTRY
        i, j = (_HEADER + _ENTRY * int(k) for k in rng.integers(0, sections, 2))
        out[i : i + _ENTRY], out[j : j + _ENTRY] = data[j : j + _ENTRY], data[i : i + _ENTRY]
        # that the order in the table means nothing is no damage; that ids change places is
        out[i : i + 4], out[j : j + 4] = data[i : i + 4], data[j : j + 4]
    else:
        width = int(rng.choice([1, 2, 4, 8]))
        place = int(rng.integers(8, head - 4)) // width * width
        extreme = int(rng.choice([0, 1, 2, 127, 128, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1]))
        out[place : place + width] = (extreme % 256**width).to_bytes(width, "little")
    return str(kind), sealed(out) if kind.startswith("forged") else out


def run(mutations: int, seed: int = 0, progress: bool = False) -> collections.Counter[str]:
    """How often which outcome: the name of an exception, `same weights`, `other weights` (forged only).

    Raises AssertionError for a mutation that changed weights unnoticed; whatever else a mutation raises, is a defect.
    """
    rng = np.random.default_rng(seed)
    originals = [(data, from_bytes(data).unpack().view(torch.int16)) for data in samples()]
    outcomes: collections.Counter[str] = collections.Counter()
    rounds = range(mutations)
    if progress:
        from tqdm import tqdm

        rounds = tqdm(rounds, unit=" mutations")
    with tempfile.TemporaryDirectory() as folder:
        files = sorts(Path(folder))
        path = Path(folder, "damaged")
        whole = []
        for file in files:
            path.write_bytes(file.data)
            whole.append(file.read(path))
        for number in rounds:
            if (place := FILES.get(number % 100)) is not None:
                kind, outcome = of_file(files[place], whole[place], rng, path)
            else:
                # a tenth without checksums: then only what keeps a decoder in its buffers is looked at
                kind, outcome = of_container(*originals[number % len(originals)], rng, number % 10 != 9)
            outcomes[outcome] += 1
            assert outcome != UNNOTICED, (
                f"mutation {number} ({kind}) of seed {seed} changed weights and was not noticed"
            )
    return outcomes


def of_container(data: bytes, weights: torch.Tensor, rng: np.random.Generator, checked: bool) -> tuple[str, str]:
    """A kind of damage to a container, and its outcome."""
    kind, changed = mutated(data, rng)
    try:
        packed = from_bytes(changed, "full" if checked else "none")
        packed.verify()
        found = packed.unpack()
    except ContainerError as error:
        return kind, type(error).__name__
    same = found.dtype == torch.bfloat16 and torch.equal(found.view(torch.int16).view(-1), weights.view(-1))
    allowed = kind.startswith("forged") or not checked
    return kind, "same weights" if same else "other weights" if allowed else UNNOTICED


def of_file(file: Sort, whole: Contents, rng: np.random.Generator, path: Path) -> tuple[str, str]:
    """The same of a file. One in which a name stands twice is refused, whatever was made to fit."""
    kind, changed = damaged(file, rng, path)
    path.write_bytes(changed)
    try:
        found = file.read(path)
    except file.refusal as error:
        return f"{kind}, {file.name}", type(error).__name__
    names = [name for name, *_ in found]
    allowed = kind in FORGED or not file.digest
    unnoticed = kind == "twice" or len(set(names)) < len(names) or not (found == whole or allowed)
    outcome = UNNOTICED if unnoticed else "same weights" if found == whole else "other weights"
    return f"{kind}, {file.name}", outcome


def main() -> None:
    """Prints the outcomes, and writes them with what they come from."""
    parser = argparse.ArgumentParser(prog="python -m paperlm_kernels.neuzip.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file for the outcomes, the seed and the versions")
    given = parser.parse_args()
    if given.mutations < 1:
        parser.error(f"--mutations {given.mutations}: give at least one")
    if given.out and not given.out.parent.is_dir():
        parser.error(f"--out {given.out}: there is no folder {given.out.parent}")
    began, commit = time.monotonic(), commit_id()  # of what is loaded now
    outcomes = run(given.mutations, given.seed, progress=True)
    for name, count in outcomes.most_common():
        print(f"{count:9d}  {name}")
    if given.out:
        record = {
            "mutations": given.mutations, "seed": given.seed, "outcomes": dict(outcomes.most_common()),
            "seconds": round(time.monotonic() - began), "commit": commit, "date": time.strftime("%Y-%m-%d"),
            "versions": {"numpy": np.__version__, "torch": torch.__version__},
        }  # fmt: skip
        given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
