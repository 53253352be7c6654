"""Tensor parallelism over clients: tied parameters, uneven shards, errors, losses, and the model of PyTorch's tests."""

import pytest

from . import parallel_cases as cases

pytestmark = pytest.mark.processes


def run(pool, case, clients=2):
    """Return what a case has seen, the same on every client."""
    first, *others = pool.values(case, clients=clients, group=True)
    assert all(other == first for other in others)
    return first


@pytest.mark.share(2)
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (cases.tied_in_one_plan, None),
        (cases.tied_in_several_calls, [(False, 26), (True, 25), True]),
        (cases.tied_to_a_module_without_a_style, (True, "S(0)")),
        (cases.parameters_that_only_look_alike, "S(1)"),
    ],
)
def test_tied_parameters_stay_tied(pool, case, expected):
    seen = run(pool, case)
    assert expected is None or seen == expected


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        (cases.tied_in_different_layouts, "LayoutError", "have one style for all modules that share a parameter"),
        (cases.component_of_a_wrong_size, None, "got (2, 5), expected (2, 4)"),
        (cases.no_tensor_on_one_client, None, "RowwiseParallel: input: got str, expected a tensor"),
        (cases.plans_that_differ, "ComponentError", "clients differ in shape, dtype, placements"),
        (cases.shards_that_do_not_follow, "ComponentError", "shards follow torch.chunk"),
    ],
)
def test_every_client_gets_the_error(pool, case, kind, text):
    first, second = pool.values(case, clients=2, group=True)
    assert text in first[1]
    assert text in second[1]
    assert kind is None or first[0] == second[0] == kind


@pytest.mark.parametrize(("clients", "per_reduction"), [(2, 1), (3, 2)])
def test_uneven_shards(pool, clients, per_reduction):
    """Among more than two clients, an all-reduce is a reduce-scatter and an all-gather, an exchange each."""
    reduced, *sequences = run(pool, cases.uneven_shards, clients)
    assert reduced == [per_reduction, per_reduction, False]
    assert sequences == [[2, 2, False]] * 4


def test_clients_agree_on_shapes_only_where_they_must(pool):
    assert run(pool, cases.agreements) == [1, 1, 1, 1, 3, 2, 1, 1]


def test_replicas_have_the_values_of_one_client(pool):
    assert run(pool, cases.replicas_of_norms) == ([4.0] * 4, True, False)


def test_parameters_on_the_meta_device(pool):
    assert run(pool, cases.meta_parameters) == (False, (16, 8), (8, 8))


def test_values_may_stay_distributed(pool):
    # Each of the two layers gathers twice and scatters twice, the embedding scatters, and the output gathers twice.
    assert run(pool, cases.kept_distributed) == {"exchange": 11}


def test_lengths_of_sequences_may_change_while_values_stay_distributed(pool):
    kind, text = run(pool, cases.lengths_that_change)
    assert kind == "LayoutError"
    assert "use_local_output=False to the styles" in text


def test_activation_checkpoints(pool):
    # Beside its own ten exchanges, the backward pass repeats four of each layer; not the last, if it is not reentrant.
    reentrant, other = run(pool, cases.checkpointed)
    assert reentrant == [11, 10 + 2 * 4, False]
    assert other == [11, 10 + 2 * 3, False]


def test_training_is_that_of_one_device(pool):
    run(pool, cases.trained)


def test_losses_of_split_classes_communicate_twice_forward_and_never_backward(pool):
    assert run(pool, cases.losses) == {(("exchange", 2),)}


@pytest.mark.share(1)
@pytest.mark.parametrize("clients", [2, 4])
def test_losses_in_other_layouts(pool, clients):
    run(pool, cases.losses_in_other_layouts, clients)


def test_the_transformer_of_pytorchs_tests(pool):
    names = run(pool, cases.torchs_transformer)
    assert {"ColwiseParallel", "DTensor", "PrepareModuleInput", "RowwiseParallel", "SequenceParallel"} <= set(names)
