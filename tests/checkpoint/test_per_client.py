"""`PerClient`: every client gets its own value again, or by a rule what other clients saved."""

import numpy as np
import pytest
import torch

import dtckpt
from dtckpt import ClientValues, PerClient
from dtckpt.checkpoint.per_client import ClientNumber
from dtckpt.errors import ConfigError, TensorNotFoundError

from . import per_client_cases
from .per_client_cases import by_clients, client_of, last_value, target_of, values_of


def saved(tmp_path, tree):
    dtckpt.save(tmp_path / "s", tree)
    return f"{tmp_path}/s"


def test_one_client(tmp_path):
    tree = {key: PerClient(value) for key, value in values_of(0).items()}
    path = saved(tmp_path, tree)
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert (sorted(checkpoint.tensors), list(checkpoint.values)) == (
            ["loader/0/buffer", "rng/0"],
            ["loader/0/position", "name/0"],
        )
    target = target_of("error")
    assert dtckpt.restore(path, target) is target
    assert client_of(target) == 0


def test_without_a_target_there_are_the_values_of_all(tmp_path):
    path = saved(tmp_path, by_clients(3))
    for back in (dtckpt.restore(path), dtckpt.restore(path, dict.fromkeys(by_clients(3)))):
        assert (type(back["rng"]), list(back["rng"]), back["rng"].num_clients) == (ClientValues, [0, 1, 2], 3)
        assert back["rng"][2].tolist() == [20, 21, 22, 23]
        assert back["name"] == {0: "client 0", 1: "client 1", 2: "client 2"}


def test_what_is_of_one_client_is_not_laid_out_on_a_mesh(tmp_path):
    path, mesh = saved(tmp_path, {**by_clients(2), "w": torch.ones(6)}), dtckpt.abstract_mesh({"x": 1})
    back = dtckpt.restore(path, mesh=mesh)
    assert (type(back["w"]), type(back["rng"][1]), type(back["loader"][0]["buffer"])) == (
        dtckpt.DTensor,
        torch.Tensor,
        torch.Tensor,
    )
    back = dtckpt.restore(path, layouts={"rng/1": dtckpt.Layout(["x"], mesh)})
    assert [type(back["rng"][client]) for client in (0, 1)] == [torch.Tensor, dtckpt.DTensor]


def test_objects_of_a_dtensor_checkpoint(tmp_path):
    path = dtckpt.DTensorCheckpoint(dtckpt.abstract_mesh({"x": 2}), rng=PerClient(torch.ones(2))).save(f"{tmp_path}/s")
    rng = PerClient(torch.zeros(2))
    checkpoint = dtckpt.DTensorCheckpoint(dtckpt.abstract_mesh({"x": 2}), rng=rng, array=np.zeros(2))
    status = checkpoint.restore(path)
    assert (status.missing, status.unexpected) == (("array",), ())
    assert (checkpoint.rng is rng, rng.value.tolist()) == (True, [1, 1])
    later = dtckpt.DTensorCheckpoint(dtckpt.abstract_mesh({"x": 2}))
    status = later.restore(path)
    later.rng = PerClient(torch.zeros(2))
    assert later.rng.value.tolist() == [1, 1]
    status.assert_consumed()


def test_a_target_without_a_value_takes_what_was_saved(tmp_path):
    target = {"loader": PerClient(None)}
    dtckpt.restore(saved(tmp_path, {"loader": PerClient({"buffer": [1, torch.ones(2)]})}), target)
    assert (target["loader"].value["buffer"][0], target["loader"].value["buffer"][1].tolist()) == (1, [1, 1])


def test_a_resharded_checkpoint_has_them_all(tmp_path):
    tree = {**by_clients(2), "array": np.arange(3), "w": torch.ones(6)}
    dtckpt.reshard(saved(tmp_path, tree), tmp_path / "t", mesh=dtckpt.abstract_mesh({"x": 3}))
    back = dtckpt.restore(tmp_path / "t")
    assert (back["rng"].num_clients, back["rng"][1].tolist()) == (2, [10, 11, 12, 13])
    assert (type(back["array"]), back["array"].tolist()) == (np.ndarray, [0, 1, 2])


def test_values_of_all_clients_are_filled_in_place(tmp_path):
    path = saved(tmp_path, {"rng": by_clients(2)["rng"]})
    memory = [torch.zeros(4, dtype=torch.int64) for _ in range(2)]
    dtckpt.restore(path, {"rng": ClientValues(dict(enumerate(memory)))})
    assert memory[1].tolist() == [10, 11, 12, 13]


@pytest.mark.parametrize(
    ("saved_by", "rule", "restoring", "source"),
    [
        ((0, 1), "error", (1, 2), 1),
        ((0, 1), "keep", (2, 3), None),
        ((0, 1), "keep", (1, 3), 1),
        ((0, 1), "modulo", (0, 3), 0),
        ((0, 1), "modulo", (2, 3), 0),
        ((1, 3), "modulo", (3, 4), 3),
        ((1, 3), "modulo", (0, 4), 1),
        ((), "modulo", (0, 2), r"\(none\)"),
        ((0, 1), last_value, (1, 2), 1),
        ((0, 1), last_value, (1, 3), None),
        ((0, 1), "error", (1, 3), "0, 1"),
        ((1,), "error", (0, 2), "1"),
    ],
)
def test_whose_value_a_client_takes(saved_by, rule, restoring, source):
    num_saved = 4 if 3 in saved_by else 2
    choose = PerClient(0, on_resize=rule).source
    if isinstance(source, str):
        wanted = rf"no value at 'a' for client \d of \d: it has one each of clients {source}, of 2 that saved; say what"
        with pytest.raises(TensorNotFoundError, match=wanted):
            choose(saved_by, num_saved, ClientNumber(*restoring), "a")
    else:
        assert choose(saved_by, num_saved, ClientNumber(*restoring), "a") == source


