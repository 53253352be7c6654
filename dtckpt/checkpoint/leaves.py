"""`Leaf`: one tensor of a state tree, with the regions that this client holds and the memory that holds them.

DTensors, PyTorch's DTensors, plain tensors and arrays of numpy all become leaves, so saves and restores know no other
kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from dtckpt.checkpoint.shards import Shards
from dtckpt.comm import host_memory
from dtckpt.comm.torch_private import AsyncCollectiveTensor, detect_fake_mode, is_fake
from dtckpt.dtensor import DTensor, DVariable, torch_interop
from dtckpt.errors import CheckpointError, DTypeError, LayoutError
from dtckpt.format.containers import has_parts
from dtckpt.format.dtypes import DTYPES, UNCONVERTED, validate_dtype
from dtckpt.layout import device_mesh
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh
from dtckpt.layout.region import Region


@runtime_checkable
class Stateful(Protocol):
    """An object that returns and loads its state as a tree: a module, an optimizer, a sampler."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state as a tree."""
        ...

    def load_state_dict(self, state_dict: Any) -> object:
        """Load a state tree."""
        ...


class FixedState:
    """Base of objects whose state has a fixed set of parts, as the state of a module has."""


class OpenState:
    """Base of objects whose state has some parts at some times only, and that load it without those, too."""


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One tensor of a state tree.

    Args:
        tensor: The tensor itself.
        shape: Global shape.
        dtype: Dtype name.
        layout: Layout of the tensor; None for a plain tensor, of which every client has a copy.
        regions: The regions that this client's components cover; for a plain tensor one, the whole.
        components: The memory that holds the elements of each region, in the region's shape.
        save_as_bf16: Whether the tensor asks to be stored as bfloat16.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    dtype: str
    layout: Layout | None
    regions: tuple[Region, ...]
    components: tuple[torch.Tensor, ...]
    save_as_bf16: bool = False

    @property
    def parts(self) -> tuple[tuple[Region, torch.Tensor], ...]:
        """The regions with their components."""
        return tuple(zip(self.regions, self.components, strict=True))

    def distinct_parts(self) -> list[tuple[Region, list[torch.Tensor]]]:
        """Return the distinct non-empty regions of this client, each with all components that hold a copy of it."""
        components = self.components
        return [(region, [components[number] for number in numbers]) for region, numbers in _distinct(self.regions)]


@lru_cache(maxsize=4096)
def _distinct(regions: tuple[Region, ...]) -> tuple[tuple[Region, tuple[int, ...]], ...]:
    """Return the distinct non-empty regions, each with its positions in the tuple."""
    # Devices that hold the same region hold replicas of it. One replica is written; the others are compared with it.
    numbers: dict[Region, list[int]] = {}
    for number, region in enumerate(regions):
        if not region.is_empty:
            numbers.setdefault(region, []).append(number)
    return tuple((region, tuple(each)) for region, each in numbers.items())


