"""Styles that split or replicate a module's parameters: `ColwiseParallel`, `RowwiseParallel`, `SequenceParallel`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from dtckpt.comm.torch_private import tree_map_only
from dtckpt.dtensor.distribute import distribute_module
from dtckpt.dtensor.parallel.values import as_output, distribute_parameter, place, require_one_axis, to_dtensor
from dtckpt.dtensor.tensor import DTensor
from dtckpt.errors import ParallelPlanError, UnsupportedModuleError
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.placement import Placement, Replicate, Shard, placement_of


class ParallelStyle(ABC):
    """How to parallelize a module. `parallelize_module` calls `_apply`; each subclass is another style.

    Attributes:
        src_data_rank: The argument of `parallelize_module`, which sets it before it calls `_apply`.
    """

    src_data_rank: int | None = 0

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: Mesh) -> nn.Module:
        """Parallelize the module in place, and return it. Collective: Over the mesh's clients."""


class _SplitParameters(ParallelStyle):
    """Base of the styles that split the parameters of a linear layer or an embedding.

    Args:
        input_layouts: Placement of the input, if it is a plain tensor.
        output_layouts: Placement of the output.
        use_local_output: Return this client's component of the output, not a DTensor.
    """

    _parameters: ClassVar[Mapping[type[nn.Module], Mapping[str, Placement]]]
    """Placements of the parameters, by class of module."""
    _inputs: ClassVar[Mapping[type[nn.Module], Placement]]
    """The new placement of the input, by class of module."""

    def __init__(self, input_layouts: Placement, output_layouts: Placement, use_local_output: bool) -> None:
        self.input_layouts = (placement_of(input_layouts),)
        self.output_layouts = (placement_of(output_layouts),)
        self.use_local_output = use_local_output

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(input_layouts={self.input_layouts}, output_layouts={self.output_layouts}, "
            f"use_local_output={self.use_local_output})"
        )

    def _apply(self, module: nn.Module, device_mesh: Mesh) -> nn.Module:
        require_one_axis(self, device_mesh)
        kind = next((kind for kind in self._parameters if isinstance(module, kind)), None)
        if kind is None:
            raise UnsupportedModuleError(
                f"{type(self).__name__}: got {type(module).__name__}, expected Linear or Embedding; for other modules, "
                "parallelize the modules inside it, or write a ParallelStyle"
            )
        parameters, desired = self._parameters[kind], self._inputs[kind]

        def partition(_: str, submodule: nn.Module, mesh: Mesh) -> None:
            for parameter, placement in parameters.items() if submodule is module else ():
                distribute_parameter(submodule, parameter, mesh, placement, self.src_data_rank)

        def prepare_input(module: nn.Module, inputs: tuple[Any, ...], mesh: Mesh) -> tuple[Any, ...]:
            first, *others = _require_input(self, module, inputs)
            # A linear layer knows the global size of its input's last dim.
            last = module.in_features if isinstance(module, nn.Linear) else None
            value = to_dtensor(first, mesh, self.input_layouts[0], f"{type(self).__name__}: input", last_size=last)
            return place(value, desired), *others

        def prepare_output(_: nn.Module, output: DTensor, __: Mesh) -> Any:
            return as_output(place(output, self.output_layouts[0]), self.use_local_output)

        return distribute_module(module, device_mesh, partition, prepare_input, prepare_output)


class ColwiseParallel(_SplitParameters):
    """Split the output features of a linear layer or an embedding over the axis; each device computes its part.

    The product of `ColwiseParallel` is the input of `RowwiseParallel`, so two layers need one reduction.

    Args:
        input_layouts: Placement of the input, if it is a plain tensor; default ``Replicate()``.
        output_layouts: Placement of the output; default ``Shard(-1)``, where nothing moves.
        use_local_output: Return this client's component of the output, not a DTensor.
    """

    _parameters: ClassVar = {nn.Linear: {"weight": Shard(0), "bias": Shard(0)}, nn.Embedding: {"weight": Shard(1)}}
    _inputs: ClassVar = {nn.Linear: Replicate(), nn.Embedding: Replicate()}

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts or Replicate(), output_layouts or Shard(-1), use_local_output)


class RowwiseParallel(_SplitParameters):
    """Split a linear layer's input features, or an embedding's rows, over the axis; outputs of all devices are summed.

    Args:
        input_layouts: Placement of the input, if it is a plain tensor; default ``Shard(-1)``, where nothing moves for
            a linear layer. For an embedding pass ``Replicate()``, if every client has all indices.
        output_layouts: Placement of the output; default ``Replicate()``, by an all-reduce. A `Shard` takes a
            reduce-scatter.
        use_local_output: Return this client's component of the output, not a DTensor.
    """

    _parameters: ClassVar = {nn.Linear: {"weight": Shard(1), "bias": Replicate()}, nn.Embedding: {"weight": Shard(0)}}
    _inputs: ClassVar = {nn.Linear: Shard(-1), nn.Embedding: Replicate()}

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts or Shard(-1), output_layouts or Replicate(), use_local_output)


class SequenceParallel(ParallelStyle):
    """Replicate a module's parameters, and run it on an input that is split along its sequence dim.

    For modules that treat all positions of a sequence in the same way: norms, dropout, activations.

    Args:
        sequence_dim: The dim of the input and of the output that is split over the axis.
        use_local_output: Return this client's component of the output, not a DTensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_sharding = (Shard(sequence_dim),)
        self.use_local_output = use_local_output

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(sequence_dim={self.sequence_sharding[0].dim}, "
            f"use_local_output={self.use_local_output})"
        )

    def _apply(self, module: nn.Module, device_mesh: Mesh) -> nn.Module:
        require_one_axis(self, device_mesh)
        (split,) = self.sequence_sharding

        def partition(_: str, submodule: nn.Module, mesh: Mesh) -> None:
            for parameter in list(submodule._parameters):
                distribute_parameter(submodule, parameter, mesh, Replicate(), self.src_data_rank)

        def prepare_input(module: nn.Module, inputs: tuple[Any, ...], mesh: Mesh) -> tuple[Any, ...]:
            first, *others = _require_input(self, module, inputs)
            return place(to_dtensor(first, mesh, split, f"{type(self).__name__}: input"), split), *others

        def prepare_output(_: nn.Module, outputs: Any, __: Mesh) -> Any:
            return tree_map_only(DTensor, lambda one: as_output(place(one, split), self.use_local_output), outputs)

        return distribute_module(module, device_mesh, partition, prepare_input, prepare_output)


def _require_input(style: ParallelStyle, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    if not inputs:
        raise ParallelPlanError(
            f"{type(style).__name__}: {type(module).__name__} was called without positional arguments, expected the "
            "input as the first one; pass it by position"
        )
    return inputs
