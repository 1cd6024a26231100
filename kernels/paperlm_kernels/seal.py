"""A checksum that a JSON object carries of itself, so that a damaged digit is not taken for a number."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

SEAL = "seal"
"Key of a JSON object with the SHA-256 of the rest of it."


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """`value` with its seal in place of the one it had."""
    rest = {key: item for key, item in value.items() if key != SEAL}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return {**rest, SEAL: hashlib.sha256(text.encode()).hexdigest()}


def is_sealed(value: Mapping[str, Any]) -> bool:
    """Whether an object has a seal, and the right one."""
    try:
        return value.get(SEAL) == sealed(value)[SEAL]
    except (ValueError, RecursionError):
        return False
