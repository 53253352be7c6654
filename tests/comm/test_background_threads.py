"""Threads that a save in flight gets although the process ends, which Python refuses from 3.12 on."""

import threading
import weakref
from functools import partial

import pytest
from support.client_calls import wait_until

from dtckpt.comm import background_threads

WAIT_S = 30


def refuse(_):
    raise RuntimeError("can't create new thread at interpreter shutdown")


def fail():
    raise ZeroDivisionError


@pytest.fixture(params=["threads can be started", "threads come from the reserve"])
def at_any_time(request, monkeypatch):
    """Both at work and while the process ends."""
    if "reserve" in request.param:
        background_threads.keep_reserve()
        monkeypatch.setattr(threading.Thread, "start", refuse)


def test_without_a_reserve_it_is_refused(monkeypatch):
    monkeypatch.setattr(background_threads, "_reserve", None)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't create new thread"):
        background_threads.begin(fail, "dtckpt-test")


def test_the_reserve_is_started_once():
    background_threads.keep_reserve()
    before = threading.active_count()
    background_threads.keep_reserve()
    assert threading.active_count() == before


@pytest.mark.usefixtures("at_any_time")
def test_work_has_an_outcome():
    assert background_threads.begin(lambda: threading.current_thread().daemon, "dtckpt-test").result(WAIT_S)
    with pytest.raises(ZeroDivisionError):
        background_threads.begin(fail, "dtckpt-test").result(WAIT_S)


@pytest.mark.usefixtures("at_any_time")
@pytest.mark.parametrize("size", [1, 3, 2 * background_threads.RESERVE])
def test_a_pool_does_its_work(size):
    prepared = []
    with background_threads.Pool(size, "dtckpt-test", partial(prepared.append, True)) as pool:
        assert list(pool.map(lambda number: number**2, range(100))) == [number**2 for number in range(100)]
        failed = pool.submit(fail)
    assert isinstance(failed.exception(WAIT_S), ZeroDivisionError)
    assert len(prepared) == size


@pytest.mark.usefixtures("at_any_time")
def test_a_pool_does_one_thing_at_a_time_in_one_thread():
    done = []
    with background_threads.Pool(1, "dtckpt-test") as pool:
        for number in range(50):
            pool.submit(done.append, number)
    assert done == list(range(50))


def test_what_is_cancelled_is_not_done():
    release, done = threading.Event(), []
    pool = background_threads.Pool(1, "dtckpt-test")
    first = pool.submit(release.wait, WAIT_S)
    wait_until(first.running, WAIT_S)
    later = [pool.submit(done.append, number) for number in range(3)]
    pool.shutdown(wait=False, cancel_futures=True)
    release.set()
    assert first.result(WAIT_S)
    assert [one.cancelled() for one in later] == [True] * 3
    assert done == []


def test_a_thread_that_waits_keeps_nothing_of_its_last_task():
    """A pool that decodes chunks would hold one per thread."""
    argument = threading.Event()
    with background_threads.Pool(1, "dtckpt-test") as pool:
        pool.submit(id, argument).result(WAIT_S)
        kept = weakref.ref(argument)
        del argument
        wait_until(lambda: kept() is None, WAIT_S)


def test_a_pool_that_is_dropped_ends_its_threads():
    pool = background_threads.Pool(2, "dtckpt-dropped")
    workers = [pool.submit(threading.current_thread).result(WAIT_S) for _ in range(2)]
    del pool
    for worker in workers:
        worker.join(WAIT_S)
        assert not worker.is_alive()
