"""Small models of transformers with fresh weights."""

from __future__ import annotations

import torch
import transformers


def fresh(cls: type[transformers.PreTrainedModel], seed: int = 0, **settings: object) -> transformers.PreTrainedModel:
    """A model of this class, whose weights follow from the seed, in evaluation mode and float32."""
    torch.manual_seed(seed)
    return cls(cls.config_class(**settings)).eval()
