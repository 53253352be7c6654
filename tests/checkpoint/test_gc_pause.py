"""The cycle collector waits while a plan is made, and only then."""

import gc
import os
import threading

import pytest

from dtckpt.checkpoint.gc_pause import gc_paused


def test_collections_go_on_when_the_last_is_out():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with gc_paused():
            inside.set()
            assert leave.wait(60)

    thread = threading.Thread(target=other)
    with gc_paused():
        thread.start()
        assert inside.wait(60)
        with gc_paused():
            assert not gc.isenabled()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_a_failure_lets_them_go_on():
    with pytest.raises(KeyError), gc_paused():
        raise KeyError
    assert gc.isenabled()


def test_who_had_switched_them_off_keeps_them_off():
    gc.disable()
    try:
        with gc_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_process_forked_inside_collects():
    with gc_paused():
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
