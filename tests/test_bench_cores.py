"""The core of the host on which times are taken: it is the fastest, and threads go back where they were."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from paperlm_kernels.bench import cold, cores

CARD = torch.device("cuda")
pytestmark = pytest.mark.skipif(
    len(getattr(os, "sched_getaffinity", lambda _: ())(0)) < 2, reason="needs two cores of a Linux machine"
)


@pytest.fixture
def best(monkeypatch):
    """A core on which a loop is fastest."""
    best = max(os.sched_getaffinity(0))
    monkeypatch.setattr(cores, "loop_us", lambda: 1.0 if os.sched_getaffinity(0) == {best} else 2.0)
    return best


def test_a_block_is_on_the_fastest_core_with_all_threads_and_they_are_given_back_after_an_error(best):
    allowed, stop, seen = os.sched_getaffinity(0), threading.Event(), {}
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        with pytest.raises(KeyError), cores.quiet_core(CARD) as us:
            seen |= {name: os.sched_getaffinity(thread) for name, thread in (("own", 0), ("other", other.native_id))}
            assert us == 1.0
            raise KeyError
        assert seen == {"own": {best}, "other": {best}}
        assert os.sched_getaffinity(0) == os.sched_getaffinity(other.native_id) == allowed
    finally:
        stop.set()
        other.join()


def test_a_thread_that_was_held_to_a_core_before_is_held_to_it_again(best):
    stop, own = threading.Event(), {min(os.sched_getaffinity(0))}
    other = threading.Thread(target=stop.wait)
    other.start()
    try:
        os.sched_setaffinity(other.native_id, own)
        with cores.quiet_core(CARD):
            assert os.sched_getaffinity(other.native_id) == {best}
        assert os.sched_getaffinity(other.native_id) == own
    finally:
        stop.set()
        other.join()


def test_where_linux_does_not_list_threads_or_refuses_cores_nothing_is_held_and_nothing_fails(
    best, monkeypatch, tmp_path
):
    allowed = os.sched_getaffinity(0)

    def refuses(*_):
        raise OSError(22, "Invalid argument")

    with monkeypatch.context() as changed:
        changed.setattr(os, "sched_setaffinity", refuses)
        with cores.quiet_core(CARD) as us:
            assert us is None
    monkeypatch.setattr(cores, "THREADS", tmp_path / "task")
    with cores.quiet_core(CARD) as us:
        assert us is None
    assert os.sched_getaffinity(0) == allowed


def test_what_is_computed_on_a_cpu_stays_on_all_cores(best):
    allowed = os.sched_getaffinity(0)
    with cores.quiet_core(torch.device("cpu")) as us:
        assert us is None and os.sched_getaffinity(0) == allowed


def test_on_a_card_calls_without_a_graph_are_timed_on_one_core_and_their_time_is_that_of_one(best, monkeypatch):
    class Event:
        def __init__(self, **_):
            pass

        def record(self):
            pass

        def elapsed_time(self, _):
            return 6.0  # milliseconds of three calls

    seen = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(cold, "AWAKE", 0.0)
    calls = [lambda: seen.append(os.sched_getaffinity(0))] * 3
    assert set(cold.cold_times(calls, CARD, graph=False, repeats=2, warmup=1, seconds=1)) == {2000.0}
    assert len(seen) > 6 and all(cores == {best} for cores in seen[3:])
