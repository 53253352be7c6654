"""Optimizer state in tensors of wrapper subclasses, as torchao's low-bit optimizers keep it.

Such a tensor is stored as its parts (`dtckpt.format.containers`), and an optimizer that has no state yet gets tensors
of the class again. The parts of a shard, as FSDP2 makes them, cannot be cut anew: codes and scales stand for blocks of
the shard's elements. So the parts of each device have separate names, with the device's number in the mesh::

    device 0    codes (8, 4), scale (2,)    ->    …/exp_avg/0/codes, …/exp_avg/0/scale
    device 1    codes (7, 4), scale (2,)    ->    …/exp_avg/1/codes, …/exp_avg/1/scale
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from dtckpt.dtensor import torch_interop
from dtckpt.errors import TreeError
from dtckpt.format import tree as trees
from dtckpt.format.containers import TensorParts, has_parts
from dtckpt.format.tree import Node

_BY_DEVICE = "by device"
"""Marks the context of parts whose names begin with the number of a device."""


def open_state(state: Any) -> tuple[Any, dict[int, tuple[TensorParts, Any]]]:
    """Return the state of an optimizer with its sharded low-bit tensors taken apart.

    Returns:
        The state, and by id of each `TensorParts` that tensor's parts and the tensor itself.
    """
    opened: dict[int, tuple[TensorParts, Any]] = {}
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return state, opened
    by_key = dict(state["state"])
    for key, values in state["state"].items():
        if isinstance(values, Mapping) and any(map(_is_low_bit_shard, values.values())):
            taken_apart = {name: _parts_by_device(each) for name, each in values.items() if _is_low_bit_shard(each)}
            by_key[key] = {**values, **taken_apart}
            opened |= {id(parts): (parts, values[name]) for name, parts in taken_apart.items()}
    return ({**state, "state": by_key} if opened else state), opened


def close_state(state: Any, opened: Mapping[int, tuple[TensorParts, Any]]) -> Any:
    """Return a state with the tensors themselves in place of the parts that `open_state` made of them."""
    if not opened:
        return state
    by_key = {
        key: {name: opened[id(value)][1] if id(value) in opened else value for name, value in values.items()}
        if isinstance(values, Mapping)
        else values
        for key, values in state["state"].items()
    }
    return {**state, "state": by_key}


def _is_low_bit_shard(value: Any) -> bool:
    return torch_interop.is_torch_dtensor(value) and has_parts(value._local_tensor)


def _parts_by_device(tensor: Any) -> TensorParts:
    """Return the parts of a DTensor's local tensor, by the number of its device and their names."""
    local, device = TensorParts.of(tensor._local_tensor), _device_number(tensor)
    parts = {f"{device}/{name}": part for name, part in local.items()}
    return TensorParts(parts, local.kind, tuple(tensor.shape), [_BY_DEVICE, *_layout_facts(tensor), local.context])


def _device_number(tensor: Any) -> int:
    """Return the number of this client's device in the mesh of a DTensor, row by row."""
    mesh, number = tensor.device_mesh, 0
    for size, coordinate in zip(mesh.shape, mesh.get_coordinate(), strict=True):
        number = number * size + coordinate
    return number


def _layout_facts(tensor: Any) -> list[Any]:
    """Return the shape of a DTensor's mesh and its placements, as plain values."""
    return [list(tensor.device_mesh.shape), [str(placement) for placement in tensor.placements]]


def restorer_of(
    node: Node, parameter: torch.Tensor | None, optimizer: type | None, where: str
) -> Callable[[Any], Any] | None:
    """Return a function that puts the tensors of new state together again; None if the state has no parts.

    Args:
        node: The saved state of a parameter, or a part of it.
        parameter: The parameter.
        optimizer: The class of the optimizer; a class of tensors must be of the same package.
        where: The path of the state, for messages.

    Raises:
        TreeError: There is no such class, or the parts are of another layout than the parameter.
    """
    kinds: dict[str, Any] = {}
    for facts in _parts_in(node):
        kinds[facts.kind] = _class_of(facts.kind, optimizer, where)
        _validate_layout(facts, parameter, where)
    if not kinds:
        return None

    def restore(value: Any) -> Any:
        if isinstance(value, TensorParts):
            return _put_together(value, kinds[value.kind], parameter)
        return {name: restore(each) for name, each in value.items()} if type(value) is dict else value

    return restore


