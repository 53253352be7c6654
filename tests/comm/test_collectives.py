"""The contract of `Collectives`, which every implementation keeps."""

import operator

import pytest
import torch
from support.states import NCCL, needs_gpus

from dtckpt.comm import collectives
from dtckpt.comm.collectives import NativeCollectives, PairwiseCollectives, collectives_of, reduce_terms

from . import collectives_cases

IMPLEMENTATIONS = [
    pytest.param(None, 1, None, id="pairwise alone"),
    pytest.param(None, 2, None, id="pairwise of 2"),
    pytest.param(None, 3, None, id="pairwise of 3"),
    pytest.param(None, 4, None, id="pairwise of 4"),
    pytest.param(None, 4, (3, 1), id="pairwise of 2 among 4"),
    pytest.param("gloo", 2, None, id="pairwise of 2, through Gloo"),
    pytest.param("gloo", 4, None, id="pairwise of 4, through Gloo"),
    pytest.param("cpu", 1, None, id="native alone"),
    pytest.param("cpu", 3, None, id="native of 3"),
    pytest.param("cpu", 4, (0, 2, 3), id="native of 3 among 4"),
    pytest.param("cuda", 1, None, marks=needs_gpus(1), id="nccl alone"),
    pytest.param("cuda", 2, None, marks=needs_gpus(2), id="nccl of 2"),
    pytest.param("cuda", 4, (0, 2, 3), marks=needs_gpus(4), id="nccl of 3 among 4"),
]


@pytest.mark.processes
@pytest.mark.parametrize(("native", "clients", "members"), IMPLEMENTATIONS)
def test_contract(pool, native, clients, members):
    backend = NCCL if native == "cuda" else "gloo"
    answers = pool.values(collectives_cases.run, native, members, clients=clients, group=True, backend=backend)
    wrong = [{name: wrong for name, (wrong, _) in results.items() if wrong} for results in answers]
    assert wrong == [{}] * clients
    participants = [results for results in answers if results]
    assert len(participants) == len(members or range(clients))
    for name in collectives_cases.EQUAL_BITS:
        assert len({tuple(results[name][1]) for results in participants}) == 1, f"{name}: members have different bits"


@pytest.mark.processes
def test_gathering_objects_says_so_when_a_client_is_gone(pool):
    _, answer = pool.run(collectives_cases.gather_object_from, 1, clients=2, group=True)
    assert answer.error == "CoordinationError"
    assert "all_gather_object among clients 0, 1 failed" in answer.text


@pytest.mark.processes
def test_clients_that_cannot_be_connected_are_named(pool):
    answers = pool.run(collectives_cases.fail_to_connect, clients=2, group=True)
    assert {answer.error for answer in answers} == {"CoordinationError"}
    assert all("connecting clients 0, 1 on cpu failed: no route" in answer.text for answer in answers)


def test_alone_pairwise_needs_no_process_group():
    for check, function in collectives_cases.CHECKS.items():
        bench = collectives_cases.Bench(PairwiseCollectives([0], 0), 0, torch.device("cpu"))
        function(bench)
        assert bench.wrong == [], check


def test_host_memory_is_served_by_messages_and_gpus_by_the_library():
    assert type(collectives_of([2, 0], 0, torch.device("cpu"))) is PairwiseCollectives
    assert type(collectives_of([2, 0], 0, torch.device("cuda", 0))) is NativeCollectives
    assert collectives_of([2, 0], 0, torch.device("cpu")).members == (0, 2)


@pytest.mark.parametrize("dtype", collectives_cases.WIDE_UNSIGNED)
@pytest.mark.parametrize(
    ("reduce_op", "function"),
    [
        ("sum", operator.add),
        ("product", operator.mul),
        ("band", operator.and_),
        ("bor", operator.or_),
        ("bxor", operator.xor),
    ],
)
def test_reductions_of_wide_unsigned_integers_need_none_of_the_functions_that_gpus_lack(
    monkeypatch, reduce_op, function, dtype
):
    def on_gpu(first, second, *, out):
        assert not {first.dtype, second.dtype, out.dtype} & {*collectives_cases.WIDE_UNSIGNED}
        return reducer(first, second, out=out)

    reducer = collectives.REDUCERS[reduce_op]
    monkeypatch.setitem(collectives.REDUCERS, reduce_op, on_gpu)
    largest = torch.iinfo(dtype).max
    values = [[largest, largest // 2 + 1, 3, 0], [largest, largest // 2 + 1, largest // 3, 1], [largest, 3, 7, largest]]
    expected = [function(function(a, b), c) & largest for a, b, c in zip(*values, strict=True)]
    terms = [torch.tensor(each, dtype=dtype) for each in values]
    # Elements that do not lie side by side, and the first term in the place of the result.
    result = torch.empty(4, 2, dtype=dtype)[:, 0]
    reduce_terms(result, terms, reduce_op)
    assert result.tolist() == expected
    reduce_terms(terms[0], terms, reduce_op)
    assert terms[0].tolist() == expected
    reduce_terms(result, terms[1:2], reduce_op)
    assert result.tolist() == values[1]
