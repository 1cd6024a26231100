"""The words of verdicts and their colours: one list for the terminal, the report and `show`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Mood = Literal["good", "bad", "open", ""]

NOT_COMPARABLE = "not comparable at this scale"
NOT_FOUND = "not found"
NOT_PRINTED = "not printed"
NOT_RUN = "not run"
NOT_TESTED = "not tested"
SEE_CLAIMS = "see claims"
OUT_OF_MEMORY = "OOM"
"How tables print that a method did not fit."
ENVIRONMENT_BOUND = "environment-bound"
MISPRINT = "misprint"
"The printed number is not what its column says; the reason stands beside it."
EARLIER_RULES = "earlier rules"
"Label of a number whose record was made when the same settings gave another number."

REFERENCE = "PyTorch reference, not the kernels"
"Label of a measurement of ours where no kernels ran: its memory and time say nothing about them."

MOODS: dict[str, Mood] = {
    "match": "good",
    "within seeds": "good",
    "diverged as published": "good",
    "out of memory as published": "good",
    "holds": "good",
    "differs": "bad",
    "fails": "bad",
    "undecided": "open",
    "blocked": "open",
}
"Verdicts on cells and claims that are coloured."

UNCOLOURED = (NOT_COMPARABLE, NOT_FOUND, NOT_PRINTED, NOT_RUN, NOT_TESTED, ENVIRONMENT_BOUND, MISPRINT, SEE_CLAIMS)
"Verdicts that say that nothing was compared."

TERMINAL = {"good": "green", "bad": "red", "open": "yellow", "": ""}


def mood(verdict: str) -> Mood:
    """good, bad, open, or empty. `within 1 %` and its like are good."""
    return "good" if verdict.startswith("within ") else MOODS.get(verdict, "")


def why(claim: Mapping[str, Any]) -> str:
    """What stands beside a verdict of <exhibit>.claims.csv: its reason, how clear it is, and what would decide it."""
    said = [claim["reason"]]
    if claim["margin"] and claim["detectable"] not in ("", "0") and claim["verdict"] != NOT_TESTED:
        said.append(f"gap {claim['margin']}, detectable {claim['detectable']}")
    if claim["would_decide"]:
        said.append(f"would decide it: {claim['would_decide']}")
    return "; ".join(filter(None, said))


def named(claim: Mapping[str, Any]) -> str:
    """Id of a claim, and which part of it."""
    return f"{claim['claim']} [{claim['part']}]" if claim["part"] else claim["claim"]


def painted(verdict: str, text: str | None = None) -> str:
    """`text` (the verdict itself if left out) in the verdict's colour, in rich's markup."""
    colour, text = TERMINAL[mood(verdict)], verdict if text is None else text
    return f"[{colour}]{text}[/]" if colour and text else text
