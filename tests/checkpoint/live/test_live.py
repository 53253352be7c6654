"""Jobs that publish versions, and jobs on other meshes that take them, in client processes with a coordinator."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.client_processes import Pool
from support.coordinators import server_in_thread

import dtckpt
from dtckpt import Publisher, Subscriber

from . import live_cases

pytestmark = pytest.mark.processes


@pytest.fixture
def jobs():
    """Runs a case of a publisher and a case of a reader, each in the client processes of a separate job."""
    with (
        server_in_thread(heartbeat_timeout_s=20.0) as port,
        Pool() as publishers,
        Pool() as readers,
        ThreadPoolExecutor(1) as thread,
    ):

        def run(publisher, reader, *, clients=(2, 2)):
            (publish, *given), (read, *asked) = publisher, reader
            options = {"group": True, "coordinator": f"127.0.0.1:{port}"}
            published = thread.submit(publishers.values, publish, *given, clients=clients[0], **options)
            found = readers.values(read, *asked, clients=clients[1], **options)
            return published.result(), found

        yield run


@pytest.mark.parametrize("clients", [(2, 2), (1, 2), (2, 1)], ids=str)
def test_another_job_takes_versions_onto_its_mesh(jobs, tmp_path, clients):
    steps = [3, 4, 7, 8]
    held, found = jobs(
        (live_cases.publish_steps, tmp_path, steps), (live_cases.read_steps, tmp_path, steps), clients=clients
    )
    for client in found:
        assert [each["step"] for each in client] == [each["value"] for each in client] == steps
        assert all(each["untouched"] and each["stays"] and not each["differs"] for each in client)
        # No byte more than the client's share.
        assert all(each["surplus"] == 0 for each in client)
    # Two stay readable, and while the next one is copied there are three.
    assert all(counts == [1, 2, 3, 3] for counts in held)


def test_a_restore_and_an_open_checkpoint(jobs, tmp_path):
    _, found = jobs((live_cases.publish_and_wait, tmp_path, [4, 5]), (live_cases.restore_newest, tmp_path))
    assert found == [([], 5, (True, "live version", 4))] * 2


def test_updates_in_place(jobs, tmp_path):
    _, found = jobs((live_cases.publish_and_wait, tmp_path, [5]), (live_cases.update_in_place, tmp_path))
    # The caller's own function gets the report of each version, in place or not.
    assert found == [(5, None, True, False, [], 2)] * 2


def test_a_target_that_does_not_fit_is_refused_before_anything_is_written(jobs, tmp_path):
    _, found = jobs((live_cases.publish_and_wait, tmp_path, [5]), (live_cases.refuse_before_writing, tmp_path))
    assert found == [(["ShapeMismatchError"] * 2, None, False, 0)] * 2


def test_copies_of_a_base_that_did_not_change_are_not_taken_by_any_client(jobs, tmp_path):
    """Replicas are read once by all clients together. Boxes that all clients hold are read by no client."""
    steps, nbytes = [1, 2, 3], 512 * 640 * 4
    _, found = jobs((live_cases.publish_adapted, tmp_path, steps), (live_cases.read_adapted, tmp_path, steps))
    assert all(is_right for client in found for *_, is_right in client)
    assert [sum(client[number][0] for client in found) for number in range(3)] == [3 * nbytes, nbytes, nbytes]
    assert all([unchanged for _, unchanged, _ in client] == [0, 2 * nbytes, 2 * nbytes] for client in found)


def test_clients_that_disagree_what_they_hold(jobs, tmp_path):
    """After a failure only some clients know which boxes they hold: each reads for itself. Then they agree again."""
    steps, nbytes = [1, 2, 3, 4], 512 * 640 * 4
    reader = functools.partial(live_cases.read_adapted, fails_at=2)
    _, found = jobs((live_cases.publish_adapted, tmp_path, steps), (reader, tmp_path, steps))
    assert all(is_right for client in found for *_, is_right in client)
    assert [sum(client[number][0] for client in found) for number in (2, 3)] == [nbytes, nbytes]


def test_without_a_coordinator(tmp_path):
    with pytest.raises(dtckpt.errors.ConfigError, match="live versions need a coordinator"):
        Publisher("policy", folder=tmp_path)
    with Subscriber("policy", {}) as subscriber, pytest.raises(dtckpt.errors.ConfigError, match="need a coordinator"):
        subscriber.fetch()
    with pytest.raises(dtckpt.errors.ConfigError, match="need a coordinator"):
        dtckpt.open_checkpoint("live://policy")


@pytest.mark.parametrize("options", [{"keep": 0}, {"keep": True}, {"when_full": "never"}], ids=str)
def test_options_out_of_range_are_refused(tmp_path, options):
    with pytest.raises(dtckpt.errors.ConfigError, match="Publisher"):
        Publisher("policy", folder=tmp_path, **options)
