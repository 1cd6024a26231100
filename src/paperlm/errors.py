"""Errors a user can act on. Each message says what is wrong, where, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PaperLMError(Exception):
    """Base of every error that the command line prints without a traceback."""


class SpecError(PaperLMError):
    """A paper, scale or configuration file asks for something that does not exist or makes no sense."""


class DataError(PaperLMError):
    """A data file or tokenizer is missing, altered, truncated or does not fit."""


class CheckpointError(PaperLMError):
    """A checkpoint cannot be used for this run."""


class RecordError(PaperLMError):
    """A result record is unreadable or incomplete."""


class JobError(PaperLMError):
    """A job cannot be done with the model, data or machine that it was given."""


class Interrupted(PaperLMError):
    """A job was asked to stop; it goes on where it was when it is started again."""


LISTED = 40
"So many known names are listed in an error; of more, the nearest ones."


def nearest(name: object, known: Iterable[str]) -> str | None:
    """The known name that is most like another one; None if none is near."""
    names = {str(k).lower(): str(k) for k in known}
    near = difflib.get_close_matches(str(name).lower(), names, n=1, cutoff=0.5)
    return names[near[0]] if near else None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` with the nearest known name; empty if none is near."""
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near else ""


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """Message for an unknown name: the nearest known one first, then all of them.

    >>> unknown("norm", "mixln", ["mix_ln", "pre_ln"])
    "unknown norm 'mixln'; did you mean 'mix_ln'? known: mix_ln, pre_ln"
    """
    names = sorted(str(k) for k in known)
    hint = did_you_mean(name, names) or ";"
    if len(names) > LISTED:
        shown = difflib.get_close_matches(str(name), names, n=5, cutoff=0.0)
        return f"unknown {kind} {str(name)!r:.80}{hint} nearest of {len(names)}: {', '.join(shown)}"
    return f"unknown {kind} {str(name)!r:.80}{hint} known: {', '.join(names) or 'none'}"
