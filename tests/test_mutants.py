"""Mutants: what is drawn, what counts as caught, and what the record of `make mutants` says.

cosmic-ray, which makes them, is not installed here: `support_mutants_sample.py` asks for it only when it draws.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import support_mutants
import support_mutants_bench
from support_mutants import record, rows, run, sentence
from support_mutants_areas import AREAS, Area
from support_mutants_bench import Bench, Runs
from support_mutants_sample import SAMPLE, SEED, Mutant, change, drawn, files, placed, silent, told

from paperlm.plan.project import ROOT


def mutants(area: str, places: int, each: int = 3) -> list[Mutant]:
    return [
        Mutant(area, f"{area}.py", f"core/Operator{which}", 0, (line, 4), (line, 9))
        for line in range(places)
        for which in range(each)
    ]


@pytest.mark.parametrize("name", AREAS)
def test_modules_and_tests_of_an_area_exist(name):
    area = AREAS[name]
    assert all(list(ROOT.glob(pattern)) for pattern in area.modules)
    assert all((ROOT / f"tests/test_{test}.py").is_file() for test in (*area.tests, *area.further))
    assert not set(area.tests) & set(area.further)


def test_no_module_belongs_to_two_areas():
    assert max(Counter(name for area in AREAS.values() for name in files(area)).values()) == 1


def test_a_sample_is_the_same_each_time_has_one_mutant_at_a_place_and_as_many_of_each_area_as_there_are():
    everything = mutants("small", 5) + mutants("large", 100) + mutants("other", 100)
    sample = drawn(everything, lambda mutant: True, size=65)
    assert Counter(m.area for m in sample) == {"small": 5, "large": 30, "other": 30}
    assert len({(m.module, m.start) for m in sample}) == 65
    assert drawn(reversed(everything), lambda mutant: True, size=65) == sample
    assert drawn(everything, lambda mutant: True, size=65, seed=SEED + 1) != sample
    assert sample[:12] == drawn(everything, lambda mutant: True, size=12), "a sample that is cut short is a fair one"


def test_lines_that_come_before_a_mutant_change_neither_its_name_nor_the_sample():
    source = "a = 1\n\ndef f(x):\n    y = x + 1\n    return y\n\ndef g(x):\n    y = x + 1\n    return y - 2\n"
    moved = f"import os\n\n{source}".replace("    y = x", "        y = x")

    def found(text: str) -> list[Mutant]:
        places = [(n, line.index("+")) for n, line in enumerate(text.splitlines(), 1) if "+" in line]
        raw = [Mutant("a", "a.py", f"core/{o}", n, p, (p[0], p[1] + 1)) for n, p in enumerate(places) for o in "AAB"]
        return list(placed(raw, {"a.py": text}))

    before, after = found(source), found(moved)
    assert [m.key for m in before] == [m.key for m in after] and len({m.key for m in before}) == 6
    chosen, again = (drawn(some, lambda mutant: True, size=1) for some in (before, after))
    assert [m.key for m in chosen] == [m.key for m in again]


def test_what_is_no_python_gives_way_to_another_mutant_of_its_place():
    everything = mutants("one", 10)
    sample = drawn(everything, lambda mutant: mutant.operator == "core/Operator1", size=30)
    assert len(sample) == 10 and {m.operator for m in sample} == {"core/Operator1"}
    assert drawn(everything, lambda mutant: False, size=30) == []


def test_annotations_of_functions_are_left_out_and_those_of_fields_are_not():
    source = "class A:\n    a: int | None = 1\n\ndef f(x: int | None) -> str | int:\n    y: int | str = x or 2\n"
    spans = {source.splitlines()[line - 1][start:end] for (line, start), (_, end) in silent(source)}
    assert spans == {"int | None", "str | int", "int | str"}
    assert {start[0] for start, _ in silent(source)} == {4, 5}
    places = {(2, 7): True, (4, 9): False, (4, 24): False, (5, 7): False, (5, 21): True}
    for (line, column), counts in places.items():
        mutant = Mutant("a", "a.py", "core/ReplaceBinaryOperator_BitOr_Add", 0, (line, column), (line, column + 1))
        assert list(told([mutant], {"a.py": source})) == [mutant] * counts


def test_operators_that_ask_whether_equal_things_are_one_are_left_out():
    names = ("core/ReplaceComparisonOperator_Eq_Is", "core/ReplaceComparisonOperator_Is_IsNot", "core/NoOp")
    found = [Mutant("a", "a.py", name, 0, (1, 0), (1, 1)) for name in names]
    assert [m.operator for m in told(found, {"a.py": "1\n"})] == [names[1]]


def test_a_change_is_shown_as_the_lines_that_differ():
    assert change("a\n  if x:\n    b\n", "a\n  if not x:\n    b\n") == "- if x:\n+ if not x:"


TESTS = {
    "right": "from subject import double\n\ndef test_double():\n    assert double(3) == 6\n",
    "blind": "from subject import double\n\ndef test_double():\n    assert double(2) == 4\n",
    "slow": "import subprocess, sys\n\ndef test_waits():\n    subprocess.run([sys.executable, 'wait.py'])\n",
}
WAIT = "import os, pathlib, time\npathlib.Path('pid').write_text(str(os.getpid()))\ntime.sleep(600)\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "src").mkdir()
    (tmp_path / "src/subject.py").write_text("def double(x):\n    return x * 2\n")
    (tmp_path / "wait.py").write_text(WAIT)
    for name, text in TESTS.items():
        (tmp_path / f"tests/test_{name}.py").write_text(text)
    return tmp_path


@pytest.fixture
def tests(tree: Path) -> Iterator[Runs]:
    found = Runs(tree, sys.executable, {}, loaded=("pytest",))
    yield found
    found.close()


def test_a_fault_that_a_test_sees_is_caught_and_named_and_one_that_it_does_not_see_survives(tree, tests):
    assert tests.ask(["right", "blind"], 60) == ("survived", "")
    (tree / "src/subject.py").write_text("def double(x):\n    return x ** 2\n")
    assert tests.ask(["blind"], 60) == ("survived", "")
    assert tests.ask(["blind", "right"], 60) == ("caught", "tests/test_right.py::test_double")
    (tree / "src/subject.py").write_text("def double(x):\n")
    assert tests.ask(["right"], 60) == ("caught", "tests/test_right.py")


def test_a_fault_that_never_ends_is_caught_by_the_limit_and_leaves_no_process(tree, tests):
    assert tests.ask(["slow"], 5) == ("caught", "the time limit")
    pid = int((tree / "pid").read_text())
    for _ in range(50):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rsplit(")")[-1].split()[0] == "Z":
            return
        time.sleep(0.1)
    os.kill(pid, 9)
    raise AssertionError("what the tests had started went on")


def outcome(key: str, said: str, first: str, by: str = "") -> dict:
    row = {"key": key, "area": "schedule", "module": "m.py", "line": 3, "operator": "core/AddNot"}
    row |= {"made": {"python": "3.13.1"}, "left_out": [f"tests/test_{key}.py"]}
    return {**row, "change": f"- {key}", "outcome": said, "by": by, "first": first, "seconds": 1.0}


def test_a_record_counts_and_keeps_the_reasons_that_were_written_into_it(tmp_path):
    of = dict.fromkeys(AREAS, 7)
    lines = [
        outcome("a", "survived", "survived"),
        outcome("b", "caught", "caught", "t"),
        outcome("c", "survived", "survived"),
    ]
    lines += [outcome("c", "caught", "survived", "tests/test_new.py::test"), outcome("d", "survived", "survived")]
    state = tmp_path / "state.jsonl"
    state.write_text("".join(json.dumps(line) + "\n" for line in lines))
    earlier = {"survivors": [{"module": "m.py", "change": "- a", "reason": "equivalent: both are 0"}]}
    made = record(rows(state), of, earlier)
    assert (made["mutants"], made["caught"], made["caught before tests were added"], made["equivalent"]) == (4, 2, 1, 1)
    assert made["share caught of those that are not equivalent"] == round(2 / 3, 4)
    assert [(row["change"], row["reason"]) for row in made["survivors"]] == [
        ("- a", "equivalent: both are 0"),
        ("- d", ""),
    ]
    assert [(row["change"], row["by"]) for row in made["mended"]] == [("- c", "tests/test_new.py::test")]
    assert made["areas"]["schedule"] == {"possible": 7, "tried": 4, "caught": 2, "equivalent": 1}
    assert made["sample"] == SAMPLE and made["made with"] == [{"python": "3.13.1"}]
    unasked = made["tests that survivors were not asked, since they fail there without a mutant"]
    assert unasked == ["tests/test_a.py", "tests/test_d.py"]


RECORD = ROOT / "docs/reference/mutants.json"


def test_the_documents_say_what_the_record_holds_and_nearly_every_fault_is_seen():
    found = json.loads(RECORD.read_text())
    text = " ".join((ROOT / "docs/scales_and_clusters.md").read_text().split())
    assert sentence(found) in text
    assert found["mutants"] == sum(area["tried"] for area in found["areas"].values()) <= found["sample"]
    assert found["caught"] + len(found["survivors"]) == found["mutants"]
    assert found["share caught of those that are not equivalent"] >= 0.95
    assert all(row["reason"] for row in found["survivors"])


class Scripted:
    """Answers of tests in the order in which they are asked, and the limits that they were given."""

    def __init__(self, *answers: tuple) -> None:
        self.answers, self.limits = list(answers), []

    def ask(self, tests, limit: float, but=()) -> tuple:
        self.limits.append(limit)
        return self.answers.pop(0)

    run = ask


@pytest.mark.parametrize(
    ("answers", "said", "limits"),
    [
        ([("caught", "the time limit"), (0, [])], "caught", [63, 63]),
        ([("caught", "the time limit"), (None, []), ("survived", "")], "survived", [63, 63, 126]),
        ([("caught", "tests/test_a.py::t"), (None, []), ("survived", "")], "survived", [63, 63, 126]),
    ],
)
def test_a_time_that_is_too_short_without_the_mutant_as_well_says_nothing(tree, monkeypatch, answers, said, limits):
    bench, scripted = Bench(tree, sys.executable), Scripted(*answers)
    monkeypatch.setattr(bench, "runs", lambda area: scripted)
    monkeypatch.setattr(bench, "change", lambda mutant: ("before", "after"))
    mutant = Mutant("schedule", "src/subject.py", "core/AddNot", 0, (1, 0), (1, 1))
    assert bench.outcome(mutant, ["right"], 1.0, set())[0] == said
    assert scripted.limits == limits and (tree / "src/subject.py").read_text() == "before"


SHARED = """import os, pathlib, time
from subject import double

