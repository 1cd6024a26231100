"""Any operation of the benchmark: found in its folder, run in processes, in turns, and what goes wrong there."""

from __future__ import annotations

import json
import re
import sys
import time

import pytest
from paperlm_kernels.bench import ops, peers, report, rows, run
from paperlm_kernels.bench.command import main
from paperlm_kernels.bench.operation import Task
from paperlm_kernels.seal import sealed

TOY = '''
"""A sum of squares."""
import os, sys, time
from paperlm_kernels.bench.operation import TURN, Operation


class Squares(Operation):
    """See above."""

    summary = "a sum of squares"
    cases = {"ten": "10 numbers", "two": "2 numbers"}
    methods = {"loop": "ours", "killed": "dies", "raises": "fails", "torn": "dies over a row", "peer": "another's",
               "slow": "never ends"}
    measures = {"time": "milliseconds"}
    groups = {"all": ("ten", "two")}
    in_turns = IN_TURNS
    limit = LIMIT

    def absent(self, method, device):
        return "nobody has it" if method == "peer" else None

    def identity(self, task):
        return {"shape": {"numbers": 10 if task.case == "ten" else 2}}

    def run(self, task):
        print("noise of a library")
        if task.method == "killed":
            os.kill(os.getpid(), 9)
        if task.method == "raises" or (task.method == "peer" and task.case == "two"):
            raise ArithmeticError("no square")
        if task.method == "slow":
            time.sleep(600)
        begun, turns = [time.monotonic()], []
        while self.in_turns and (yield TURN):
            turns.append(time.monotonic())
        shape = self.identity(task)["shape"]["numbers"]
        yield self.row(task, "a card", "time", "ms", [float(sum(n * n for n in range(shape)))], turns=turns,
                       process=os.getpid())
        if task.method == "torn":
            os.write(1, b"")
            sys.__stdout__.flush()
            os._exit(3)


OPERATION = Squares()
'''


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """Makes the operation `squares` in a folder of its own, as somebody's package would."""

    def make(name: str = "squares", *, in_turns: bool = False, limit: float = 60.0, text: str = TOY) -> None:
        folder = tmp_path / "mine" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(text.replace("IN_TURNS", str(in_turns)).replace("LIMIT", str(limit)))
        if str(folder.parent) not in ops.__path__:
            monkeypatch.setattr(ops, "__path__", [*ops.__path__, str(folder.parent)])

    ops._scan.cache_clear()
    yield make
    for name in [name for name in sys.modules if name.startswith("paperlm_kernels.bench.ops.squares")]:
        del sys.modules[name]
    ops._scan.cache_clear()


def _summary(found: list[dict]) -> list[tuple]:
    return [(r["case"], r["name"], r["metric"], r["value"] if r["value"] is not None else r["outcome"]) for r in found]


