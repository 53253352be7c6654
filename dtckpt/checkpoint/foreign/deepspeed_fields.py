"""The fields of DeepSpeed's files, read from parsed pickles; pure.

A model file describes the parameters of one model slice, and holds the 16-bit module and the client's own state. An
optimizer file holds one process's flat vectors. The fields of both are read here; the rest are plain values.

Source: deepspeed.runtime.engine, and the ``state_dict`` of the optimizers in deepspeed.runtime.zero and
deepspeed.runtime.bf16_optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dtckpt.checkpoint.foreign.deepspeed_layout import FP32, Shape
from dtckpt.checkpoint.foreign.pickle_names import DEEPSPEED_ADDRESS, DEEPSPEED_SCALERS, DEEPSPEED_STAGE
from dtckpt.checkpoint.foreign.pickle_syntax import NODE_NBYTES, STEP_NBYTES, Pairs, PickledCall, ReadBudget
from dtckpt.errors import CheckpointCorruptError, CheckpointVersionError
from dtckpt.format.grid import MAX_RANK
from dtckpt.format.hash_work import validate_hashes

_MAX_NUMBER = 1 << 62
_USED = (
    *("base_optimizer_state", "base_optimizer_state_step", "optimizer_state_dict", "single_partition_of_fp32_groups"),
    *("fp32_flat_groups", "partition_count", "group_paddings", "param_alignment_paddings", "param_slice_mappings"),
    *("param_groups", "zero_stage", "ds_version"),
)
_MODEL_USED = (
    *("module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params"),
    *("optimizer",),
)


@dataclass(frozen=True, slots=True, eq=False)
class ModelFields:
    """The fields of a model file.

    Args:
        module: The module's items, by name; None if each layer has a separate file.
        buffers: Names of the items that are no parameters.
        shapes: The shapes of the optimizer's parameters, by group and name.
        frozen_shapes: The shapes of the parameters that no optimizer has.
        frozen: Those parameters, or this process's parts of them.
        shared: Names of tied parameters, each with the name that the other fields have.
        optimizer: The optimizer's state dict without ZeRO; None with ZeRO.
        rest: All other items.
        world: The number of model slices.
    """

    module: dict[str, Any] | None
    buffers: frozenset[str]
    shapes: list[dict[str, Shape]]
    frozen_shapes: dict[str, Shape]
    frozen: dict[str, Any]
    shared: dict[str, str]
    optimizer: Any
    rest: Pairs
    world: int


@dataclass(frozen=True, slots=True, eq=False)
class OptimizerFields:
    """The fields of an optimizer file.

    Args:
        is_cut: Whether every parameter is cut, as with ZeRO 3.
        groups: By group, by kind, a pickled tensor or a number.
        counts: The number of processes, by group.
        slices: As `dtckpt.checkpoint.foreign.deepspeed_layout.RankVectors`.
        gaps: Likewise.
        param_groups: The groups' options.
        rest: All other items.
    """

    is_cut: bool
    groups: list[dict[str, Any]]
    counts: list[int]
    slices: list[dict[str, tuple[int, int]]]
    gaps: list[list[int]]
    param_groups: list[Any]
    rest: Pairs


def model_fields(value: Any, where: str, budget: ReadBudget) -> ModelFields:
    """Return the fields of a model file.

    Raises:
        CheckpointCorruptError: The file is malformed.
    """
    with _errors_of(where):
        fields = named(value, budget)
        shapes = fields.get("param_shapes") or []
        groups = [_shapes(each, budget) for each in (shapes if type(shapes) is list else [shapes])]
        if len({name for group in groups for name in group}) != sum(map(len, groups)):
            raise ValueError("a parameter is in two groups")
        module = fields.get("module")
        return ModelFields(
            None if module is None else named(module, budget),
            frozenset(map(_text, fields.get("buffer_names") or [])),
            groups,
            _shapes(fields.get("frozen_param_shapes") or Pairs(), budget),
            named(fields.get("frozen_param_fragments") or Pairs(), budget),
            {name: _text(kept) for name, kept in named(fields.get("shared_params") or Pairs(), budget).items()},
            fields.get("optimizer"),
            Pairs((name, each) for name, each in fields.items() if name not in _MODEL_USED),
            _number(fields.get("mp_world_size", 1)),
        )


def optimizer_fields(value: Any, where: str, budget: ReadBudget) -> OptimizerFields:
    """Return the fields of an optimizer file.

    Raises:
        CheckpointCorruptError: The file is malformed.
        CheckpointVersionError: This version does not know the optimizer.
    """
    with _errors_of(where):
        state = named(named(value, budget)["optimizer_state_dict"], budget)
        is_cut = "fp32_flat_groups" in state
        vectors = state.get("fp32_flat_groups" if is_cut else "single_partition_of_fp32_groups")
        if type(vectors) is not list:
            raise CheckpointVersionError(
                f"{where} has neither fp32_flat_groups nor single_partition_of_fp32_groups, expected the state of ZeRO "
                "1, 2 or 3; convert the checkpoint with DeepSpeed's ds_to_universal.py"
            )
        base = state.get("optimizer_state_dict" if is_cut else "base_optimizer_state")
        elastic = base if type(base) is list else None
        inner = {} if elastic is not None or base is None else named(base, budget)
        states: dict[int, Any] = dict(enumerate(elastic or []))
        for key, each in items(inner.get("state") or Pairs()):
            states[_number(key)] = each
        step = state.get("base_optimizer_state_step")
        groups = []
        for number, vector in enumerate(vectors):
            kinds = {**({} if step is None else {"step": step}), **named(states.get(number) or Pairs(), budget)}
            if FP32 in kinds:
                raise ValueError(f"group {number} has two vectors {FP32}")
            groups.append({FP32: vector, **kinds})
        counts = state.get("partition_count")
        return OptimizerFields(
            is_cut,
            groups,
            [_number(each) for each in (counts if type(counts) is list else [counts])],
            [dict(_slices(each, budget)) for each in state.get("param_slice_mappings") or []],
            [[_number(gap) for gap in each] for each in state.get("param_alignment_paddings") or []],
            list(inner.get("param_groups") or state.get("param_groups") or []),
            Pairs((name, plain(each)) for name, each in state.items() if name not in _USED),
        )


def universal_fields(value: Any, where: str, budget: ReadBudget) -> tuple[list[Any], Pairs]:
    """Return the groups' options and the other values of a universal checkpoint's ``optimizer_state.pt``."""
    with _errors_of(where):
        state = named(value, budget)
        inner = named(state.get("optimizer_state_dict") or state.get("base_optimizer_state") or Pairs(), budget)
        groups = list(state.get("param_groups") or inner.get("param_groups") or [])
        return groups, Pairs((name, plain(each)) for name, each in state.items() if name not in _USED)


def with_names(groups: Sequence[Any], names: Sequence[Sequence[str]], budget: ReadBudget) -> list[Any]:
    """Return groups' options whose ``params``, numbers of vectors, are names of parameters.

    Args:
        groups: The options of each group, as pickled.
        names: The names of the parameters in each vector.
        budget: Bounds the names.
    """
    result = []
    for group in groups:
        options = named(group, budget)
        numbers = options.get("params")
        budget.take(NODE_NBYTES)
        if type(numbers) is list and all(type(each) is int and 0 <= each < len(names) for each in numbers):
            budget.take(STEP_NBYTES * sum(len(names[each]) for each in numbers))
            options["params"] = [name for each in numbers for name in names[each]]
        result.append(Pairs(options.items()))
    return result


def with_more_names(groups: Sequence[Any], others: Sequence[Any], budget: ReadBudget) -> list[Any]:
    """Return groups' options whose ``params`` have the names of others, too. Args: as `with_names` returns them."""
    result = []
    for number, group in enumerate(groups):
        options, more = named(group, budget), named(others[number], budget) if number < len(others) else {}
        if type(options.get("params")) is type(more.get("params")) is list:
            options["params"] = [*options["params"], *more["params"]]
        result.append(Pairs(options.items()))
    return result