def test_double():
    with open({log!r}, "a") as file:
        file.write(os.getcwd() + "\\n")
    time.sleep(0.3)
    assert double({given}) == {right}
"""


def shared_out(tree: Path, folder: Path, workers: int) -> tuple[dict[str, tuple[str, str]], set[str]]:
    """Outcome and catching test of eight mutants of `double`, and the trees in which tests ran."""
    folder.mkdir()
    log = folder / "log.txt"
    for name, given, right in (("near", 2, 4), ("far", 3, 6)):
        (tree / f"tests/test_{name}.py").write_text(SHARED.format(log=str(log), given=given, right=right))
    faults = ["x * 3", "x ** 2", "x + x", "x - 2", "x + 2", "2 * x", "x << 1", "x // 2"]
    sample = [Mutant("toy", "src/subject.py", fault, 0, (2, 11), (2, 16), variant=n) for n, fault in enumerate(faults)]
    chosen = argparse.Namespace(
        state=folder / "state.jsonl", again=False, quick=False, without_failing=False, workers=workers,
        python=sys.executable,
    )  # fmt: skip
    run(sample, chosen)
    found = {row["key"]: (row["outcome"], row["by"]) for row in rows(chosen.state)}
    assert len(found) == len(faults)
    return {m.operator: found[m.key] for m in sample}, set(log.read_text().split())


def test_workers_share_the_mutants_in_copies_of_their_own_and_say_what_one_says(tree, tmp_path, monkeypatch):
    shutil.copy(ROOT / "tests/support_forks.py", tree / "tests")
    subprocess.run(["git", "init", "-q", str(tree)], check=True)
    for module in (support_mutants, support_mutants_bench):
        monkeypatch.setattr(module, "AREAS", {"toy": Area(("src/subject.py",), ("near",), ("far",))})
    monkeypatch.setattr(support_mutants, "MADE", "print('{}')")
    monkeypatch.setattr(support_mutants_bench, "ROOT", tree)
    monkeypatch.setattr(support_mutants_bench, "Runs", functools.partial(Runs, loaded=("pytest",)))
    monkeypatch.setattr(support_mutants_bench, "mutated", lambda m, source: source.replace("x * 2", m.operator))
    alone, of_one = shared_out(tree, tmp_path / "one", 1)
    shared, of_three = shared_out(tree, tmp_path / "three", 3)
    near, far = "tests/test_near.py::test_double", "tests/test_far.py::test_double"
    same, seen, missed = ("survived", ""), ("caught", near), ("caught", far)
    assert alone == shared == {
        "x * 3": seen, "x ** 2": missed, "x + x": same, "x - 2": seen, "x + 2": missed, "2 * x": same, "x << 1": same,
        "x // 2": seen,
    }  # fmt: skip
    assert (len(of_one), len(of_three)) == (1, 3) and not any(str(tree) in place for place in of_one | of_three)
    assert (tree / "src/subject.py").read_text() == "def double(x):\n    return x * 2\n"
