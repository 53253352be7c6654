"""`Shards`: plain local tensors that are parts of one global tensor, as the stacked experts of an expert-parallel job.

PyTorch's and our DTensors know their layout. A plain tensor counts as a copy that all clients have, unless the tree
holds it in a `Shards`, or `Shards.mark` has marked the parameter of a module. Then a save writes one global tensor, and
a restore gives each client its part, on any number of clients::

    4 experts of (in, out) on 2 clients     client 0: w (2, in, out)     client 1: w (2, in, out)
    in the checkpoint                       w (4, in, out), rows 0..2 of client 0, rows 2..4 of client 1

The parts may be sharded themselves, as FSDP2 shards each client's experts over the clients with the same experts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dtckpt.checkpoint.restoring.wrapper_prefixes import unwrapped
from dtckpt.dtensor import DTensor, torch_interop
from dtckpt.errors import ComponentError, ConfigError, LayoutError, LayoutTypeError, MeshError, capped
from dtckpt.layout import device_mesh
from dtckpt.layout.device_mesh import mesh_of_ranks
from dtckpt.layout.layout import UNSHARDED, Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.root_layout import root_layout


@dataclass(frozen=True, slots=True)
class ShardMark:
    """Which parts of a global tensor the local tensors of some clients are.

    Args:
        mesh: The clients, in the order of the parts: a mesh of one axis, with one device each.
        dim: The dim that the parts divide.
        size: The global size of that dim; None if all parts are as large as this client's.
    """

    mesh: Mesh
    dim: int
    size: int | None

    @classmethod
    def of(cls, mesh: Any, dim: int, size: int | None) -> ShardMark:
        """Return the mark of a process group, or of a mesh of either library. Raises: as `Shards`."""
        if not isinstance(dim, int) or (size is not None and (not isinstance(size, int) or size < 0)):
            raise LayoutTypeError(f"Shards: got dim {dim!r} and size {size!r}, expected integers, and no negative size")
        found = _mesh_of(mesh)
        if found.ndim != 1:
            raise MeshError(
                f"Shards: got a mesh of axes {capped(found.mesh_dim_names)}, expected one axis; pass a slice, such as "
                f"mesh[{found.mesh_dim_names[-1:]!r}]"
            )
        if found.num_local_devices() != 1 or found.num_clients != found.size():
            raise MeshError(
                f"Shards: this client has {found.num_local_devices()} of the {found.size()} devices of "
                f"{found.num_clients} clients, expected one device per client; a client with several packs a DTensor"
            )
        return cls(found, dim, size)

    def whole(self, part: torch.Tensor, name: str) -> DTensor:
        """Return the global tensor of which a local tensor is this client's part; it shares the memory.

        Args:
            part: The local tensor; a DTensor if the part itself is sharded.
            name: The tensor's name, for errors.

        Raises:
            ComponentError: The part does not have the size that ``size`` gives it.
            LayoutError: The tensor has no such dim, or the part is sharded on another mesh, or along this axis.
        """
        dim = self._dim_of(part, name)
        plain = Layout(
            [self.mesh.mesh_dim_names[0] if each == dim else UNSHARDED for each in range(part.ndim)], self.mesh
        )
        shape = [*part.shape]
        shape[dim] = shape[dim] * self.mesh.size() if self.size is None else self.size
        sizes = [
            stop - start for start, stop in (plain.shard_bounds(dim, shape[dim], at) for at in range(self.mesh.size()))
        ]
        (device,) = self.mesh.local_device_ids()
        (at,) = self.mesh.coordinate(device)
        if part.shape[dim] != sizes[at]:
            raise ComponentError(
                f"tensor {name!r}: got {part.shape[dim]} along dim {dim} on the client with part {at}, expected "
                f"{sizes[at]}: parts of {self.size} have the sizes {capped(sizes)}, as of torch.chunk; divide the "
                "tensor so, or give each part a name"
            )
        layout, memory = plain, part.detach()
        if isinstance(part, DTensor):
            layout, memory = self._around(part.layout, dim, name), part.to_local().detach()
        elif torch_interop.is_torch_dtensor(part):
            inner, local = torch_interop.layout_and_local(part)
            assert local is not None  # noqa: S101  (its mesh has this client: see `_around`)
            layout, memory = self._around(inner, dim, name), local
        return DTensor((memory,), layout, shape, part.dtype)

    def shape_of_part(self, shape: tuple[int, ...], parameter: torch.Tensor, name: str) -> tuple[int, ...] | None:
        """Return the shape of this client's part of a stored tensor of a marked parameter's state.

        Args:
            shape: The stored shape.
            parameter: The parameter.
            name: The tensor's name, for errors.

        Returns:
            The shape; None if the tensor is whole on every client, as a count of steps.
        """
        dim = self._dim_of(parameter, name)
        if len(shape) != parameter.ndim or shape[dim] != self.whole(parameter, name).shape[dim]:
            return None
        return (*shape[:dim], parameter.shape[dim], *shape[dim + 1 :])

    def is_divided(self, value: Any, parameter: torch.Tensor) -> bool:
        """Whether a value of the state of a marked parameter is divided as the parameter: it has the parts' size."""
        if not isinstance(value, torch.Tensor) or value.ndim != parameter.ndim:
            return False
        return value.ndim > 0 and value.shape[self.dim] == parameter.shape[self.dim]

    def _dim_of(self, part: torch.Tensor, name: str) -> int:
        if not -part.ndim <= self.dim < part.ndim:
            raise LayoutError(
                f"tensor {name!r}: Shards got dim {self.dim}, expected one of a tensor of {part.ndim} dims"
            )
        return self.dim % part.ndim

    def _around(self, inner: Layout, dim: int, name: str) -> Layout:
        """Return the layout of the global tensor whose parts are laid out on other axes of the same mesh."""
        on_root, clients = root_layout(inner), tuple(self.mesh.owners.ravel().tolist())
        root = on_root.mesh
        if len(clients) == 1:
            return on_root
        axis = next((axis for axis in root.mesh_dim_names if _line(root, axis) == clients), None)
        if axis is None:
            raise LayoutError(
                f"tensor {name!r} lies on {root}, which has no axis along clients {capped(clients)}, whose parts "
                "Shards puts together; make the meshes of both as slices of one mesh"
            )
        if any(axis in split for split in on_root.split_axes):
            raise LayoutError(f"tensor {name!r} is split along axis {axis!r} already; it needs no Shards along it")
        specs = [
            ((axis, *split) if each == dim else split) or UNSHARDED for each, split in enumerate(on_root.split_axes)
        ]
        return Layout(specs, root)


