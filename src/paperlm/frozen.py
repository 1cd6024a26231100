"""Values: immutable pydantic models that refuse unknown keys, and the digest that names them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import BaseModel, ConfigDict


class Frozen(BaseModel):
    """Unknown keys and numbers that are not finite are errors; values cannot be changed after construction."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def digest(value: Any, length: int = 8) -> str:
    """First hexadecimal digits of the SHA-256 of the value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:length]
