"""Helpers of the tests on image classification: jobs at the smoke scale, and their prepared images."""

from __future__ import annotations

import functools
from pathlib import Path

from paperlm.data.items import prepare_any
from paperlm.jobs.image_classification import ImageClassification
from paperlm.plan.project import Project


@functools.cache
def _fields() -> dict[str, object]:
    project = Project({"scale": "smoke"})
    cell = next(c for c in project.cells("mixln_table4") if (c.row, c.column) == ("Mix-LN", "ViT-Small"))
    return cell.jobs[0].fields()


def image_job(**changes: object) -> ImageClassification:
    """Mix-LN ViT-Small at the smoke scale, with changes."""
    return ImageClassification.model_validate({**_fields(), **changes})


def prepared(job: ImageClassification, folder: Path) -> Path:
    """Manifest of the job's images, below `folder`."""
    return prepare_any(job.image_data(), folder / job.image_data().data_id)
