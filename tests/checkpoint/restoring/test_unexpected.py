"""What no client of a restore asks for."""

import pytest
import torch

import dtckpt
from checkpoint.saving import union_cases

CASES = {
    "refused": "UnexpectedTensorError",
    "allowed": "",
    "allowed by some": "UnexpectedTensorError",
    "rest": "",
    "missing": "TensorNotFoundError",
}


@pytest.mark.parametrize("kind", CASES)
def test_clients_that_restore_parts(pool, tmp_path, kind):
    tree = {f"w{number}": torch.tensor(float(number)) for number in range(40)}
    dtckpt.save(tmp_path / "s", {**tree, "extra": torch.tensor(1.0), "step": 7})
    found = pool.values(union_cases.restore_in_parts, f"{tmp_path}/s", kind, clients=3)
    error = CASES[kind]
    for client, (text, values, unexpected) in enumerate(found):
        assert text.partition(":")[0] == error
        assert values == ([0.0] * 3 if error else [client, client + 3.0, client + 6.0])
        if kind != "missing":
            assert unexpected == (() if kind == "rest" else ("extra",))
    assert len({text for text, _, _ in found}) == 1


def test_keys_of_ranks_are_not_lost_on_another_number_of_ranks(pool, tmp_path):
    path = f"{tmp_path}/s"
    pool.values(union_cases.save_rank_loader, path, clients=4, group=True)
    found = pool.values(union_cases.restore_rank_loader, path, clients=4, group=True)
    assert found == [("", 10 + rank) for rank in range(4)]
    for clients in (1, 2):
        for error, position in pool.values(union_cases.restore_rank_loader, path, clients=clients, group=True):
            assert error.startswith("UnexpectedTensorError")
            assert "'loader/dp_rank_3/position'" in error
            assert position == -1