def items_of(value: Any, where: str, budget: ReadBudget) -> dict[str, Any]:
    """Return the items of a pickled dict with names for keys. Raises: `CheckpointCorruptError`."""
    with _errors_of(where):
        return named(value, budget)


def items(value: Any) -> Pairs:
    """Return the items of a pickled dict, also of one of class ``OrderedDict``."""
    if type(value) is PickledCall and value.name == "collections.OrderedDict":
        given = value.arguments[0] if value.arguments else []
        return Pairs([*((key, each) for key, each in given), *value.pairs])
    if type(value) is not Pairs:
        raise TypeError(f"{type(value).__name__} where a dict should be")
    return value


def named(value: Any, budget: ReadBudget) -> dict[str, Any]:
    """Return the items of a pickled dict whose keys are names."""
    pairs = items(value)
    # Many places may refer to one dict.
    budget.take(NODE_NBYTES * (1 + len(pairs)))
    if any(type(name) is not str for name, _ in pairs):
        raise TypeError("a key is no name")
    validate_hashes([name for name, _ in pairs])
    return dict(pairs)


def plain(value: Any) -> Any:
    """Return a value without DeepSpeed's own classes: a stage is its number, a loss scaler the dict of its state."""
    if type(value) is PickledCall and value.name == DEEPSPEED_STAGE and len(value.arguments) == 1:
        return value.arguments[0]
    if type(value) is PickledCall and value.name in DEEPSPEED_SCALERS:
        return value.state
    return value


def _shapes(value: Any, budget: ReadBudget) -> dict[str, Shape]:
    return {name: _shape(size) for name, size in named(value, budget).items()}


def _shape(size: Any) -> Shape:
    if type(size) is PickledCall and size.name == "torch.Size":
        (size,) = size.arguments
    if type(size) is not tuple or len(size) > MAX_RANK:
        raise ValueError("a shape is no torch.Size")
    return tuple(map(_number, size))


def _slices(value: Any, budget: ReadBudget) -> Iterator[tuple[str, tuple[int, int]]]:
    for name, address in named(value, budget).items():
        if type(address) is not PickledCall or address.name != DEEPSPEED_ADDRESS:
            raise TypeError(f"the place of {name[:80]!r} is no {DEEPSPEED_ADDRESS}")
        place = named(address.state, budget)
        yield name, (_number(place["start"]), _number(place["numel"]))


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
        raise ValueError("a size or a count is none")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("a name is none")
    return value


@contextmanager
def _errors_of(where: str) -> Iterator[None]:
    """In a context, turn errors of malformed fields into errors about the file."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, CheckpointCorruptError | CheckpointVersionError):
            raise
        raise CheckpointCorruptError(f"{where} is malformed: {str(error)[:200]}; restore another checkpoint") from error
