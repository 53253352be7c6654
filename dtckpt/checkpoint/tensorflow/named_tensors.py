"""`sharded_save`, `name_based_save`, `name_based_restore`: save and restore flat sets of named tensors.

``tf.experimental.dtensor`` has these checkpoint calls under the same names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from dtckpt.checkpoint.leaves import as_leaf
from dtckpt.checkpoint.options import RestoreOptions, SaveOptions
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.restoring.new_tensors import empty_dtensor
from dtckpt.checkpoint.restoring.plan import RestorePlan, new_names
from dtckpt.checkpoint.restoring.restore import run_restore
from dtckpt.checkpoint.saving.save import save_state
from dtckpt.checkpoint.saving.state import State, state_of_tensors
from dtckpt.coordination.connect import current_coordination
from dtckpt.dtensor import DTensor
from dtckpt.errors import LayoutTypeError, MeshError, MeshTypeError, TensorNameError, TensorNotFoundError, capped
from dtckpt.layout.mesh import Mesh
from dtckpt.storage.location import Location


def sharded_save(
    mesh: Mesh,
    file_prefix: str | Location,
    tensor_names: Sequence[str],
    shape_and_slices: Sequence[str],
    tensors: Sequence[torch.Tensor],
    *,
    options: SaveOptions | None = None,
) -> None:
    """Save named tensors on a mesh as the checkpoint ``file_prefix``.

    Collective: Over the mesh's clients; barriers and errors as for `dtckpt.save`.

    Args:
        mesh: The mesh that the DTensors are on.
        file_prefix: Directory of the checkpoint.
        tensor_names: One name per tensor. A name may occur several times with slices that do not overlap.
        shape_and_slices: One string per tensor: ``""`` for a whole tensor; for a slice of a larger tensor, the larger
            shape and the slice's position, as in ``"4 5 0,2:-"`` (see `dtckpt.layout.text_format`). Elements that no
            slice covers cannot be read back.
        tensors: DTensors on ``mesh``, or plain tensors (a copy on every client).
        options: See `SaveOptions`.

    Raises:
        TensorNameError: The numbers of names, slices and tensors differ, or a name cannot be stored.
        SliceError: A slice string is malformed or does not fit, or slices overlap.
        MeshError: A tensor is on another mesh.
    """
    _validate_mesh(mesh)
    options = replace(options or SaveOptions(), keys="same")

    def collect() -> State:
        if not len(tensor_names) == len(shape_and_slices) == len(tensors):
            raise TensorNameError(
                f"sharded_save needs one slice string and one tensor per name; got {len(tensor_names)} names, "
                f"{len(shape_and_slices)} slice strings, {len(tensors)} tensors"
            )
        if not tensor_names:
            raise TensorNameError("there is nothing to save; got no tensor names")
        for name, tensor in zip(tensor_names, tensors, strict=True):
            _validate_tensor(name, tensor, mesh)
        entries = list(zip(tensor_names, tensors, shape_and_slices, strict=True))
        return state_of_tensors(entries, options, clients=mesh.clients)

    save_state(file_prefix, collect, options=options, participants=mesh.clients)


def name_based_save(
    mesh: Mesh,
    checkpoint_prefix: str | Location,
    name_tensor_dict: Mapping[str, torch.Tensor],
    *,
    options: SaveOptions | None = None,
) -> None:
    """Save a dict of named tensors whole. Collective and errors: as `sharded_save`."""
    names = list(name_tensor_dict)
    sharded_save(mesh, checkpoint_prefix, names, [""] * len(names), list(name_tensor_dict.values()), options=options)


def name_based_restore(
    mesh: Mesh,
    checkpoint_prefix: str | Location,
    name_tensor_dict: Mapping[str, DTensor],
    *,
    options: RestoreOptions | None = None,
) -> OrderedDict[str, DTensor]:
    """Restore named tensors as new ones, each with the shape, dtype and layout of its template.

    Templates are not changed. Tensors of the checkpoint that have no template are passed over.

    Collective: Over the mesh's clients; barriers and errors as for `dtckpt.restore`.

    Args:
        mesh: The mesh that the templates are on.
        checkpoint_prefix: The checkpoint.
        name_tensor_dict: The templates by name.
        options: See `RestoreOptions`.

    Returns:
        The new tensors by name, in the order of the templates.

    Raises:
        TensorNameError: There are no templates.
        LayoutTypeError: A template is no DTensor.
        MeshError: A template is on another mesh.
    """
    _validate_mesh(mesh)

    def plan(checkpoint: Checkpoint) -> RestorePlan:
        if not name_tensor_dict:
            raise TensorNameError("there is nothing to restore; got no templates")
        restored: OrderedDict[str, DTensor] = OrderedDict()
        for name, template in name_tensor_dict.items():
            if not isinstance(template, DTensor):
                raise LayoutTypeError(f"template {name!r} must be a DTensor; got {type(template).__name__}")
            _validate_tensor(name, template, mesh)
            restored[name] = empty_dtensor(tuple(template.shape), template.dtype, template.layout)
        names = new_names(checkpoint, options or RestoreOptions())
        sources = {names.get(name, name): name for name in checkpoint.tensors}
        if missing := [name for name in restored if name not in sources]:
            raise TensorNotFoundError(
                f"checkpoint {checkpoint.path} has no tensor {missing[0]!r}; it has {capped(map(repr, sources))}",
                name=missing[0],
            )
        leaves = [(sources[name], as_leaf(tensor, name)) for name, tensor in restored.items()]
        return RestorePlan(leaves, lambda: restored, names)

    restored: OrderedDict[str, DTensor] = run_restore(
        checkpoint_prefix, plan, options or RestoreOptions(), current_coordination(), mesh.clients
    )
    return restored


def _validate_mesh(mesh: object) -> None:
    if not isinstance(mesh, Mesh):
        raise MeshTypeError(f"the first argument must be a Mesh; got {type(mesh).__name__}")


def _validate_tensor(name: str, tensor: object, mesh: Mesh) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise LayoutTypeError(f"tensor {name!r} must be a tensor; got {type(tensor).__name__}")
    layout = as_leaf(tensor, name).layout
    if layout is not None and layout.mesh != mesh:
        raise MeshError(
            f"tensor {name!r} is on another mesh; got {layout.mesh.to_string()}, expected {mesh.to_string()}"
        )
