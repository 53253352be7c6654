"""Styles that only convert the inputs and outputs of a module: `PrepareModuleInput`, `PrepareModuleOutput`, both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dtckpt.dtensor.parallel.styles import ParallelStyle
from dtckpt.dtensor.parallel.values import as_output, place, require_one_axis, to_dtensor
from dtckpt.errors import ParallelPlanError
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.placement import Placement, placement_of

_Entries = tuple[Placement | None, ...]
Layouts = Placement | _Entries | None
"""Placements of the only value, or of each value; None for a value that is not converted."""


class PrepareModuleInput(ParallelStyle):
    """Convert a module's inputs to DTensors, and bring these to desired placements.

    Args:
        input_layouts: Placements of the positional arguments that are plain tensors; None for an argument that stays
            as it is. None for all means that no positional argument is converted.
        desired_input_layouts: New placements of these arguments; None keeps a placement.
        input_kwarg_layouts: Placements of arguments by name; the others are not converted.
        desired_input_kwarg_layouts: New placements of these, with the same names.
        use_local_output: Pass this client's components on to the module, not DTensors.

    Raises:
        ParallelPlanError: Layouts and desired layouts differ in number or names.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts = _as_tuple(input_layouts)
        self.desired_input_layouts = _as_tuple(desired_input_layouts)
        if self.input_layouts is not None:
            _require_same_length(self, "input_layouts", self.input_layouts, self.desired_input_layouts)
        self.with_kwargs = input_kwarg_layouts is not None
        self.input_kwarg_layouts = _by_name(input_kwarg_layouts)
        self.desired_input_kwarg_layouts = _by_name(desired_input_kwarg_layouts)
        if self.with_kwargs and self.input_kwarg_layouts.keys() != self.desired_input_kwarg_layouts.keys():
            raise ParallelPlanError(
                f"{type(self).__name__}: input_kwarg_layouts and desired_input_kwarg_layouts have other names; got "
                f"{sorted(self.input_kwarg_layouts)} and {sorted(self.desired_input_kwarg_layouts)}, expected the same"
            )
        self.use_local_output = use_local_output

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, "
            f"desired_input_layouts={self.desired_input_layouts}, input_kwarg_layouts={self.input_kwarg_layouts}, "
            f"desired_input_kwarg_layouts={self.desired_input_kwarg_layouts}, "
            f"use_local_output={self.use_local_output})"
        )

    def _apply(self, module: nn.Module, device_mesh: Mesh) -> nn.Module:
        require_one_axis(self, device_mesh)

        def prepare(_: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return self._positional(inputs, device_mesh), self._by_name(kwargs, device_mesh)

        module.register_forward_pre_hook(prepare, with_kwargs=True)
        return module

    def _positional(self, inputs: tuple[Any, ...], mesh: Mesh) -> tuple[Any, ...]:
        if self.input_layouts is None:
            return inputs
        conversions = _conversions(self.input_layouts, self.desired_input_layouts, self.use_local_output)
        return _convert_all(inputs, conversions, mesh, f"{type(self).__name__}: input")

    def _by_name(self, kwargs: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
        converted = dict(kwargs)
        for name in sorted(kwargs.keys() & self.input_kwarg_layouts.keys()):
            layout, desired = self.input_kwarg_layouts[name], self.desired_input_kwarg_layouts[name]
            convert = _Passage(layout, desired, self.use_local_output)
            converted[name] = convert(kwargs[name], mesh, f"{type(self).__name__}: input {name!r}")
        return converted


class PrepareModuleOutput(ParallelStyle):
    """Convert a module's outputs to DTensors, bring these to desired placements, and return them or their components.

    Args:
        output_layouts: Placements of the outputs that are plain tensors; None for an output that stays as it is.
        desired_output_layouts: New placements of these outputs; None keeps a placement.
        use_local_output: Return this client's components, not DTensors.

    Raises:
        ParallelPlanError: Layouts and desired layouts differ in number.
    """

    def __init__(
        self,
        *,
        output_layouts: Placement | _Entries,
        desired_output_layouts: Placement | _Entries,
        use_local_output: bool = True,
    ) -> None:
        self.output_layouts = _as_tuple(output_layouts) or ()
        self.desired_output_layouts = _as_tuple(desired_output_layouts) or ()
        _require_same_length(self, "output_layouts", self.output_layouts, self.desired_output_layouts)
        self.use_local_output = use_local_output

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(output_layouts={self.output_layouts}, "
            f"desired_output_layouts={self.desired_output_layouts}, use_local_output={self.use_local_output})"
        )

    def _apply(self, module: nn.Module, device_mesh: Mesh) -> nn.Module:
        require_one_axis(self, device_mesh)
        module.register_forward_hook(lambda _, __, outputs: self._prepare(outputs, device_mesh))
        return module

    def _prepare(self, outputs: Any, mesh: Mesh) -> Any:
        values = outputs if isinstance(outputs, tuple) else (outputs,)
        conversions = _conversions(self.output_layouts, self.desired_output_layouts, self.use_local_output)
        prepared = _convert_all(values, conversions, mesh, f"{type(self).__name__}: output")
        return prepared if len(prepared) != 1 else prepared[0]


class PrepareModuleInputOutput(ParallelStyle):
    """`PrepareModuleInput` and `PrepareModuleOutput` in one.

    Args:
        input_layouts: As for `PrepareModuleInput`, like the four that follow.
        desired_input_layouts: As there.
        input_kwarg_layouts: As there.
        desired_input_kwarg_layouts: As there.
        use_local_input: As ``use_local_output`` there: pass components on to the module, not DTensors.
        output_layouts: As for `PrepareModuleOutput`, like the two that follow.
        desired_output_layouts: As there.
        use_local_output: As there.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement] | None = None,
        use_local_input: bool = False,
        output_layouts: Placement | _Entries,
        desired_output_layouts: Placement | _Entries,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts,
            desired_output_layouts=desired_output_layouts,
            use_local_output=use_local_output,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.prepare_module_input}, {self.prepare_module_output})"

    def _apply(self, module: nn.Module, device_mesh: Mesh) -> nn.Module:
        self.prepare_module_input._apply(module, device_mesh)
        self.prepare_module_output._apply(module, device_mesh)
        return module


def _as_tuple(layouts: Layouts) -> _Entries | None:
    layouts = placement_of(layouts)
    if layouts is None:
        return None
    return (layouts,) if isinstance(layouts, Placement) else tuple(map(placement_of, layouts))


def _by_name(layouts: Mapping[str, Placement] | None) -> dict[str, Placement]:
    return {name: placement_of(placement) for name, placement in (layouts or {}).items()}


def _require_same_length(style: ParallelStyle, name: str, layouts: _Entries, desired: _Entries | None) -> None:
    if desired is None or len(layouts) != len(desired):
        raise ParallelPlanError(
            f"{type(style).__name__}: {name} and desired_{name} must be of one length; got {layouts} and {desired}"
        )


@dataclass(frozen=True, slots=True)
class _Passage:
    """The conversion of a value that enters or leaves a module.

    Args:
        layout: Its placement, if it is a plain tensor; None leaves the value unchanged.
        desired: Its new placement; None keeps the placement.
        use_local: Whether its component is passed on, not the DTensor.
    """

    layout: Placement | None
    desired: Placement | None
    use_local: bool

    def __call__(self, value: Any, mesh: Mesh, what: str) -> Any:
        """Return the converted value; errors call it ``what``. Collective: As `to_dtensor` and `place`."""
        if self.layout is None:
            return value
        tensor = to_dtensor(value, mesh, self.layout, what)
        return as_output(tensor if self.desired is None else place(tensor, self.desired), self.use_local)


def _conversions(layouts: _Entries | None, desired: _Entries | None, use_local: bool) -> list[_Passage]:
    pairs = zip(layouts or (), desired or (), strict=True)
    return [_Passage(layout, target, use_local) for layout, target in pairs]


def _convert_all(values: tuple[Any, ...], conversions: Sequence[_Passage], mesh: Mesh, what: str) -> tuple[Any, ...]:
    """Return a module's inputs or outputs, converted.

    Raises:
        ParallelPlanError: There are more or fewer of them than conversions.
    """
    if len(values) != len(conversions):
        raise ParallelPlanError(
            f"{what}s: got {len(values)}, expected {len(conversions)}, one for each layout; use None as the layout "
            "of a value that stays as it is"
        )
    return tuple(
        convert(value, mesh, f"{what} {number}")
        for number, (value, convert) in enumerate(zip(values, conversions, strict=True))
    )
