"""Every verb with each of its arguments wrong, read off the parser: a sentence, status 2, and nothing written."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import pytest
import support_kills
from test_arguments import refusal

from paperlm import cli
from paperlm.plan.project import ROOT

NONSENSE = "no_such_thing"
WRONG = (NONSENSE, "-1", "README.md/x", "src")
"Of these each type of an argument refuses one; a type that takes them all checks nothing."
RIGHT = ("{}", "1", "x.csv", "x.svg", "x.jsonl", "pyproject.toml", "no_folder")
NAMES = {"table": "mixln_table1", "figure": "mixln_figure5", "op": "cross_entropy", "what": "mixln_figure5"}
"What a positional argument can be, so that the wrong one is the only one."


def takes(action: argparse.Action, text: str) -> bool:
    if action.choices is not None:
        return text in action.choices
    try:
        (action.type or str)(text)
    except (argparse.ArgumentTypeError, ValueError):
        return False
    return True


def written(action: argparse.Action, value: str) -> list[str]:
    return [action.option_strings[-1], value] if action.option_strings else [value]


def right(action: argparse.Action) -> list[str]:
    """An argument that has to be there, or keeps a verb off a GPU."""
    if action.choices is not None and "cpu" in action.choices:
        return written(action, "cpu")
    if action.option_strings and not action.required:
        return []
    if action.nargs in ("*", "?") and action.dest not in NAMES:
        return []
    known = NAMES.get(action.dest, NONSENSE)
    return written(action, known if action.type is None else next(v for v in RIGHT if takes(action, v)))


def wrong(action: argparse.Action) -> Iterator[list[str]]:
    option = action.option_strings[-1] if action.option_strings else ""
    if action.nargs == 0:
        yield [f"{option}=5"]
        return
    if option and action.nargs != "*":
        yield [option]
    if action.type is None and action.choices is None:
        yield written(action, NONSENSE)  # a name, which the verb looks up
    else:
        yield written(action, next((v for v in WRONG if not takes(action, v)), NONSENSE))


def commands() -> Iterator[list[str]]:
    """Of each verb: an option that it has not, each required argument missing, each argument wrong."""
    _, verbs = cli._parser()
    for name in verbs:
        actions = [a for a in verbs[name]._actions if not isinstance(a, argparse._HelpAction)]
        yield [name, *(part for a in actions for part in right(a)), "--no-such-option"]
        for one in actions:
            others = [part for a in actions if a is not one for part in right(a)]
            if one.required and one.nargs != "*":
                yield [name, *others]
            for bad in wrong(one):
                yield [name, *others, *bad]


@pytest.fixture(scope="session")
def hooked() -> None:
    sys.addaudithook(support_kills.hook)


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_a_wrong_argument_ends_in_a_sentence_and_status_2_and_nothing_is_written(command, capsys, monkeypatch, hooked):
    monkeypatch.chdir(ROOT)
    changed = []
    caches = ("__pycache__", "/dev/null", "matplotlib", ".cache", "torchinductor")
    monkeypatch.setattr(
        support_kills, "watch", lambda event, path: any(c in path for c in caches) or changed.append(f"{event} {path}")
    )
    said = refusal(command, capsys)
    monkeypatch.setattr(support_kills, "watch", None)
    *usage, last = said.splitlines()
    assert "error: " in last and "Traceback" not in said
    assert all(line.startswith(("usage: ", " ")) for line in usage), "one sentence below what argparse shows"
    assert len(last) > len("error: ") + 10 and changed == []
