"""`DVariable`: a DTensor whose layout, shape and dtype stay, and whose value is assigned."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from dtckpt.dtensor.tensor import DTensor, check_layout
from dtckpt.dtensor.tensorflow_names import copy_to_mesh, relayout
from dtckpt.errors import ComponentError, LayoutError, LayoutTypeError
from dtckpt.layout.layout import Layout


class DVariable(DTensor):
    """A DTensor with memory of its own that values are assigned to; everywhere else it is a tensor as any other.

    One that is trainable counts as ``nn.Parameter``, and has gradients if its dtype can.

    Args:
        initial_value: A DTensor; or a tensor, array or numbers, the same on every client; or a function of no
            arguments that returns one of these.
        layout: The layout; may be left out if the value is a DTensor, which has it.
        dtype: The dtype of numbers; tensors and arrays have it already.
        name: What errors call the variable.
        trainable: Whether gradients are wanted.

    Raises:
        LayoutError: There is no layout, another one than the DTensor's, or one with pending reductions.
        ComponentError: The value has another dtype.
    """

    trainable: bool
    _name: str
    _save_as_bf16: bool

    @staticmethod
    def __new__(
        cls,
        initial_value: Any,
        layout: Layout | None = None,
        *,
        dtype: torch.dtype | None = None,
        name: str = "Variable",
        trainable: bool = True,
    ) -> DVariable:
        value = initial_value() if callable(initial_value) else initial_value
        if not isinstance(value, DTensor):
            value = _whole(value, dtype)
            if layout is None:
                raise LayoutError(f"DVariable {name!r}: got no layout, expected one for a value that is no DTensor")
            value = copy_to_mesh(value.detach(), layout)
        elif layout is not None:
            check_layout(value, layout)
        if value.layout.partial:
            raise LayoutError(f"DVariable {name!r}: got pending reductions {value.layout.partial}, expected none")
        if dtype not in (None, value.dtype):
            raise ComponentError(f"DVariable {name!r}: got a value of {value.dtype}, expected {dtype}")
        components = [component.detach().clone() for component in value.components]
        facts = value.layout, value.shape, value.dtype
        made = cast("DVariable", DTensor.__new__(cls, components, *facts, device=value.device))
        made._name, made.trainable, made._save_as_bf16, made._is_param = name, trainable, False, trainable
        made.requires_grad_(trainable and (value.dtype.is_floating_point or value.dtype.is_complex))
        return made

    @property
    def name(self) -> str:
        """What errors call the variable."""
        return self._name

    @property
    def save_as_bf16(self) -> bool:
        """Whether checkpoints hold the value as bfloat16; stays False unless the dtype is float32."""
        return self._save_as_bf16

    @save_as_bf16.setter
    def save_as_bf16(self, is_wanted: bool) -> None:
        self._save_as_bf16 = bool(is_wanted) and self.dtype == torch.float32

    def read_value(self) -> DTensor:
        """Return the value as a DTensor that later assignments leave alone. Differentiable."""
        return cast("DTensor", self.clone())

    def value(self) -> DTensor:
        """Return `read_value`."""
        return self.read_value()

    def numpy(self, *, force: bool = False) -> npt.NDArray[Any]:
        """Return the value as an array, where every device of this client holds it whole.

        Raises:
            LayoutError: They hold parts of it.
        """
        whole = next((part for part in self.components if part.shape == self.shape), None)
        if whole is None:
            raise LayoutError(
                f"DVariable {self.name!r} as array: got a value in parts, {self.placements}, expected a replicated "
                "one; full_tensor() gathers it"
            )
        return np.array(whole.detach().numpy(force=force))

    def assign(self, value: Any) -> DVariable:
        """Set the value; a failure leaves it as it was. Returns the variable.

        Collective: As `redistribute`, for a DTensor in another layout.

        Args:
            value: A DTensor in any layout on any mesh, or a tensor of the variable's dtype; or an array or numbers,
                which are converted. Of the variable's shape; what is no DTensor is the same on every client.

        Raises:
            ComponentError: The shape or the dtype is another one.
        """
        return self._write(torch.Tensor.copy_, value)

    def assign_add(self, delta: Any) -> DVariable:
        """Add to the value; arguments, errors and what is returned as for `assign`."""
        return self._write(torch.Tensor.add_, delta)

    def assign_sub(self, delta: Any) -> DVariable:
        """Subtract from the value; arguments, errors and what is returned as for `assign`."""
        return self._write(torch.Tensor.sub_, delta)

    def _write(self, operation: Any, value: Any) -> DVariable:
        given = value if isinstance(value, DTensor) else _whole(value, self.dtype)
        if given.shape != self.shape or given.dtype != self.dtype:
            raise ComponentError(
                f"DVariable {self.name!r}: got a value of shape {tuple(given.shape)} and {given.dtype}, "
                f"expected shape {tuple(self.shape)} and {self.dtype}"
            )
        with torch.no_grad():
            operation(self, relayout(given.detach(), self.layout))
        return self


def enable_save_as_bf16(variables: Iterable[Any]) -> None:
    """Have checkpoints hold the float32 ones among these variables as bfloat16; whatever else is there is ignored."""
    for variable in variables:
        if isinstance(variable, DVariable):
            variable.save_as_bf16 = True


def _whole(value: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a tensor as it is, and anything else as a tensor of ``dtype``, by default the value's own."""
    if isinstance(value, torch.Tensor):
        return value
    try:
        return torch.as_tensor(value, dtype=dtype, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise LayoutTypeError(f"DVariable: got {type(value).__name__} that is no value ({error})") from error
