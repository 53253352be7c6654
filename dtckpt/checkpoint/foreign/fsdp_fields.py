"""The fields of what FSDP1 writes on each process, read from parsed pickles; pure.

With ``LOCAL_STATE_DICT`` every process saves its shards of flat parameters, each as a ``ShardedTensor``: its own
shards, the places of all shards, and which process it is. Names and shapes of the parameters in a flat parameter are in
no file.

Source: torch.distributed._shard.sharded_tensor.api.ShardedTensor (``__getstate__``), and
torch.distributed.fsdp._flat_param.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtckpt.checkpoint.foreign.pickle_names import SHARDED_TENSOR
from dtckpt.checkpoint.foreign.pickle_syntax import Global, Pairs, PickledCall
from dtckpt.errors import CheckpointCorruptError
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.grid import MAX_RANK
from dtckpt.layout.region import Region

_MAX_NUMBER = 1 << 62
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
FLAT = "_flat_param"
"""The last segment of the name of a flat parameter."""
ALIGNED_NBYTES = 16
"""With ``use_orig_params`` every parameter begins at a multiple of so many bytes of its flat parameter."""


@dataclass(frozen=True, slots=True)
class ShardedTensor:
    """One process's view of a sharded tensor.

    Args:
        shape: The shape of the whole tensor.
        dtype: Its dtype.
        shards: The places of all shards, each with the rank of its process.
        own: The pickled tensors of this process's shards, each with its place.
        rank: The rank of this process.
        world: The number of processes.
    """

    shape: tuple[int, ...]
    dtype: str
    shards: tuple[tuple[int, Region], ...]
    own: tuple[tuple[Region, Any], ...]
    rank: int
    world: int


def is_sharded(value: Any) -> bool:
    """Whether a pickled value is a ``ShardedTensor``."""
    if type(value) is not PickledCall:
        return False
    if value.name == "torch._tensor._rebuild_from_type_v2" and len(value.arguments) == 4:
        kind = value.arguments[1]
        return type(kind) is Global and kind.name == SHARDED_TENSOR
    return value.name == SHARDED_TENSOR


def sharded_tensor(value: Any, where: str) -> ShardedTensor:
    """Return the fields of a pickled ``ShardedTensor``.

    Raises:
        CheckpointCorruptError: The shard is malformed.
    """
    try:
        shards, metadata, group, _, _ = value.state if value.name == SHARDED_TENSOR else value.arguments[3]
        facts, process = _fields(metadata.state), _fields(group.state)
        dtype = _fields_of_properties(facts["tensor_properties"].state)
        own = [_fields(shard.state) for shard in shards]
        return ShardedTensor(
            _numbers(facts["size"].arguments[0]),
            dtype,
            tuple(_place(each) for each in facts["shards_metadata"]),
            tuple((_place(each["metadata"])[1], each["tensor"]) for each in own),
            _number(process["global_rank"]),
            _number(process["global_world_size"]),
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(
            f"the ShardedTensor at {where[:200]!r} is malformed: {str(error)[:200]}"
        ) from error


def plain_name(name: str) -> str:
    """Return the name of a parameter without the segments of its wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parse_template(data: bytes, where: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's parameters, by name, in their order.

    Args:
        data: JSON: an object of lists of sizes.
        where: The file, for messages.

    Raises:
        CheckpointCorruptError: The value is something else.
    """
    try:
        content = json.loads(data)
        if not isinstance(content, dict):
            raise TypeError("it is no object")
        return {name: _numbers(tuple(shape)) for name, shape in content.items()}
    except (RecursionError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(
            f"{where} is no template: {str(error)[:200]}; expected names and shapes of a model's parameters in order, "
            "as JSON: {name: list(p.shape) for name, p in model.named_parameters()}"
        ) from error


def starts_in_flat(
    flats: Mapping[str, tuple[int, str]], template: Mapping[str, tuple[int, ...]], world: int
) -> dict[str, dict[str, int]]:
    """Return where each parameter begins in its flat parameter: by flat parameter, by name.

    Args:
        flats: The number of elements of each flat parameter, and its dtype.
        template: The shapes of the model's parameters, in their order.
        world: The number of processes.

    Raises:
        CheckpointCorruptError: The parameters are not the elements of the flat parameters.
    """
    owners: dict[str, list[str]] = {flat: [] for flat in flats}
    for name in template:
        parts = name.split(".")
        above = (".".join([*parts[:end], FLAT]) for end in range(len(parts) - 1, -1, -1))
        if (owner := next((flat for flat in above if flat in flats), None)) is None:
            raise CheckpointCorruptError(f"the template has parameter {name[:200]!r}, which no flat parameter can hold")
        owners[owner].append(name)
    result = {}
    for flat, names in owners.items():
        numel, dtype = flats[flat]
        for alignment in (1, max(1, ALIGNED_NBYTES // DTYPES[dtype].itemsize)):
            starts, end = {}, 0
            for name in names:
                starts[name] = end + -end % alignment
                end = starts[name] + math.prod(template[name])
            if end == numel or (alignment > 1 and end + -end % world == numel):
                result[flat] = starts
                break
        else:
            raise CheckpointCorruptError(
                f"flat parameter {flat[:200]!r} has {numel} elements, and the template's {len(names)} parameters in it "
                f"have {sum(math.prod(template[name]) for name in names)}; is it of another model?"
            )
    return result


def _place(metadata: Any) -> tuple[int, Region]:
    fields = _fields(metadata.state)
    placement = _fields(fields["placement"].state)
    region = Region(_numbers(tuple(fields["shard_offsets"])), _numbers(tuple(fields["shard_sizes"])))
    return _number(placement["_rank"]), region


def _fields_of_properties(state: Any) -> str:
    """Return the dtype of ``TensorProperties``: the first item of a tuple, or a field."""
    dtype = state[0] if type(state) is tuple else _fields(state)["dtype"]
    name = dtype.name.removeprefix("torch.") if type(dtype) is Global else ""
    if name not in DTYPES:
        raise ValueError(f"its dtype is {name[:40]}")
    return name


def _fields(state: Any) -> dict[str, Any]:
    """Return the fields of an object's state; attributes and slots may come apart."""
    parts = state if type(state) is tuple else (state,)
    return {name: each for part in parts if type(part) is Pairs for name, each in part[:64] if type(name) is str}


def _numbers(sizes: Any) -> tuple[int, ...]:
    if type(sizes) is not tuple or len(sizes) > MAX_RANK:
        raise ValueError("a shape is no tuple of sizes")
    return tuple(map(_number, sizes))


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_NUMBER:
        raise ValueError("a size or a rank is none")
    return value
