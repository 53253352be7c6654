"""Meshes and process groups between real processes."""

import secrets
import socket

import pytest

from . import device_mesh_programs, mesh_cases

pytestmark = pytest.mark.processes
OURS = "dtckpt.layout.device_mesh"
TORCHS = "torch.distributed.device_mesh"


@pytest.mark.parametrize("name", device_mesh_programs.PROGRAMS)
def test_programs_see_the_same_with_only_the_import_changed(pool, name):
    ours = pool.values(device_mesh_programs.run, name, OURS, clients=4, group=True)
    theirs = pool.values(device_mesh_programs.run, name, TORCHS, clients=4, group=True)
    assert ours == theirs


def test_members_with_different_numbers_of_groups_meet(pool):
    answers = pool.values(mesh_cases.members_with_different_numbers_of_groups, clients=4, group=True)
    assert answers[0] == [(11, [0, 1]), (101, [0, 2]), (111, [0, 1, 2]), (1001, [0, 3])]
    assert answers[3] == [(1001, [0, 3])]


def test_groups_are_made_once(pool):
    assert pool.values(mesh_cases.groups_are_made_once, clients=4, group=True) == [2] * 4


def test_adopted_meshes_do_not_keep_earlier_default_groups(pool):
    (seen,) = pool.values(mesh_cases.threads_after_default_groups, clients=1)
    # Groups that were kept would have a thread each; the thread of a group that has just ended may still be there.
    assert seen[-1] - seen[0] <= 1, seen


def test_groups_end_with_the_default_group(pool):
    token = secrets.token_hex(4)
    for client, answer in enumerate(
        pool.values(mesh_cases.groups_end_with_the_default_group, token, clients=4, group=True)
    ):
        first, num_left, error, along_dp, along_tp, num_worlds = answer
        assert (first, along_dp) == ((11, 1100)[client // 2], (101, 1010)[client % 2])
        assert (along_tp, num_worlds) == (first, 1)
        assert num_left == 1  # the group that the case still refers to
        assert error[0] == "CoordinationError"
        assert "expected clients that a default process group spans; call dtckpt.init" in error[1]


def test_a_group_that_was_destroyed_is_made_again(pool):
    answers = pool.values(mesh_cases.a_group_that_was_destroyed_is_made_again, clients=3, group=True)
    assert answers == [(False, 11), (False, 11), None]


def test_outsiders_have_no_coordinate(pool):
    first, outsider, last = pool.values(mesh_cases.clients_outside_the_mesh, clients=3, group=True)
    assert first == (((1,), 0, [2, 0]), 101, (1,))
    assert last == (((0,), 2, [2, 0]), 101, (0,))
    assert outsider == ((None, 1, [2, 0]), ["MeshError", "MeshError", "MeshError", "CoordinationError"], None)


def test_every_client_refuses(pool):
    answers = pool.values(mesh_cases.errors_of_bad_meshes, clients=3, group=True)
    for errors in answers:
        assert [kind for kind, _ in errors] == ["MeshError"] * 4 + ["CoordinationError"]
    assert answers[0] == answers[1]  # client 2 has no device in the mesh of the fourth case
    assert answers[2][:3] == answers[0][:3]
    for (_, text), expected in zip(
        answers[0],
        (
            "got ranks 1 more than once",
            "got 2 ranks up to 3",
            "more than the 3",
            "expected ranks 0, 1",
            "got clients 0, 3",
        ),
        strict=True,
    ):
        assert expected in text


def test_the_world_is_made_when_there_is_none(pool):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = pool.values(mesh_cases.make_the_default_group, port, clients=2)
    assert answers == [("gloo", 11, (0, 1))] * 2


def test_from_pytorch(pool):
    answers = pool.values(mesh_cases.from_pytorch, clients=4, group=True)
    assert answers == [(("dim_0", "dim_1"), (0, client)) for client in range(4)]


def test_pytorch_meshes_are_accepted_wherever_one_is_asked_for(pool):
    assert pool.values(mesh_cases.pytorch_meshes_are_accepted, clients=4, group=True) == [[12.0] * 4] * 4


def test_to_pytorch(pool):
    for client, (values, coordinate, error) in enumerate(pool.values(mesh_cases.to_pytorch, clients=4, group=True)):
        assert (values, coordinate) == (list(range(8)), divmod(client, 2))
        assert error[0] == "MeshError"
        assert "got 4 devices of 1 clients, expected one device per client" in error[1]
