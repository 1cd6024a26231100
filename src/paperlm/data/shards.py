"""Prepared tokens, memory-mapped. Batches are a function of (seed, update), so that resuming is exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from paperlm.errors import DataError
from paperlm.files import check_file, read_sealed, write_sealed


class TokenShards:
    """The examples of one split, in file order."""

    def __init__(self, manifest_path: Path, split: str) -> None:
        """Raises DataError if a shard is missing, truncated or altered."""
        self.manifest = load_manifest(manifest_path)
        self.pad_id: int = self.manifest["pad_id"]
        self.tokens: int = self.manifest[split]["tokens"]
        self._arrays, self._starts = [], [0]
        for shard in self.manifest[split]["shards"]:
            path = manifest_path.parent / shard["file"]
            remedy = f"delete the folder {manifest_path.parent} and start again: it is rebuilt"
            check_file(path, shard["sha256"], DataError, remedy)
            self._arrays.append(np.load(path, mmap_mode="r", allow_pickle=False))
            self._starts.append(self._starts[-1] + shard["rows"])

    def __len__(self) -> int:
        return self._starts[-1]

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Examples by number, (len(indices), seq_len) int64."""
        shard = np.searchsorted(self._starts, indices, side="right") - 1
        return np.stack([self._arrays[s][i - self._starts[s]] for s, i in zip(shard, indices, strict=True)]).astype(
            np.int64
        )


class BatchOrder:
    """Which examples each update sees: every epoch is a fresh permutation drawn from (seed, epoch)."""

    def __init__(self, n_examples: int, batch: int, seed: int) -> None:
        self.n_examples, self.batch, self.seed = n_examples, batch, seed
        self._epochs: dict[int, np.ndarray] = {}

    def _epoch(self, epoch: int) -> np.ndarray:
        if epoch not in self._epochs:
            self._epochs = {e: p for e, p in self._epochs.items() if e >= epoch - 1}
            self._epochs[epoch] = np.random.default_rng([self.seed, epoch]).permutation(self.n_examples)
        return self._epochs[epoch]

    def indices(self, update: int) -> np.ndarray:
        """Example numbers of one update, counted from 0."""
        positions = np.arange(update * self.batch, (update + 1) * self.batch)
        epochs, offsets = np.divmod(positions, self.n_examples)
        return np.array([self._epoch(int(e))[o] for e, o in zip(epochs, offsets, strict=True)])


WHAT, PROGRESS = "a manifest of prepared data", "progress of a preparation of data"


def write_manifest(folder: Path, manifest: dict[str, Any]) -> Path:
    """The manifest of prepared data, written last; returns its path."""
    write_sealed(folder / "manifest.json", WHAT, manifest)
    return folder / "manifest.json"


def load_manifest(path: Path, data_id: str | None = None) -> dict[str, Any]:
    """Manifest of prepared data. Raises DataError if it is missing or altered, or not of `data_id`."""
    if not path.exists():
        raise DataError(f"{path}: no prepared data; run the job with --with-parents, which prepares it first")
    remedy = f"delete the folder {path.parent} and start again: it is rebuilt"
    manifest = read_sealed(path, WHAT, ["data_id"], DataError, remedy)
    if data_id not in (None, manifest["data_id"]):
        raise DataError(f"{path}: is of {manifest['data_id']}, not of {data_id}; {remedy}")
    return manifest


def write_progress(path: Path, data_id: str, progress: dict[str, Any]) -> None:
    """How far a preparation is, so that it goes on there after a kill."""
    write_sealed(path, PROGRESS, {"data_id": data_id, "progress": progress})


def read_progress(path: Path, data_id: str) -> dict[str, Any] | None:
    """What `write_progress` wrote; None if there is none, or of other data. Raises DataError if it was altered."""
    if not path.exists() and not path.is_symlink():
        return None
    remedy = f"delete the folder {path.parent} and start again: it is rebuilt"
    found = read_sealed(path, PROGRESS, ["data_id", "progress"], DataError, remedy)
    return found["progress"] if found["data_id"] == data_id else None
