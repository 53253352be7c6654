"""Describe the state that a save writes: its tensors for the plan, and this client's elements for the writer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from dtckpt.checkpoint.gc_pause import gc_paused
from dtckpt.checkpoint.leaves import as_leaf, host_array, is_elsewhere, is_stateful, is_tensor, validate_mode
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.parameter_names import ParameterNames, named_state
from dtckpt.checkpoint.per_client import ClientNumber, PerClient
from dtckpt.checkpoint.rng_state import RngState
from dtckpt.checkpoint.saving.plan import KEPT_STRUCTURES, Holding, TensorPlan, TensorSpec, copies_of, holdings_of
from dtckpt.checkpoint.saving.replica_check import Replica
from dtckpt.checkpoint.saving.replica_rules import ReplicaRules, Role, Roles
from dtckpt.checkpoint.saving.reuse import NO_REUSE, Reuse
from dtckpt.checkpoint.saving.stored_dtypes import Casts, StoredDtypes
from dtckpt.checkpoint.saving.write import Source
from dtckpt.checkpoint.shards import Shards, shard_marks, sharded_state
from dtckpt.dtensor.torch_interop import KeptLayouts
from dtckpt.errors import SliceError
from dtckpt.format import tree as trees
from dtckpt.format.codecs import NO_CODEC
from dtckpt.format.containers import ClientValues
from dtckpt.format.tree_union import value_paths
from dtckpt.layout.layout import Layout
from dtckpt.layout.region import Region
from dtckpt.layout.root_layout import root_layout
from dtckpt.layout.text_format import parse_slice_spec


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """One client's description of the state that a save writes.

    Args:
        specs: The tensors that this client passes, each as it would be if all clients passed it.
        source: Where this client's elements come from.
        tree: Structure of the state tree and its plain values, as JSON.
        values: The paths of the plain values.
        contents: Returns, once all is written, content digests by name that the stored tensors must have.
        reuse: The chunks that the save's base has already.
    """

    specs: tuple[TensorSpec, ...]
    source: Source
    tree: bytes = b""
    values: tuple[str, ...] = ()
    contents: Callable[[], Mapping[str, int]] = dict
    reuse: Reuse = NO_REUSE


def state_of_tree(
    tree: Any,
    options: SaveOptions,
    client: int,
    clients: Sequence[int],
    *,
    casts: Casts | None = None,
    kept_by: ClientNumber | None = None,
) -> State:
    """Describe a state tree for a save over some clients.

    Args:
        tree: The tree.
        options: See `SaveOptions`.
        client: This client.
        clients: The clients that save.
        casts: The dtypes that tensors are converted to as they are copied; default: their own.
        kept_by: The place of the client to which values go back that it keeps, whatever the number of clients: see
            ``on_resize="keep"`` of `dtckpt.PerClient`. Default: its place among ``clients``.
    """
    leaves, structure, roles = flatten_state(tree, ClientNumber.among(client, clients), kept_by)
    entries = [(name, value, "") for name, value in leaves.items()]
    return state_of_tensors(
        entries, options, clients=clients, structure=structure, roles=roles, with_root_meshes=True, casts=casts
    )


def flatten_state(
    tree: Any, client: ClientNumber, kept_by: ClientNumber | None = None
) -> tuple[dict[str, Any], trees.Node, dict[str, Role]]:
    """Return the tensors of a state tree by name, its structure, and the roles of the tensors by name."""
    states = ObjectStates(client, kept_by)
    leaves, structure = trees.flatten(tree, is_tensor, states)
    return leaves, structure, {name: states.roles.of(leaf) for name, leaf in leaves.items()}


def state_of_tensors(
    entries: Sequence[tuple[str, torch.Tensor | np.ndarray[Any, Any] | Shards, str]],
    options: SaveOptions,
    *,
    clients: Sequence[int],
    structure: trees.Node | None = None,
    roles: Mapping[str, Role] = MappingProxyType({}),
    with_root_meshes: bool = False,
    casts: Casts | None = None,
) -> State:
    """Describe named tensors for a save.

    Args:
        entries: ``(name, tensor or array of numpy, slice string)``; the slice string is empty for a whole tensor.
        options: See `SaveOptions`.
        clients: The clients that hold a copy of the plain tensors.
        structure: Structure of the state tree and its plain values.
        roles: The roles of tensors, by name, where they have one.
        with_root_meshes: Whether a tensor on a slice of a mesh is on all slices, and its layout that on the root mesh.
        casts: As for `state_of_tree`.
    """
    validate_mode()
    with gc_paused():
        kept: KeptLayouts = {}
        leaves = [as_leaf(tensor, name, kept) for name, tensor, _ in entries]
        kinds = tuple(
            (
                name,
                leaf.shape,
                leaf.dtype if casts is None else casts.choose(name, leaf.dtype),
                leaf.save_as_bf16,
                root_layout(leaf.layout) if with_root_meshes and leaf.layout is not None else leaf.layout,
                slice_text,
                roles.get(name, Role()),
            )
            for (name, _, slice_text), leaf in zip(entries, leaves, strict=True)
        )
        parts: dict[str, list[tuple[Region, list[torch.Tensor]]]] = {}
        for (name, _, slice_text), leaf in zip(entries, leaves, strict=True):
            boxes = leaf.distinct_parts()
            if slice_text:
                start = parse_slice_spec(slice_text, leaf.shape).region.offset
                boxes = [(region.translate(start), copies) for region, copies in boxes]
            parts.setdefault(name, []).extend(boxes)
        # Only the options that the specs depend on: saves that differ in others then share their specs and their plan.
        spec_options = SaveOptions(
            save_as_bf16=options.save_as_bf16,
            stored_dtypes=options.stored_dtypes,
            codec=options.codec,
            check_replicas=options.replica_rules,
        )
        specs = _specs(kinds, spec_options, tuple(clients))
        tree, values = (b"", ()) if structure is None else (trees.dump(structure), tuple(value_paths(structure)))
    return State(specs, MemorySource(parts), tree, values)


_Described = tuple[str, tuple[int, ...], str, bool, Layout | None, str, Role]
"""A tensor to be saved: name, shape, dtype, whether it asks for bfloat16, layout, slice string, role."""


@lru_cache(maxsize=KEPT_STRUCTURES)
def _specs(tensors: tuple[_Described, ...], options: SaveOptions, clients: tuple[int, ...]) -> tuple[TensorSpec, ...]:
    """Return the specs of the tensors: the same objects each time for one structure, so `kept_plan` finds its plan."""
    specs: list[TensorSpec] = []
    rules, replica_rules, codec = StoredDtypes(options), ReplicaRules(options), options.codec or NO_CODEC
    for name, shape, dtype, save_as_bf16, layout, slice_text, role in tensors:
        in_whole = parse_slice_spec(slice_text, shape)
        stored = rules.choose(name, dtype, save_as_bf16=save_as_bf16)
        holdings = copies_of(clients, shape) if layout is None else holdings_of(layout, shape)
        if slice_text:
            holdings = tuple(Holding(item.region.translate(in_whole.region.offset), item.clients) for item in holdings)
        # A layout says nothing of a larger tensor of which this tensor is a slice.
        kept = layout if in_whole.full_shape == shape else None
        copies = replica_rules.choose(name, role)
        facts = name, in_whole.full_shape, dtype, stored, holdings, kept
        specs.append(TensorSpec(*facts, codec=codec, copies=copies, is_parameter=role.is_parameter))
    return tuple(specs)


class MemorySource:
    """Elements from tensors in this client's memory.

    Args:
        parts: By tensor name, the boxes that this client holds, and the local copies of each.
        noted: By tensor name and box, all copies of the boxes whose copies were digested and not staged as a whole.
    """

    max_pending_nbytes = None

    def __init__(
        self,
        parts: Mapping[str, Sequence[tuple[Region, list[torch.Tensor]]]],
        noted: Mapping[tuple[str, Region], Sequence[Replica]] | None = None,
    ) -> None:
        self._parts = parts
        self._noted = noted or {}
        self._host: dict[int, np.ndarray[Any, Any]] = {}

    def synchronize(self) -> None:
        """Wait for the work of the current streams on GPUs: other threads read the tensors on other streams."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch leaves it untyped
            for device in {tensor.device for tensor in self.tensors if tensor.is_cuda}:
                torch.cuda.current_stream(device).synchronize()

    @property
    def is_elsewhere(self) -> bool:
        """Whether some elements are not in host memory."""
        return any(map(is_elsewhere, self.tensors))

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """The memory of all boxes, with all local copies."""
        return (copy for boxes in self._parts.values() for _, copies in boxes for copy in copies)

    def parts(self, name: str) -> Sequence[tuple[Region, list[torch.Tensor]]]:
        """Return the boxes of a tensor and the local copies of each."""
        return self._parts.get(name, ())

    def expect(self, regions: Iterator[tuple[TensorPlan, Region]]) -> None:
        """Nothing to prepare: the elements are in memory."""

    def fetch(self, plan: TensorPlan, region: Region) -> np.ndarray[Any, Any]:
        """Return a view of the elements of a region inside one of the boxes."""
        for box, copies in self.parts(plan.spec.name):
            if box == region:
                return self._host_array(copies[0])
            if box.contains(region):
                return self._host_array(copies[0])[region.relative_to(box).slices()]
        raise SliceError(f"this client does not hold {region} of tensor {plan.spec.name!r}")

    def copies(self, plan: TensorPlan, region: Region) -> Sequence[Replica]:
        """Return all local copies of a box."""
        if (noted := self._noted.get((plan.spec.name, region))) is not None:
            return noted
        tensors = next(copies for box, copies in self.parts(plan.spec.name) if box == region)
        return [Replica(self._host_array(tensor)) for tensor in tensors]

    def _host_array(self, memory: torch.Tensor) -> np.ndarray[Any, Any]:
        # A tensor on a GPU is copied to the host once, not once per chunk.
        if id(memory) not in self._host:
            self._host[id(memory)] = host_array(memory)
        return self._host[id(memory)]


