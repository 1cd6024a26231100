"""Several processes that make one job under torchrun: what one of them decides for the others.

They agree before any of them joins a process group, by torchrun's own store, so that nobody waits in a group that the
others never join.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

from paperlm.errors import JobError

T = TypeVar("T", bound="bool | str | list[str] | None")
LOOK_SECONDS = 0.2
_questions = itertools.count()


def world_size() -> int:
    """How many processes make the job; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1))


def leads() -> bool:
    """Whether this process is alone, or the leading one of several under torchrun."""
    return not int(os.environ.get("RANK", 0))


def leads_host() -> bool:
    """Whether this process is the first of those on its machine."""
    return not int(os.environ.get("LOCAL_RANK", 0))


def on_this_host() -> int:
    """How many of the processes are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def agreed(decide: Callable[[], T], *, by_host: bool = False) -> T:
    """What `decide` says in the leading process, or `by_host` in the first of each machine, on every process.

    The others wait for it, however long it takes, and do not call `decide`; where it raises, torchrun ends them. Every
    process has to ask the same questions in the same order. The answer: a plain JSON value. Raises JobError for
    several processes that torchrun did not start.
    """
    if world_size() == 1:
        return decide()
    host = os.environ.get("GROUP_RANK", "0") if by_host else "all"
    store, name = _store(), f"paperlm/{host}/{next(_questions)}"
    if leads_host() if by_host else leads():
        answer = decide()
        store.set(name, json.dumps(answer))
        return answer
    while not store.check([name]):
        time.sleep(LOOK_SECONDS)
    return json.loads(store.get(name))


@functools.cache
def _store() -> Any:
    """What the processes of one torchrun share before they are a group."""
    from torch.distributed import rendezvous

    try:
        return next(rendezvous("env://"))[0]
    except ValueError as error:
        raise JobError(f"WORLD_SIZE is {world_size()}, and this is no process of torchrun: {error}") from None