@lru_cache(maxsize=4096)
def _facts(
    layout: Layout | None, devices: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[str, tuple[Region, ...]]:
    """Return a tensor's dtype name and the regions of devices; cached, as most tensors of a model are like others."""
    name = dtype_name(dtype)
    validate_dtype(name)
    if layout is None:
        return name, (Region.full(shape),)
    # A device has one summand, not the value, and no client could write the sum.
    if layout.has_partial:
        raise LayoutError(
            f"a tensor with pending reductions has no values yet; got partial axes {dict(layout.partial)}; "
            "relayout it to sharded or replicated first"
        )
    return name, tuple(layout.region(device, shape) for device in devices)


def is_tensor(value: object) -> bool:
    """Whether a value of a state tree is stored as an array; a tensor that is made of others is a container of them."""
    if isinstance(value, Shards):
        return True
    return isinstance(value, torch.Tensor) and (_is_plain_class(type(value)) or not _is_container(value))


def _is_container(value: torch.Tensor) -> bool:
    # DTensors have a layout; the parts of a nested tensor must fit each other, so it cannot be filled part by part.
    is_leaf = isinstance(value, AsyncCollectiveTensor | DTensor) or torch_interop.is_torch_dtensor(value)
    return not is_leaf and not value.is_nested and has_parts(value)


def is_stateful(value: object) -> bool:
    """Whether a value is `Stateful`: an object, not a class of such objects."""
    return isinstance(value, Stateful) and not isinstance(value, type)


def mesh_of(value: Any) -> Mesh | None:
    """Return the mesh that a tensor is on; None for a plain tensor."""
    if isinstance(value, Shards):
        return value.whole("").device_mesh
    if torch_interop.is_torch_dtensor(value):
        return device_mesh.mesh_of(value.device_mesh)
    return value.device_mesh if isinstance(value, DTensor) else None


def as_leaf(
    value: torch.Tensor | np.ndarray[Any, Any] | Shards, name: str, kept: torch_interop.KeptLayouts | None = None
) -> Leaf:
    """Describe a DTensor (ours or PyTorch's), a plain tensor, an array of numpy, or `Shards`.

    Args:
        value: The tensor, array or shards.
        name: Its name, for errors.
        kept: Layouts of PyTorch's DTensors in the same tree; see `torch_interop.layout_and_local`.

    Raises:
        DTypeError: The dtype cannot be stored, or the tensor's elements are not dense memory. Sparse, quantized,
            nested, fake and meta tensors are not, nor is a tensor of a subclass that computes its elements.
        LayoutError: The layout has MATCH specs or pending reductions, or a PyTorch DTensor is made of ours.
        ComponentError: The part that `Shards` hold does not have the size that it should have.
    """
    if isinstance(value, np.ndarray):
        value = _tensor_of_array(value, name)
    elif isinstance(value, Shards):
        value = value.whole(name)
    if torch_interop.is_torch_dtensor(value):
        try:
            layout, local = torch_interop.layout_and_local(value, kept)
        except LayoutError as error:
            raise LayoutError(f"tensor {name!r}: {error.message}") from None
        components: tuple[torch.Tensor, ...] = () if local is None else (local,)
    elif isinstance(value, DTensor):
        layout, components = value.layout, value.components
    else:
        layout, components = None, (value,)
    # The common case costs no more than this look: a model has thousands of tensors.
    if not all(map(_is_dense, components)):
        components = tuple(_dense(memory, name) for memory in components)
    devices = () if layout is None else layout.mesh.record.local_device_ids
    shape = tuple(value.shape)
    try:
        dtype, regions = _facts(layout, devices, shape, value.dtype)
    # The function is cached for tensors that are alike, so it knows no name.
    except DTypeError as error:
        raise DTypeError(f"tensor {name!r}: {error.message}; convert it, or pass a view() as integers") from None
    except LayoutError as error:
        raise LayoutError(f"tensor {name!r}: {error.message}") from None
    save_as_bf16 = isinstance(value, DVariable) and value.save_as_bf16
    return Leaf(value, shape, dtype, layout, regions, components, save_as_bf16)


def _dense(memory: torch.Tensor, name: str) -> torch.Tensor:
    """Return a tensor's memory, after the collective that fills it; refuse a tensor that has none."""
    # Its memory is filled when the collective ends; read before, it would be stored half filled.
    if isinstance(memory, AsyncCollectiveTensor):
        memory = memory.wait()
    if not _is_dense(memory):
        raise DTypeError(f"tensor {name!r}: only dense tensors with data can be stored; {_cure(memory)}")
    return memory


def validate_mode() -> None:
    """Refuse to save or restore where operators make fake tensors.

    Raises:
        DTypeError: This thread is inside of a FakeTensorMode.
    """
    if detect_fake_mode() is not None:
        raise DTypeError("checkpoints cannot be saved or restored inside of FakeTensorMode; leave it first")


def _is_dense(memory: torch.Tensor) -> bool:
    """Whether a tensor's elements fill dense memory. As every tensor is asked, the answer must be quick."""
    if (
        not _is_plain_class(type(memory))
        or memory.layout is not torch.strided
        or memory.is_quantized
        or memory.is_nested
        or memory.is_meta
    ):
        return False
    try:
        # The tensors of torch.func's transforms have no address, or the null pointer.
        return memory.data_ptr() != 0 or memory.numel() == 0
    except RuntimeError:
        return False


@cache
def _is_plain_class(kind: type[torch.Tensor]) -> bool:
    """Whether tensors of a class have their elements in memory: the class keeps the operators of `torch.Tensor`."""
    has_shape = not issubclass(kind, UninitializedParameter | UninitializedBuffer)
    return has_shape and kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _cure(memory: torch.Tensor) -> str:
    """Return, for an error, the kind of a tensor that is not dense, and the cure."""
    kind = type(memory).__name__
    if is_lazy(memory):
        return f"got {kind}, without a shape; run the module once, which gives it one"
    if is_fake(memory):
        return f"got {kind}; leave FakeTensorMode, whose tensors have no elements"
    if memory.is_nested:
        return f"got {kind}, nested; pass the tensors of its unbind(), or its values() and offsets()"
    if memory.is_quantized:
        return f"got {kind}, quantized; pass its int_repr(), scales and zero points, or its dequantize()"
    if memory.layout is not torch.strided:
        return f"got {kind} of {memory.layout}; pass its to_dense(), or its parts, such as indices() and values()"
    if not _is_plain_class(type(memory)):
        return (
            f"got {kind}, a subclass that computes its elements; pass the tensors that it is made of, or an object "
            "with state_dict() and load_state_dict()"
        )
    if memory.is_meta:
        return f"got {kind} on {memory.device}; give it elements first, as to_empty(device=…) does"
    return f"got {kind} that stands for another one; leave torch.func's transforms and torch.compile"


def _tensor_of_array(array: np.ndarray[Any, Any], name: str) -> torch.Tensor:
    """Return a tensor with the elements of an array: in the array's memory if it `is_fillable`, else in a copy.

    Raises:
        DTypeError: PyTorch has no such dtype.
    """
    dtype = array.dtype.name
    if array.dtype != DTYPES.get(dtype):
        raise DTypeError(
            f"array {name!r}: dtype {array.dtype} cannot be stored; expected numbers or bools in the byte order of "
            "this host; convert it by astype(…)"
        )
    array = array if is_fillable(array) else array.copy()
    if torch_dtype(dtype) in _BITS:
        return torch.from_numpy(array.view(f"uint{8 * array.itemsize}")).view(torch_dtype(dtype))
    return torch.from_numpy(array)


def is_fillable(array: np.ndarray[Any, Any]) -> bool:
    """Whether a tensor can be in the memory of an array, so that a write to the tensor fills the array."""
    is_regular = all(stride >= 0 and stride % max(array.itemsize, 1) == 0 for stride in array.strides)
    return array.flags.writeable and is_regular


def host_array(memory: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a numpy view of a CPU tensor; a tensor elsewhere is copied to the host."""
    array = own_array(memory)
    if array is None:
        # The memory of a lazy conjugate or negative holds other numbers than the tensor: they are computed first.
        array = own_array(memory.detach().resolve_conj().resolve_neg().cpu())
    assert array is not None  # noqa: S101  (nothing is left to be resolved)
    return array


def own_array(memory: torch.Tensor) -> np.ndarray[Any, Any] | None:
    """Return a numpy view of a tensor's own memory: a write to it fills the tensor. None if it `is_elsewhere`."""
    if is_elsewhere(memory):
        return None
    # numpy() refuses tensors that require gradients.
    memory = memory.detach() if memory.requires_grad else memory
    bits = _BITS.get(memory.dtype)
    # numpy lacks some types; their bits travel as integers of the same size.
    return memory.numpy() if bits is None else memory.view(bits).numpy().view(DTYPES[dtype_name(memory.dtype)])


def is_elsewhere(memory: torch.Tensor) -> bool:
    """Whether a tensor's elements are not in host memory, or a conjugation or negation of them is pending."""
    return not memory.is_cpu or memory.is_conj() or memory.is_neg()


def with_arrays(tensors: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, Any]:
    """Return tensors by name; the given names get arrays of numpy in the same memory."""
    return {**tensors, **{name: host_array(tensors[name]) for name in names}}


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a dtype name."""
    return _TORCH_DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype, storable or not."""
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


_TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
_NAMES = {dtype: name for name, dtype in _TORCH_DTYPES.items()}
_BITS = {
    dtype: getattr(torch, f"uint{8 * dtype.itemsize}")
    for name, dtype in _TORCH_DTYPES.items()
    # `isbuiltin` is 1 for NumPy's own types; PyTorch makes no arrays of the others.
    if DTYPES[name].isbuiltin != 1 or name in UNCONVERTED
}


def new_memory(name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate host memory for a tensor of a checkpoint.

    Raises:
        CheckpointError: The host lacks the memory.
    """
    try:
        return host_memory.allocate(shape, dtype)
    # PyTorch's class for an allocation that fails.
    except RuntimeError as error:
        raise CheckpointError(
            f"this host lacks the memory for tensor {name!r}; got shape {tuple(shape)} of {dtype}; read a part of it, "
            "or restore it on more hosts"
        ) from error
