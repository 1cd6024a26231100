"""Answers of a method that are worked out once for each of its objects, and are gone with the object.

functools.cache would keep every object for as long as the process lives: a project is some 17 MB.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def kept(method: F) -> F:
    """`functools.cache` of a method whose arguments are positional and can be hashed; the answers stay in the object.
    What raises an error is asked again."""

    @functools.wraps(method)
    def answer(self: Any, *arguments: Any) -> Any:
        answers = self.__dict__.setdefault("_kept", {}).setdefault(method.__name__, {})
        if arguments not in answers:
            answers[arguments] = method(self, *arguments)
        return answers[arguments]

    return answer
