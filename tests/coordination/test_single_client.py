"""One client."""

import numpy as np
import pytest

from dtckpt import errors
from dtckpt.coordination.api import Member, Progress
from dtckpt.coordination.single_client import SingleClientCoordination

from .contract import CoordinationContract


class TestLocal(CoordinationContract):
    num_clients = 1

    def make(self, num_clients, job):
        return [SingleClientCoordination(Member(job, 0, num_clients, incarnation=1))]


def test_refuses_more_clients():
    with pytest.raises(errors.ConfigError, match="one client"):
        SingleClientCoordination(Member("j", 0, 2, incarnation=1))


def test_member_must_fit():
    with pytest.raises(errors.ConfigError, match="client 2 does not fit job 'j': expected an id from 0 to 1"):
        Member("j", 2, 2, incarnation=1)


@pytest.mark.parametrize("attempt", [-1, 1 << 32])
def test_attempt_must_be_one_that_can_be_sent(attempt):
    with pytest.raises(errors.ConfigError, match=f"attempt of job 'j' is {attempt}; expected 0 to"):
        Member("j", 0, 1, incarnation=1, attempt=attempt)


@pytest.mark.parametrize("names", [("\udcff", ""), ("j", "\udcff")])
def test_job_must_have_a_name_that_can_be_sent(names):
    with pytest.raises(errors.ConfigError, match="is not valid Unicode"):
        Member(names[0], 0, 1, incarnation=1, job_name=names[1])


@pytest.mark.parametrize(
    "wrong", [{"step": 1.5}, {"step": 1 << 63}, {"bytes_done": -(1 << 63) - 1}, {"phase": b"write"}]
)
def test_progress_is_something_that_can_be_sent(wrong):
    """Or the thread that sends heartbeats would die of it."""
    with pytest.raises(errors.ConfigError, match="expected a text, and whole numbers"):
        Progress(**wrong)


def test_progress_takes_whatever_is_a_whole_number():
    progress = Progress("file \udcff", np.int32(7))
    assert (progress.phase, progress.step, type(progress.step)) == ("file \\udcff", 7, int)
