"""`MetaTensors`: memory for a target's tensors on the meta device, which have a shape but no elements.

A restore allocates their memory, and fills it. When all is filled, the tensors of modules get that memory and stay the
same Python objects, so optimizers keep their parameters, and tied tensors stay tied. In a dict, new tensors
take their place.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from dtckpt.checkpoint.leaves import new_memory
from dtckpt.checkpoint.parameter_names import parameters_of
from dtckpt.checkpoint.restoring.new_tensors import empty_beside, layout_of_tensor
from dtckpt.checkpoint.restoring.target import ObjectSlot, is_meta
from dtckpt.checkpoint.shards import named_tensors
from dtckpt.errors import DTypeError, capped


class MetaTensors:
    """The memory that a restore allocates for tensors on the meta device."""

    def __init__(self) -> None:
        # By id, with the tensor itself, so that no other one gets its id.
        self._memory: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._in_modules: list[torch.Tensor] = []
        self._parameters: list[tuple[str, torch.Tensor]] = []

    def memory_of(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return a tensor itself, or new memory in its layout if it is on the meta device.

        Plain tensors are allocated on the host, DTensors on the devices of their mesh.
        """
        if not is_meta(tensor):
            return tensor
        if id(tensor) not in self._memory:
            shape, layout = tuple(tensor.shape), layout_of_tensor(tensor)
            new = (
                new_memory(name, shape, tensor.dtype)
                if layout is None
                else empty_beside(tensor, shape, tensor.dtype, layout)
            )
            self._memory[id(tensor)] = tensor, new
        return self._memory[id(tensor)][1]

    def note_object(self, slot: ObjectSlot, path: str) -> None:
        """Note the tensors of a module and the parameters of an optimizer that are on the meta device.

        Args:
            slot: An object of the target whose state was planned.
            path: Its path, for errors.

        Raises:
            DTypeError: A tensor of a module cannot get memory: it is not a part of the module's state, or something
                holds it by a weak reference.
        """
        self._parameters.extend((path, parameter) for parameter in parameters_of(slot.value) if is_meta(parameter))
        if not isinstance(slot.value, nn.Module):
            return
        meta = {name: tensor for name, tensor in named_tensors(slot.value) if is_meta(tensor)}
        if not meta:
            return
        in_state = {id(tensor) for tensor in slot.state.value.values()}
        unsaved = [name for name, tensor in meta.items() if id(tensor) not in in_state]
        if unsaved:
            raise DTypeError(
                f"module at {path!r}: {capped(map(repr, unsaved))} on the meta device and not in the module's state, "
                "so the checkpoint does not have it; compute it on its device before the restore"
            )
        held = [name for name, tensor in meta.items() if weakref.getweakrefcount(tensor)]
        if held:
            raise DTypeError(
                f"module at {path!r}: {capped(map(repr, held))} on the meta device with a weak reference to it, so it "
                "cannot get memory; call to_empty(device=…) on the module before the restore"
            )
        self._in_modules.extend(tensor for tensor in meta.values() if id(tensor) in self._memory)

    def validate_parameters(self) -> None:
        """Check that the parameters of optimizers get memory, once the whole target is planned.

        Raises:
            DTypeError: A parameter gets no memory; the optimizer would move its state to the meta device, too.
        """
        given = {id(tensor) for tensor in self._in_modules}
        for path, parameter in self._parameters:
            if id(parameter) not in given:
                raise DTypeError(
                    f"optimizer at {path!r}: a parameter of shape {tuple(parameter.shape)} is on the meta device; "
                    "restore its module together with the optimizer, or before"
                )

    def give_memory(self) -> None:
        """Let the tensors of modules have the memory that was allocated for them."""
        for tensor in {id(tensor): tensor for tensor in self._in_modules}.values():
            _give_memory(tensor, self._memory[id(tensor)][1])


def _give_memory(tensor: torch.Tensor, memory: torch.Tensor) -> None:
    """Give a parameter or buffer memory; it stays the same object, of the same class, with the same attributes."""
    new = nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory.detach()
    if type(new) is not type(tensor):
        new.__class__ = type(tensor)
    new.__dict__.update({name: value for name, value in tensor.__dict__.items() if name not in new.__dict__})
    torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call]  # torch leaves it untyped