def test_an_operation_is_added_as_a_folder(toy, tmp_path, capsys):
    toy()
    out = tmp_path / "new/rows.jsonl"
    assert main(["squares", "--device", "cpu", "--cases", "all", "--methods", "loop,peer", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert "[4/4] two peer: absent: nobody has it" in shown.err
    assert _summary(rows.read(out)) == [
        ("ten", "loop", "time", 285.0), ("ten", "peer", "outcome", "absent: nobody has it"),
        ("two", "loop", "time", 1.0), ("two", "peer", "outcome", "absent: nobody has it"),
    ]  # fmt: skip
    assert rows.read(out)[0]["shape"] == {"numbers": 10} and rows.read(out)[0]["op"] == "squares"
    assert "| loop | 285 |" in shown.out and "Not measured on a card: peer (absent: nobody has it)." in shown.out
    assert main(["show", str(out)]) == 0
    assert capsys.readouterr().out.strip() in shown.out
    assert main(["squares", "--list"]) == 0
    listed = capsys.readouterr().out
    assert "10 numbers (all)" in listed and "[absent: nobody has it]" in listed


@pytest.mark.parametrize("in_turns", [False, True])
def test_the_row_of_an_absent_method_names_the_card_that_a_later_process_tells(toy, tmp_path, in_turns):
    toy(in_turns=in_turns)
    out = tmp_path / "rows.jsonl"
    assert main(["squares", "--device", "cpu", "--methods", "peer,loop", "--cases", "ten", "--out", str(out)]) == 0
    assert {(row["name"], row["device"]) for row in rows.read(out)} == {("peer", "a card"), ("loop", "a card")}
    assert main(["squares", "--device", "cpu", "--methods", "peer", "--cases", "ten", "--out", str(out)]) == 0
    assert rows.read(out)[-1]["device"] == "cpu"  # no process was started


def test_a_folder_without_an_operation_says_what_it_lacks(toy):
    toy("squares_broken", text='"""Nothing."""\n')
    with pytest.raises(ValueError, match=r"squares_broken/__init__.py: no operation; end it in OPERATION = "):
        ops.operations()


def test_a_method_that_crashes_leaves_a_row_saying_so_and_the_others_are_measured(toy, tmp_path, capsys):
    toy()
    out = tmp_path / "rows.jsonl"
    methods = "raises,killed,torn,loop"
    assert main(["squares", "--device", "cpu", "--cases", "ten", "--methods", methods, "--out", str(out)]) == 1
    assert _summary(rows.read(out)) == [
        ("ten", "raises", "outcome", "failed: ArithmeticError: no square"),
        ("ten", "killed", "outcome", "failed: ended by SIGKILL (by the kernel if its memory was full)"),
        ("ten", "torn", "time", 285.0), ("ten", "torn", "outcome", "failed: noise of a library"),
        ("ten", "loop", "time", 285.0),
    ]  # fmt: skip
    assert "Not measured on cpu: raises (failed: ArithmeticError: no square)" in capsys.readouterr().out


@pytest.mark.parametrize("in_turns", [False, True])
def test_a_method_without_an_end_is_given_up(toy, in_turns):
    toy(in_turns=in_turns, limit=1.0)
    task = Task("squares", "ten", "slow", ("time",), device="cpu", repeats=1)
    found = run.run(ops.operation("squares"), [task], lambda task, found: None)
    assert _summary(found) == [("ten", "slow", "outcome", "failed: no result after 1 s")]


def test_methods_that_take_turns_are_measured_alternately_and_as_often(toy):
    toy(in_turns=True)
    again = TOY.replace('"torn": ', '"second": "ours too", "torn": ')
    toy("squares2", in_turns=True, text=again)
    names = ("loop", "raises", "second")
    tasks = [Task("squares2", "two", name, ("time",), device="cpu", repeats=4, seconds=100.0) for name in names]
    first, failed, second = run.run(ops.operation("squares2"), tasks, lambda task, found: None)
    assert failed["outcome"] == "failed: ArithmeticError: no square"
    assert len(first["turns"]) == len(second["turns"]) == 4
    mixed = [turn for pair in zip(first["turns"], second["turns"], strict=True) for turn in pair]
    assert mixed == sorted(mixed)


@pytest.mark.parametrize(("together", "cores"), [(2, 4), (4, 2)])
def test_on_a_gpu_processes_start_together_and_none_measures_before_all_have_imported(
    toy, monkeypatch, together, cores
):
    """The toy touches no device, so that this runs anywhere."""
    toy()
    begun = []
    original = run.Worker.go

    def go(worker, word, device):
        begun.append("go" if all(made.imported.is_set() for made in started) else "go too early")
        original(worker, word, device)

    started: list[run.Worker] = []
    monkeypatch.setattr(run.Worker, "__init__", _noting(run.Worker.__init__, begun, "start", started))
    monkeypatch.setattr(run.Worker, "go", go)
    monkeypatch.setattr(run, "TOGETHER", together)
    monkeypatch.setattr(run.os, "cpu_count", lambda: cores)
    names = ("loop", "peer", "raises", "loop")
    tasks = [Task("squares", "two", name, ("time",), device="cuda") for name in names]
    found = run.run(ops.operation("squares"), tasks, lambda task, found: None)
    assert [row["outcome"] if row["value"] is None else row["value"] for row in found] == [
        1.0, "absent: nobody has it", "failed: ArithmeticError: no square", 1.0,
    ]  # fmt: skip
    assert begun == ["start", "start", "go", "go", "start", "go"]
    assert not any(made._process.poll() is None for made in started)


def test_a_process_that_dies_while_it_imports_is_a_row_that_says_so_and_keeps_nobody_waiting(toy):
    importing = "    def modules(self, method):\n        return ['no_such_module']\n\n    def run(self, task):"
    toy("squares3", text=TOY.replace("    def run(self, task):", importing))
    task = Task("squares3", "two", "loop", ("time",), device="cuda")
    begin = time.monotonic()
    found = run.run(ops.operation("squares3"), [task, task], lambda task, found: None)
    assert [row["outcome"] for row in found] == ["failed: ModuleNotFoundError: No module named 'no_such_module'"] * 2
    assert time.monotonic() - begin < 30, "of 60 that an import may take"


def test_imports_without_an_end_are_waited_for_once_for_all(toy):
    hanging = "    def modules(self, method):\n        time.sleep(600)\n\n    def run(self, task):"
    toy("squares5", limit=2.0, text=TOY.replace("    def run(self, task):", hanging))
    tasks = [Task("squares5", "two", "loop", ("time",), device="cuda")] * 3
    begin = time.monotonic()
    found = run.run(ops.operation("squares5"), tasks, lambda task, found: None)
    assert [row["outcome"] for row in found] == ["failed: no result after 2 s"] * 3
    assert time.monotonic() - begin < 2 + 3 * 2 + 3


def test_an_operation_that_takes_turns_does_not_go_on(toy):
    toy("squares6", in_turns=True, text=TOY.replace("    in_turns =", "    goes_on = True\n    in_turns ="))
    with pytest.raises(ValueError, match="squares6 takes turns and goes on; set one of"):
        run.run(ops.operation("squares6"), [], lambda task, found: None)


def test_a_process_that_dies_between_two_cases_costs_neither_of_them(toy, monkeypatch):
    toy("squares7", text=TOY.replace("    in_turns =", "    goes_on = True\n    in_turns ="))
    started: list[run.Worker] = []
    monkeypatch.setattr(run.Worker, "__init__", _noting(run.Worker.__init__, [], "start", started))
    tasks = [Task("squares7", case, "loop", ("time",), device="cuda") for case in ("ten", "two", "ten")]

    def killed(task, found):
        started[-1]._process.kill()
        started[-1]._process.wait()

    found = run.run(ops.operation("squares7"), tasks, killed)
    assert [row["value"] for row in found] == [285.0, 1.0, 285.0] and len(started) == 3


def test_nothing_of_a_task_is_there_for_the_next_of_its_process(toy):
    kept = """        global kept
        if "kept" in globals() and kept() is not None:
            raise RuntimeError("it is there")
        held = type("Held", (), {})()
        held.itself, kept = held, __import__("weakref").ref(held)
        begun, turns"""
    text = TOY.replace("    in_turns =", "    goes_on = True\n    in_turns =").replace("        begun, turns", kept)
    toy("squares8", text=text)
    tasks = [Task("squares8", "two", "loop", ("time",), device="cuda")] * 2
    assert [row["value"] for row in run.run(ops.operation("squares8"), tasks, lambda task, found: None)] == [1.0, 1.0]


def _noting(function, notes: list[str], note: str, made: list):
    def noted(*arguments):
        notes.append(note)
        made.append(arguments[0])
        return function(*arguments)

    return noted


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_process_goes_on_with_its_methods_next_case_and_is_replaced_where_it_failed(toy, device, monkeypatch):
    text = TOY.replace("    in_turns =", "    goes_on = True\n    in_turns =").replace('"nobody has it"', "None")
    toy("squares4", text=text)
    started: list[run.Worker] = []
    monkeypatch.setattr(run.Worker, "__init__", _noting(run.Worker.__init__, [], "start", started))
    cases = ("ten", "two", "ten", "two")
    tasks = [Task("squares4", case, name, ("time",), device=device) for case in cases for name in ("loop", "peer")]
    seen = []
    found = run.run(ops.operation("squares4"), tasks, lambda task, found: seen.append((task.case, task.method)))
    assert seen == [(task.case, task.method) for task in tasks]
    assert [row["value"] for row in found] == [285.0, 285.0, 1.0, None] * 2
    assert [row["outcome"] for row in found if row["value"] is None] == ["failed: ArithmeticError: no square"] * 2
    loops, peers_ = ([row.get("process") for row in found if row["method"] == name] for name in ("loop", "peer"))
    assert len(set(loops)) == 1 and peers_[0] != peers_[2] and peers_[1] is peers_[3] is None
    assert len(started) == 3 and not any(made._process.poll() is None for made in started)


def test_turns_end_with_their_time_but_not_before_three(toy):
    toy(in_turns=True)
    task = Task("squares", "two", "loop", ("time",), device="cpu", repeats=1000, seconds=0.0)
    (row,) = run.run(ops.operation("squares"), [task], lambda task, found: None)
    assert len(row["turns"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cross_entropi"], "unknown operation 'cross_entropi'; did you mean 'cross_entropy'"),
        (["squares", "--cases", "tenn"], "unknown case 'tenn'; did you mean 'ten'"),
        (["squares", "--methods", "lop"], "unknown method 'lop'; did you mean 'loop'"),
        (["squares", "--measure", "tim"], "unknown measure 'tim'; did you mean 'time'"),
        (["squares", "--warmup", "-1"], "--warmup: '-1' is no whole number of 0 or more"),
        (["squares", "--out", "."], "--out: . is a folder; name a file in it, e.g. result.jsonl"),
        (["squares", "--methods", "loop", "--cases", "two", "--plot", "a.svg"], "squares has no chart"),
        (["squares", "--seconds", "nan"], "--seconds: 'nan' is no number of seconds of 0 or more"),
        (["squares", "--plot", "a.txt"], "--plot: a.txt: name a file that ends in .svg or .png or .pdf"),
        (["show", "no.jsonl"], "no.jsonl: no such file"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(toy, arguments, message, capsys, monkeypatch):
    toy()
    given = arguments if arguments[0] == "show" else [*arguments, "--device", "cpu"]
    assert main(given) == 2
    assert message in capsys.readouterr().err


def test_a_damaged_file_of_rows_is_named_with_its_line(tmp_path, capsys):
    good = {name: kind() if isinstance(kind, type) else None for name, kind in rows.NEEDED.items()}
    for bad, said in (("{", "not a row of JSON"), ("[1]", "the row has no op"), ('{"op": "x"}', "the row has no case"),
                      (json.dumps(good | {"shape": 3}), "shape is 3"), ("[" * 9999, "not a row of JSON"),
                      (json.dumps(good), "the row has no checksum of itself; restore the file or measure"),
                      (json.dumps(sealed(good) | {"value": 3}), "the row is altered: its checksum")):  # fmt: skip
        (tmp_path / "rows.jsonl").write_text(f"{json.dumps(sealed(good))}\n{bad}\n")
        assert main(["show", str(tmp_path / "rows.jsonl")]) == 2
        assert re.search(rf"rows\.jsonl:2: {said}", capsys.readouterr().err)


def test_a_row_whose_keys_are_numbers_is_read_as_it_was_written(tmp_path):
    row = {name: kind() if isinstance(kind, type) else None for name, kind in rows.NEEDED.items()}
    rows.append(tmp_path / "rows.jsonl", [row | {"shape": {9: 1, 10: 2}, "more": (1.5, None)}])
    assert rows.read(tmp_path / "rows.jsonl") == [row | {"shape": {"9": 1, "10": 2}, "more": [1.5, None]}]


def test_rows_of_an_operation_that_is_not_here_are_shown_as_they_are():
    common = {
        "op": "elsewhere", "case": "a", "order": "natural", "scale": "full", "device": "Card", "unit": "ms",
        "versions": {"torch": "2"}, "date": "2030-01-01", "shape": {"n": 4}, "low": 1.0, "high": 1.0,
    }  # fmt: skip
    found = [
        {**common, "name": "ours", "method": "ours", "metric": "time", "measure": "both", "value": 1.0},
        {**common, "name": "p", "method": "p 1.0", "metric": "outcome", "value": None, "outcome": "absent: no"},
    ]
    assert report.tables(found) == (
        "**a**: n 4, Card, torch 2, 2030-01-01.\n\n| method | time (both), ms |\n|---|---|\n| ours | 1 |\n\n"
        "Not measured on Card: p 1.0 (absent: no)."
    )


def test_without_a_compiler_a_compiled_method_is_absent_on_a_cpu_and_says_what_to_install(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "install g++, or set CXX" in peers.why_absent("cpu", compiles=True)
    assert "no-such-compiler" in ops.operation("cross_entropy").absent("chunked", "cpu")
    assert peers.why_absent("cuda", compiles=True) is None
    assert ops.operation("cross_entropy").absent("ours", "cpu") is None