class ObjectStates:
    """Returns the states of the objects in one tree, for `dtckpt.format.tree.flatten`.

    Two kinds of objects come last. Optimizers, as they name their parameters by tensors of the tree. And the states of
    random number generators, as the ``state_dict()`` of another object may draw a number.

    Args:
        client: The client's place among the clients that save.
        kept_by: As for `state_of_tree`.

    Attributes:
        roles: The roles of the tensors in the states that were returned.
    """

    def __init__(self, client: ClientNumber, kept_by: ClientNumber | None = None) -> None:
        self._client, self._kept_by = client, kept_by or client
        self._marks = shard_marks()
        self.roles = Roles()
        self._modules: list[tuple[nn.Module, str]] = []
        self._names: ParameterNames | None = None

    def __call__(self, value: Any, path: str) -> Any:
        """Return the state of an object at a path, and any other value itself."""
        if isinstance(value, PerClient):
            own = self._kept_by if value.on_resize == "keep" else self._client
            return ClientValues({own.number: value.value}, own.num_clients)
        if not is_stateful(value):
            return value
        if isinstance(value, Optimizer):
            return trees.Late(0, lambda leaves: self._noted(value, named_state(value, self._names_of(leaves))))
        if isinstance(value, RngState):
            return trees.Late(1, lambda _: value.state_dict())
        if isinstance(value, nn.Module):
            self._modules.append((value, path))
        return self._noted(value, value.state_dict())

    def _noted(self, owner: Any, state: Any) -> Any:
        """Return an object's state with `Shards` in place of marked tensors, and note the roles of its tensors."""
        state = sharded_state(owner, state, self._marks)
        self.roles.note(owner, state)
        return state

    def _names_of(self, leaves: Mapping[str, Any]) -> ParameterNames:
        # Once: some jobs have an optimizer for each parameter.
        if self._names is None:
            self._names = ParameterNames()
            for module, path in self._modules:
                self._names.add_module(module, path)
            self._names.add_tensors(leaves)
        return self._names
