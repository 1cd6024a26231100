"""Documents of a text as they are, for models that bring a tokenizer of their own."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from paperlm.data.registry import data_fingerprint, dataset_entry
from paperlm.data.shards import load_manifest, write_manifest
from paperlm.data.sources import documents
from paperlm.errors import DataError, SpecError
from paperlm.files import check_file, sha256_of, write_atomic
from paperlm.frozen import Frozen, digest


class TextData(Frozen):
    """The first validation documents of a text."""

    dataset: str = Field(pattern=r"^(bundled|local|hub):[\w./-]+$")
    documents: int = Field(gt=0)

    @field_validator("dataset")
    @classmethod
    def is_a_text(cls, value: str) -> str:
        try:
            _, entry = dataset_entry(value)
        except SpecError as error:
            raise ValueError(str(error)) from None
        if entry.form != "a text":
            raise ValueError(f"dataset {value!r} is {entry.form}, no text")
        return value

    def fingerprint(self) -> dict[str, Any]:
        """Checksums of the text's files."""
        return data_fingerprint(self.dataset)

    @property
    def data_id(self) -> str:
        """Folder name below results/data/."""
        name, _ = dataset_entry(self.dataset)
        slug = f"{name}-documents".replace("/", "_").lower()
        return f"{slug}-{digest({**self.model_dump(mode='json'), 'data': self.fingerprint()})}"


def prepare_text(settings: TextData, folder: Path, local_data: str = "") -> Path:
    """Write documents.jsonl (an object with `text` a line) and, last, manifest.json; returns the manifest's path.

    Raises DataError if a file of the text is missing or altered, or the text has fewer documents.
    """
    texts = list(itertools.islice(documents(settings.dataset, "validation", local_data), settings.documents))
    if len(texts) < settings.documents:
        raise DataError(
            f"{settings.dataset} has {len(texts)} validation documents, not {settings.documents}; ask for fewer"
        )
    path = folder / "documents.jsonl"
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)  # ASCII: splitlines knows more line ends
    write_atomic(path, lambda file: file.write(lines.encode()))
    name, entry = dataset_entry(settings.dataset)
    manifest = {
        "data_id": settings.data_id,
        "settings": settings.model_dump(mode="json"),
        "dataset": name,
        "licence": entry.licence,
        "citation": entry.citation,
        "checksums": settings.fingerprint(),
        "splits": {"validation": {"file": path.name, "rows": len(texts), "sha256": sha256_of(path)}},
    }
    return write_manifest(folder, manifest)


def read_documents(manifest_path: Path) -> list[str]:
    """The prepared documents. Raises DataError if their file is missing or altered."""
    stored = load_manifest(manifest_path)["splits"]["validation"]
    path = manifest_path.parent / stored["file"]
    remedy = f"delete the folder {path.parent} and start again: it is rebuilt"
    check_file(path, stored["sha256"], DataError, remedy)
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
