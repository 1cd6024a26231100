"""A setting that is left at its default is no part of a job's name: another default makes another number under the same
name, and must raise the kind's `behaviour`. tests/job_defaults.json lists every default and the behaviour it came with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paperlm.jobs import Job, job_kinds
from paperlm.jobs.lm_eval import LmEval

LIST = Path(__file__).with_name("job_defaults.json")


def listed() -> list[dict[str, Any]]:
    return json.loads(LIST.read_text(encoding="utf-8"))


def defaults(kind: type[Job]) -> dict[str, Any]:
    """Field -> default, as JSON has it."""
    fields = {name: info for name, info in kind.model_fields.items() if not info.is_required()}
    return {name: json.loads(json.dumps(f.get_default(call_default_factory=True))) for name, f in fields.items()}


def complaints(entries: list[dict[str, Any]], kinds: dict[str, type[Job]]) -> list[str]:
    """What is wrong, each with its remedy."""
    found = []
    for name, kind in kinds.items():
        for field, now in defaults(kind).items():
            history = [e for e in entries if (e["kind"], e["field"]) == (name, field)]
            line = json.dumps({"kind": name, "behaviour": kind.behaviour, "field": field, "default": now})
            if not history:
                found.append(f"{name}.{field} has a default that is not listed: add {line} to {LIST.name}")
            elif history[-1]["default"] != now and kind.behaviour <= history[-1]["behaviour"]:
                found.append(
                    f"{name}.{field}: the default was {history[-1]['default']!r} and is {now!r}: records of one name "
                    f"would differ. Raise `behaviour` in jobs/{name}.py to {kind.behaviour + 1} and add a line to "
                    f"{LIST.name} behind the old one; or give the setting in the papers and leave the default"
                )
            elif history[-1]["default"] != now:
                found.append(f"{name}.{field}: its new default is not listed: add {line} to {LIST.name}")
            behaviours = [entry["behaviour"] for entry in history]
            if behaviours != sorted(set(behaviours)) or any(b > kind.behaviour for b in behaviours):
                found.append(
                    f"{name}.{field}: behaviours {behaviours} in {LIST.name} have to rise, up to the kind's own"
                )
    return found


def test_a_default_that_changes_raises_the_behaviour_of_its_kind():
    assert complaints(listed(), job_kinds()) == []


def changed(default: object, behaviour: int) -> dict[str, type[Job]]:
    """lm_eval with another default of few_shot_seed."""

    class Changed(LmEval):
        few_shot_seed: int = default

    Changed.behaviour = behaviour
    return {"lm_eval": Changed}


@pytest.fixture
def entry() -> dict[str, Any]:
    (found,) = (e for e in listed() if (e["kind"], e["field"]) == ("lm_eval", "few_shot_seed"))
    return found


def test_another_default_under_the_same_behaviour_is_told_with_both_values(entry):
    (said,) = complaints(listed(), changed(entry["default"] + 1, entry["behaviour"]))
    assert f"was {entry['default']} and is {entry['default'] + 1}" in said
    assert f"Raise `behaviour` in jobs/lm_eval.py to {entry['behaviour'] + 1}" in said


def test_another_default_with_a_raised_behaviour_has_to_be_listed_and_then_passes(entry):
    kinds, new = changed(7, entry["behaviour"] + 1), {**entry, "behaviour": entry["behaviour"] + 1, "default": 7}
    (said,) = complaints(listed(), kinds)
    assert f"add {json.dumps(new)}" in said
    assert complaints([*listed(), new], kinds) == []


def test_a_line_that_claims_a_new_default_without_a_new_behaviour_is_told(entry):
    kinds = changed(7, entry["behaviour"])
    same = complaints([*listed(), {**entry, "default": 7}], kinds)
    ahead = complaints([*listed(), {**entry, "default": 7, "behaviour": entry["behaviour"] + 1}], kinds)
    assert ["have to rise" in said for said in (*same, *ahead)] == [True, True]


def test_a_default_that_was_never_listed_is_told(entry):
    (said,) = complaints([e for e in listed() if e != entry], changed(entry["default"], entry["behaviour"]))
    assert f"add {json.dumps(entry)}" in said
