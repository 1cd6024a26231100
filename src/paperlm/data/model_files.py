"""Files of a model from elsewhere, fetched or linked into a folder by the data rule; jobs read them there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from paperlm.data import pickled
from paperlm.data.registry import ModelEntry, ModelRepository, model_entry
from paperlm.data.shards import load_manifest, write_manifest
from paperlm.data.sources import model_paths, verify
from paperlm.errors import DataError, SpecError
from paperlm.files import check_file, link_or_copy, sha256_of, temporary_beside
from paperlm.frozen import Frozen, digest

PATTERNS = ("*.safetensors", "*.json", "*.txt", "tokenizer.model")
"Files of a hub's repository that are fetched: no code, and pickled weights of a model alone that has no others."


class ModelData(Frozen):
    """The files of a model of the registry."""

    model: str = Field(pattern=r"^(bundled|local|hub):[\w./-]+$")

    @field_validator("model")
    @classmethod
    def model_exists(cls, value: str) -> str:
        try:
            model_entry(value)
        except SpecError as error:
            raise ValueError(str(error)) from None
        return value

    @property
    def dataset(self) -> str:
        """The model, as a record names what it was made from."""
        return self.model

    def fingerprint(self) -> dict[str, Any]:
        """Checksums of the files, or the commit that pins them; architecture and unused weights decide what is read."""
        _, entry = model_entry(self.model)
        return {
            "files": [file.sha256 for file in entry.files],
            "hub": entry.hub.model_dump(mode="json", exclude_defaults=True) if entry.hub else None,
            "architecture": entry.architecture,
            "unused_weights": entry.unused_weights,
        }

    @property
    def data_id(self) -> str:
        """Folder name below results/data/."""
        name, _ = model_entry(self.model)
        return f"{name.replace('/', '_').lower()}-{digest({'model': self.model, 'data': self.fingerprint()})}"


def prepare_model_files(settings: ModelData, folder: Path, local_data: str = "") -> Path:
    """Put the model's files and, last, manifest.json into `folder`; returns the manifest's path.

    A bundled or local file is checked against the registry and linked, or copied where links cannot be. Raises
    DataError if one is missing or altered, and for a hub that cannot be reached or has no weights that are read.
    """
    name, entry = model_entry(settings.model)
    folder.mkdir(parents=True, exist_ok=True)
    if entry.hub:
        _fetch(entry, folder)
    else:
        _link(settings.model, folder, local_data)
    temporary_beside(folder / "manifest.json").unlink(missing_ok=True)  # of a kill
    paths = sorted(path for path in folder.iterdir() if path.is_file() and path.name != "manifest.json")
    manifest = {
        "data_id": settings.data_id,
        "settings": settings.model_dump(mode="json"),
        "dataset": name,
        "licence": entry.licence,
        "citation": entry.citation,
        "checksums": settings.fingerprint(),
        "files": [{"file": p.name, "bytes": p.stat().st_size, "sha256": sha256_of(p)} for p in paths],
    }
    return write_manifest(folder, manifest)


def _link(model: str, folder: Path, local_data: str) -> None:
    for path, file in model_paths(model, local_data):
        verify(path, file)
        link_or_copy(path, folder / path.name)


def _fetch(entry: ModelEntry, folder: Path) -> None:
    """From the hub, or from the folder in its layout that PAPERLM_HUB_MIRROR names (the name stays the same)."""
    mirror = os.environ.get("PAPERLM_HUB_MIRROR")
    patterns = [*PATTERNS, *([pickled.PATTERN] if entry.pickled else [])]
    if mirror:
        source = Path(mirror) / entry.hub.name
        for pattern in patterns:
            for path in source.glob(pattern):
                shutil.copyfile(path, folder / path.name)
    else:
        from huggingface_hub import snapshot_download

        try:
            commit = _commit(entry.hub)
            snapshot_download(entry.hub.name, revision=commit, local_dir=folder, allow_patterns=patterns)
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"model {entry.hub.name!r} cannot be fetched ({type(error).__name__}: {error}); this needs the network "
                "and, for some models, an account of the hub; or a folder in the hub's layout named by the environment "
                "variable PAPERLM_HUB_MIRROR"
            ) from error
    if entry.pickled:
        pickled.to_safetensors(folder)
    if not any(folder.glob("*.safetensors")):
        others = f", nor as {pickled.PATTERN}" if entry.pickled else "; `pickled: true` in the registry reads others"
        raise DataError(f"{mirror or 'hub'}: {entry.hub.name} has no weights as safetensors{others}")


def _commit(hub: ModelRepository) -> str:
    """All 40 digits of the commit. Raises DataError if the first ones are, to the hub, a name of another commit, or a
    pull request is by now at another one."""
    if len(hub.revision) == 40 and not hub.ref:
        return hub.revision
    from huggingface_hub import HfApi

    commit = HfApi().model_info(hub.name, revision=hub.ref or hub.revision).sha or ""
    if not commit.startswith(hub.revision):
        raise DataError(
            f"model {hub.name!r}: {hub.ref or f'revision {hub.revision}'} is commit {commit or 'unknown'} on the hub, "
            f"not {hub.revision}: look at what has changed there, then correct the revision in the data registry"
        )
    return commit


def model_files(manifest_path: Path) -> list[Path]:
    """The prepared files. Raises DataError if one is missing or altered, or another one is beside them."""
    folder, paths = manifest_path.parent, []
    for stored in load_manifest(manifest_path)["files"]:
        paths.append(folder / stored["file"])
        remedy = f"delete the folder {folder} and start again: it is prepared anew"
        check_file(paths[-1], stored["sha256"], DataError, remedy)
    here = {path for path in folder.iterdir() if not path.is_dir() or path.is_symlink()}
    if strangers := sorted(here - {manifest_path, *paths}):
        raise DataError(f"{strangers[0]}: is not in the manifest, and would be read; remove it")
    return paths
