"""One client."""

import pytest

from dtckpt import errors
from dtckpt.coordination import LocalCoordination, Member

from .contract import CoordinationContract


class TestLocal(CoordinationContract):
    num_clients = 1

    def make(self, num_clients, job):
        return [LocalCoordination(Member(job, 0, num_clients, incarnation=1))]


def test_refuses_more_clients():
    with pytest.raises(errors.ConfigError, match="one client"):
        LocalCoordination(Member("j", 0, 2, incarnation=1))


def test_member_must_fit():
    with pytest.raises(errors.ConfigError, match="client 2 does not fit job 'j': expected an id from 0 to 1"):
        Member("j", 2, 2, incarnation=1)