def own_parts(node: Node, parameter: Any) -> Node:
    """Return saved state without the parts of other devices' low-bit tensors."""
    opened = trees.items_of(node)
    if "type" in node and node["type"][0] == "TensorParts":
        if not _is_by_device(trees.build(node, lambda name: name).context):
            return node
        kind, facts, items = node["type"]
        start = f"{_device_number(parameter)}/"
        return {"type": [kind, facts, {"dict": [item for item in items["dict"] if item[0].startswith(start)]}]}
    if opened is None or "dict" not in node:
        return node
    return {"dict": [[key, own_parts(child, parameter) if "type" in child else child] for key, child in node["dict"]]}


def _parts_in(node: Node) -> Iterator[TensorParts]:
    """Yield the low-bit tensors at and directly below a node, with names in place of their parts."""
    opened = trees.items_of(node)
    if "type" in node and node["type"][0] == "TensorParts":
        yield trees.build(node, lambda name: name)
    elif opened is not None and "dict" in node:
        for _, child in opened[1]:
            if "type" in child:
                yield from _parts_in(child)


def _class_of(kind: str, optimizer: type | None, where: str) -> Any:
    """Return the tensor class with a name, of the optimizer's package; only classes that the program has imported."""
    packages = {base.__module__.partition(".")[0] for base in (optimizer or object).__mro__} - {"torch", "builtins"}
    found = [
        each
        for each in _subclasses(torch.Tensor)
        if each.__name__ == kind and each.__module__.partition(".")[0] in packages and _has_class_parts(each)
    ]
    if len(found) != 1:
        raise TreeError(
            f"cannot restore {where!r}: it was saved as a tensor of class {kind}, which a fresh "
            f"{optimizer.__name__ if optimizer else 'optimizer'} has none of; make a step with the optimizer first, so "
            "that it has such tensors to be filled"
        )
    return found[0]


def _has_class_parts(kind: type) -> bool:
    """Whether tensors of a class can be put together of their parts."""
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def _subclasses(kind: type[torch.Tensor]) -> Iterator[type[torch.Tensor]]:
    each: type[torch.Tensor]
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _validate_layout(facts: TensorParts, parameter: Any, where: str) -> None:
    """Check that parts of shards were saved in the layout of the parameter, and others with a whole one."""
    context = facts.context
    saved = context[1:3] if _is_by_device(context) else None
    own = _layout_facts(parameter) if torch_interop.is_torch_dtensor(parameter) else None
    if saved != own:
        raise TreeError(
            f"cannot restore {where!r}: low-bit tensors can only be restored in the saved layout; got "
            f"{own or 'a whole tensor'} in the target, expected {saved or 'a whole tensor'} (shape of the mesh, "
            "placements); restore on a mesh like the saved one, or save the optimizer with state of 32 bits"
        )


def _is_by_device(context: Any) -> bool:
    return isinstance(context, list) and len(context) == 4 and context[0] == _BY_DEVICE


def _put_together(parts: TensorParts, kind: Any, parameter: Any) -> Any:
    """Return the tensor that has the given parts."""
    if not _is_by_device(parts.context):
        return kind.__tensor_unflatten__(dict(parts), parts.context, torch.Size(parts.shape), _strides(parts.shape))
    from torch.distributed.tensor import DTensor

    own = {name.partition("/")[2]: part for name, part in parts.items()}
    shape = tuple(parameter.to_local().shape)
    local = kind.__tensor_unflatten__(own, parts.context[3], torch.Size(shape), _strides(shape))
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
