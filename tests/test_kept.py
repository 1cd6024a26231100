"""Answers that an object keeps."""

from __future__ import annotations

import weakref

import pytest

from paperlm.kept import kept
from paperlm.plan.project import Project


class Toy:
    def __init__(self) -> None:
        self.asked = []

    @kept
    def double(self, number: int) -> int:
        self.asked.append(number)
        return 2 * number

    @kept
    def half(self, number: int) -> float:
        self.asked.append(number)
        if number == 3:
            raise ValueError("odd")
        return number / 2


def test_a_method_is_asked_once_for_each_argument_and_each_object_has_answers_of_its_own():
    one, other = Toy(), Toy()
    assert [one.double(2), one.double(2), one.half(2), other.double(2)] == [4, 4, 1.0, 4]
    assert (one.asked, other.asked) == ([2, 2], [2])


def test_an_error_is_no_answer():
    toy = Toy()
    for _ in range(2):
        with pytest.raises(ValueError, match="odd"):
            toy.half(3)
    assert toy.asked == [3, 3]


def test_a_project_goes_with_the_last_who_uses_it():
    project = Project({"scale": "smoke"})
    assert project.jobs_of("mixln_table1") is project.jobs_of("mixln_table1")
    gone = weakref.ref(project)
    del project
    assert gone() is None
