"""Settings of the tests of jobs that look into a model."""

from __future__ import annotations

import pytest
from support_probe import Pretrained

from paperlm.jobs.angular_distance import AngularDistance
from paperlm.jobs.block_removal import BlockRemoval
from paperlm.jobs.gradient_norms import GradientNorms
from paperlm.jobs.output_variance import OutputVariance

HUB = "local:smollm2_135m_instruct"
OWN_TEXT = {"text": "bundled:c4_sample", "text_tokens": 16}
TASK = {"task": "arc_easy", "source": "bundled", "items": 10, "max_length": 64}
SMALL = {AngularDistance: {"documents": 6}, OutputVariance: {"documents": 6}, BlockRemoval: {"documents": 6}}
SMALL |= {GradientNorms: {"batches": 2, "batch": 3}}
kinds = pytest.mark.parametrize("kind", SMALL, ids=lambda kind: kind.kind)


def job_of(kind, of=None, **settings):
    """A small job of a kind, on a stand-in for a pre-training unless it is of another one."""
    return kind(of=of or Pretrained(), **SMALL[kind] | settings)