class Shards:
    """A plain local tensor of a state tree that is this client's part of a global tensor.

    The clients of the mesh or group hold the parts, in its order. `dtckpt.save` writes the global tensor. Restored
    into, the tensor gets its part of the stored tensor, whatever the number of saved parts. A restore without a target
    gives the global tensor, or DTensors.

    Making a `Shards` sends nothing. The clients compare the shapes in the first round of the save.

    Args:
        tensor: This client's part: a plain tensor, or a DTensor of either library if the part itself is sharded, over
            other axes of the same mesh.
        mesh: A process group of PyTorch, or a mesh with one axis, as ``mesh["ep"]``, of PyTorch or ours.
        dim: The dim that the parts divide.
        size: The global size of this dim, where it does not divide evenly; the parts are then cut as by `torch.chunk`.
            Default: all parts are of the same size.

    Raises:
        LayoutTypeError: An argument has a wrong type.
        MeshError: The mesh has several axes, or this client does not have one device in it.

    >>> import dtckpt, torch
    >>> mesh = dtckpt.create_mesh({"ep": 1})
    >>> state = {"experts": dtckpt.Shards(torch.ones(2, 3, 4), mesh)}
    """

    __slots__ = ("shard_mark", "tensor")

    def __init__(self, tensor: torch.Tensor, mesh: Any, dim: int = 0, *, size: int | None = None) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise LayoutTypeError(f"Shards: got {type(tensor).__name__}, expected a tensor")
        self.tensor, self.shard_mark = tensor, ShardMark.of(mesh, dim, size)

    @classmethod
    def of(cls, tensor: torch.Tensor, mark: ShardMark) -> Shards:
        """Return a tensor as the part that a mark says."""
        shards = cls.__new__(cls)
        shards.tensor, shards.shard_mark = tensor, mark
        return shards

    def __repr__(self) -> str:
        size = "" if self.shard_mark.size is None else f", size={self.shard_mark.size}"
        return f"Shards({self.tensor!r}, {self.shard_mark.mesh!r}, {self.shard_mark.dim}{size})"

    def assign(self, tensor: torch.Tensor) -> Shards:
        """Replace the tensor; return the object."""
        self.tensor = tensor
        return self

    def whole(self, name: str) -> DTensor:
        """Return the global tensor, as `ShardMark.whole`."""
        return self.shard_mark.whole(self.tensor, name)

    @staticmethod
    def mark(module: nn.Module, pattern: str, mesh: Any, dim: int = 0, *, size: int | None = None) -> None:
        """Mark parameters and buffers of a module as parts of global tensors, also their state in optimizers.

        From then on the module and its optimizers are saved and restored so, also within wrappers, and wherever they
        stand in a tree. The module itself does not change; a copy of it is not marked.

        Args:
            module: The module.
            pattern: A glob over the names of its parameters and buffers.
            mesh: As for `Shards`.
            dim: As for `Shards`.
            size: As for `Shards`.

        Raises:
            ConfigError: No parameter or buffer has such a name.
            MeshError: As for `Shards`.
        """
        mark = ShardMark.of(mesh, dim, size)
        names = [name for name, _ in named_tensors(module)]
        if not any(_matches(name, pattern) for name in names):
            raise ConfigError(
                f"Shards.mark: no parameter or buffer of {type(module).__name__} matches {pattern!r}; got "
                f"{capped(map(repr, names))}"
            )
        _rules.setdefault(module, []).append((pattern, mark))