def test_there_are_few_rules():
    with pytest.raises(ConfigError, match="on_resize must be 'error', 'keep', 'modulo' or a function; got 'any'"):
        PerClient(0, on_resize="any")
    assert repr(PerClient(5)) == "PerClient(5, on_resize='error')"


@pytest.mark.parametrize(
    ("tree", "target", "reason"),
    [
        ({"a": [1]}, {"a": PerClient(1)}, "has a list at 'a'; the target wants a PerClient"),
        ({"a": PerClient([1])}, {"a": [1]}, "has a PerClient at 'a'; the target wants a list"),
        ({"a": PerClient({"b": 1})}, {"a": {"b": 1}}, "has a PerClient at 'a'; the target wants a dict"),
        ({"a": PerClient(torch.ones(2))}, {"a": torch.ones(2)}, "has a PerClient at 'a'; the target wants a tensor"),
        ({}, {"a": PerClient(1)}, "has nothing at 'a'"),
    ],
)
def test_what_does_not_differ_by_client(tmp_path, tree, target, reason):
    with pytest.raises(TensorNotFoundError, match=reason):
        dtckpt.restore(saved(tmp_path, tree), target)


def test_a_refused_restore_changes_nothing(tmp_path):
    target = target_of("error")
    with pytest.raises(
        TensorNotFoundError, match="value at 'rng' for client 0 of 1: it has one each of clients 0, 1, of 2"
    ):
        dtckpt.restore(saved(tmp_path, by_clients(2)), target)
    assert client_of(target) == -1


def test_states_of_this_client_alone_may_have_any_form(tmp_path):
    tree = {"a": PerClient({"deep": [PerClient(torch.ones(1)), {"x"}]})}
    target = {"a": PerClient({"deep": [PerClient(torch.zeros(1)), None]})}
    dtckpt.restore(saved(tmp_path, tree), target)
    assert (target["a"].value["deep"][0].value.tolist(), target["a"].value["deep"][1]) == ([1], {"x"})


@pytest.mark.processes
@pytest.mark.parametrize(
    ("num_saved", "num_clients", "rule", "sources"),
    [
        (2, 2, "error", [0, 1]),
        (2, 3, "keep", [0, 1, -1]),
        (3, 2, "keep", [0, 1]),
        (2, 3, "modulo", [0, 1, 0]),
        (3, 2, last_value, [0, 2]),
    ],
)
def test_clients_take_their_own(pool, tmp_path, num_saved, num_clients, rule, sources):
    path = saved(tmp_path, {**by_clients(num_saved), "w": torch.ones(6)})
    found = pool.values(per_client_cases.restore_beside_weights, path, rule, clients=num_clients)
    assert found == sources


@pytest.mark.processes
def test_two_clients_then_three_then_one(pool, tmp_path):
    one, two = f"{tmp_path}/one", f"{tmp_path}/two"
    pool.values(per_client_cases.save, one, clients=2)
    assert pool.values(per_client_cases.restore_beside_weights, one, "error", clients=2) == [0, 1]
    assert pool.values(per_client_cases.go_on, one, two, clients=3) == [0, 1, -1]
    back = dtckpt.restore(two)
    assert back["name"] == {0: "client 0", 1: "client 1", 2: "client 2"}
    assert (back["rng"].num_clients, back["rng"][2].tolist(), back["loader"][2]["position"]) == (
        3,
        [20, 21, 22, 23],
        102,
    )
    target = target_of("modulo")
    dtckpt.restore(two, target)
    assert client_of(target) == 0
    with dtckpt.open_checkpoint(two) as checkpoint:
        assert checkpoint.verify().damages == ()
        assert {chunk.client for chunk in checkpoint.tensors["rng/2"].chunks} == {2}


@pytest.mark.processes
def test_where_keys_must_be_the_same(pool, tmp_path):
    path = f"{tmp_path}/s"
    for kind in ("key", "per client"):
        answers = pool.run(per_client_cases.save_same_keys, path, kind, clients=2)
        assert {answer.error for answer in answers} == {"SaveDisagreementError"}, answers
        assert "client 1 pass 'rng_2' and client 0 do not" in answers[0].text
    pool.values(per_client_cases.save_same_keys, path, "", clients=2)
    assert list(dtckpt.restore(path)["rng"]) == [0, 1]


@pytest.mark.processes
def test_some_clients_alone_have_a_value(pool, tmp_path):
    path = f"{tmp_path}/s"
    pool.values(per_client_cases.save, path, [1], clients=2)
    assert list(dtckpt.restore(path)["rng"]) == [1]
    assert pool.values(per_client_cases.restore_beside_weights, path, "keep", clients=2) == [-1, 1]
    answers = pool.run(per_client_cases.restore_beside_weights, path, "error", clients=2)
    assert {answer.error for answer in answers} == {"TensorNotFoundError"}, answers


@pytest.mark.processes
def test_clients_of_a_group_are_numbered_in_it(pool, tmp_path):
    assert pool.values(per_client_cases.save_in_groups, f"{tmp_path}/s", clients=4) == [2, 3, 0, 1]


@pytest.mark.processes
def test_without_a_rule_all_clients_get_one_error(pool, tmp_path):
    path = saved(tmp_path, {**by_clients(2), "w": torch.ones(6)})
    answers = pool.run(per_client_cases.restore_beside_weights, path, "error", clients=3)
    assert {answer.error for answer in answers} == {"TensorNotFoundError"}, answers
