"""`DVariable`: a variable as in TensorFlow, a DTensor of fixed layout, shape and dtype whose value is assigned."""

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
    """A DTensor that owns its memory, and to which values are assigned. Otherwise it is a tensor like any other.

    A trainable variable counts as ``nn.Parameter``, and has gradients if its dtype can have any.

    Args:
        initial_value: A DTensor; or a tensor, array or numbers, equal on every client; or a function without arguments
            that returns one of these.
        layout: The layout; may be left out if the value is a DTensor, which has it.
        dtype: The dtype of numbers; tensors and arrays have it already.
        name: The name of the variable in errors.
        trainable: Whether gradients are wanted.

    Raises:
        LayoutError: There is no layout, or it differs from the DTensor's, or it has pending reductions.
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
            value = _as_tensor(value, dtype)
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
        variable = cast(
            "DVariable",
            DTensor.__new__(cls, components, value.layout, value.shape, value.dtype, device=value.device),
        )
        variable._name, variable.trainable = name, trainable
        variable._save_as_bf16, variable._is_param = False, trainable
        variable.requires_grad_(trainable and (value.dtype.is_floating_point or value.dtype.is_complex))
        return variable

    @property
    def name(self) -> str:
        """The name of the variable in errors."""
        return self._name

    @property
    def save_as_bf16(self) -> bool:
        """Whether checkpoints store the value as bfloat16; always False unless the dtype is float32."""
        return self._save_as_bf16

    @save_as_bf16.setter
    def save_as_bf16(self, value: bool) -> None:
        self._save_as_bf16 = bool(value) and self.dtype == torch.float32

    def read_value(self) -> DTensor:
        """Return a copy of the value, which later assignments do not change. Differentiable."""
        return cast("DTensor", self.clone())

    def value(self) -> DTensor:
        """Return `read_value`."""
        return self.read_value()

    def numpy(self, *, force: bool = False) -> npt.NDArray[Any]:
        """Return the value as an array, if a device of this client holds it whole.

        Raises:
            LayoutError: The devices hold parts of it.
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
            value: A value of the variable's shape. A tensor or a DTensor, in any layout on any mesh, must have the
                variable's dtype; an array or numbers are converted. Values that are no DTensors must be equal on every
                client.

        Raises:
            ComponentError: The shape or the dtype differs from the variable's.
        """
        return self._write(torch.Tensor.copy_, value)

    def assign_add(self, delta: Any) -> DVariable:
        """Add to the value; arguments, errors and result as for `assign`."""
        return self._write(torch.Tensor.add_, delta)

    def assign_sub(self, delta: Any) -> DVariable:
        """Subtract from the value; arguments, errors and result as for `assign`."""
        return self._write(torch.Tensor.sub_, delta)

    def _write(self, operation: Any, value: Any) -> DVariable:
        source = value if isinstance(value, DTensor) else _as_tensor(value, self.dtype)
        if source.shape != self.shape or source.dtype != self.dtype:
            raise ComponentError(
                f"DVariable {self.name!r}: got a value of shape {tuple(source.shape)} and {source.dtype}, "
                f"expected shape {tuple(self.shape)} and {self.dtype}"
            )
        with torch.no_grad():
            operation(self, relayout(source.detach(), self.layout))
        return self


def enable_save_as_bf16(variables: Iterable[Any]) -> None:
    """Have checkpoints store the float32 variables among some values as bfloat16; all other values are ignored."""
    for variable in variables:
        if isinstance(variable, DVariable):
            variable.save_as_bf16 = True


def _as_tensor(value: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a tensor as it is, and any other value as a tensor of ``dtype``, by default the value's own."""
    if isinstance(value, torch.Tensor):
        return value
    try:
        return torch.as_tensor(value, dtype=dtype, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise LayoutTypeError(f"DVariable: got {type(value).__name__} that is no value ({error})") from error