_rules: WeakKeyDictionary[nn.Module, list[tuple[str, ShardMark]]] = WeakKeyDictionary()
"""By module, the patterns that `Shards.mark` was given, and the marks."""


def shard_marks() -> dict[int, ShardMark]:
    """Return the marks of all parameters and buffers that `Shards.mark` has marked, by the id of the tensor.

    The names are matched anew at each call: FSDP2 and others replace the parameters of a module.
    """
    found: dict[int, ShardMark] = {}
    for module, rules in _rules.items():
        for name, tensor in named_tensors(module):
            mark = next((mark for pattern, mark in rules if _matches(name, pattern)), None)
            if mark is not None:
                found[id(tensor)] = mark
    return found


def mark_of(tensor: torch.Tensor) -> ShardMark | None:
    """Return the mark of a parameter or buffer; None if it is not marked."""
    return shard_marks().get(id(tensor))


def marks_in_state(owner: Any, state: Any, marks: Mapping[int, ShardMark]) -> dict[int, ShardMark]:
    """Return the marks of the tensors in the state of a module or an optimizer, by the id of the tensor.

    Args:
        owner: The module or optimizer; nothing in the state of any other object is marked.
        state: The result of its ``state_dict()``.
        marks: The `shard_marks`.
    """
    return {id(items[key]): mark for items, key, mark in _marked_items(owner, state, marks)}


def sharded_state(owner: Any, state: Any, marks: Mapping[int, ShardMark]) -> Any:
    """Return the state of an object, with `Shards` in place of the marked tensors. Arguments: as `marks_in_state`."""
    marked = list(_marked_items(owner, state, marks))
    if not marked:
        return state
    # Copies of the containers, not of the tensors: the caller's containers may belong to the object itself.
    if isinstance(owner, nn.Module):
        state = copy.copy(state)
        state |= {key: Shards.of(items[key], mark) for items, key, mark in marked}
        return state
    by_id = {id(items[key]): mark for items, key, mark in marked}
    of_parameters = {
        number: {key: Shards.of(value, by_id[id(value)]) if id(value) in by_id else value for key, value in own.items()}
        for number, own in state["state"].items()
    }
    return {**state, "state": of_parameters}


def _marked_items(
    owner: Any, state: Any, marks: Mapping[int, ShardMark]
) -> Iterator[tuple[Mapping[Any, Any], Any, ShardMark]]:
    """Yield each marked tensor of an object's state: the dict that holds it, its key there, and the mark."""
    if not marks or not isinstance(owner, nn.Module | Optimizer) or not isinstance(state, Mapping):
        return
    if isinstance(owner, nn.Module):
        for name, tensor in named_tensors(owner):
            if id(tensor) in marks and isinstance(state.get(name), torch.Tensor):
                yield state, name, marks[id(tensor)]
        return
    parameters = [parameter for group in owner.param_groups for parameter in group["params"]]
    keys = [key for group in state.get("param_groups", ()) for key in group["params"]]
    for key, parameter in zip(keys, parameters, strict=False):
        own, mark = state["state"].get(key), marks.get(id(parameter))
        if mark is not None and isinstance(own, Mapping):
            yield from ((own, part, mark) for part, value in own.items() if mark.is_divided(value, parameter))


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the parameters and buffers of a module by name; tied ones under all of their names."""
    return chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))


@lru_cache(maxsize=1 << 16)
def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(unwrapped(name), pattern)


def _mesh_of(value: Any) -> Mesh:
    if isinstance(value, Mesh):
        return value
    if isinstance(value, dist.ProcessGroup):
        # Of the kind of mesh nothing depends: where the elements lie, the tensors tell.
        return mesh_of_ranks("cpu", np.array(dist.get_process_group_ranks(value)), ("shards",))
    if value is dist.GroupMember.NON_GROUP_MEMBER:
        raise MeshError("Shards: this client is not in the group; only its members hold parts")
    return device_mesh.mesh_of(value)


def _line(mesh: Mesh, axis: str) -> tuple[int, ...]:
    """Return the clients along an axis of a mesh, in its order, in the line of this client."""
    at: list[Any] = [*mesh.coordinate(mesh.local_device_ids()[0])]
    at[mesh.axis_index(axis)] = slice(None)
    return tuple(mesh.owners[tuple(at)].tolist())
