"""Tensors in pickles of PyTorch, as views of storages; read without PyTorch.

A pickle of ``torch.save`` holds no elements. A tensor in it is a call of one of PyTorch's ``_rebuild`` functions, with
a storage, an offset and strides, in elements. A storage is a record of the file, which several tensors may share.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

from dtckpt.checkpoint.foreign.pickle_names import DTENSOR, REBUILDS, STORAGES, TENSOR_CLASSES, UNTYPED_STORAGE
from dtckpt.checkpoint.foreign.pickle_syntax import Global, Pairs, Persistent, PickledCall
from dtckpt.checkpoint.reading.pieces import is_expanded_too_far
from dtckpt.errors import CheckpointCorruptError, TreeError
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.grid import MAX_RANK

_TYPED = {f"torch.{name}": dtype for dtype, name in STORAGES.items()}
_MAX_NUMBER = 1 << 62
_MAX_WRAPPED = 8
"""Bound on the calls around a tensor: a parameter with attributes has three."""
_MAX_FIELDS = 64
"""Bound on the fields of an object of PyTorch: each of many tensors may have the same long object."""


@dataclass(frozen=True, slots=True)
class StorageView:
    """A tensor as a view of a storage.

    Args:
        key: The name of the storage in its file.
        dtype: Name of the element type, one of `dtckpt.format.dtypes.DTYPES`.
        offset: Elements of the storage before the first one of the tensor.
        shape: The tensor's shape.
        strides: Elements from one element to the next, per dim.
        storage_nbytes: Bytes of the storage.

    Raises:
        CheckpointCorruptError: A number is out of bounds, or the tensor would not be inside the storage.
    """

    key: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    storage_nbytes: int

    def __post_init__(self) -> None:
        numbers = (self.offset, self.storage_nbytes, *self.shape, *self.strides)
        is_sane = len(self.shape) == len(self.strides) and len(self.shape) <= MAX_RANK
        if not is_sane or any(type(number) is not int or not 0 <= number <= _MAX_NUMBER for number in numbers):
            raise CheckpointCorruptError("a tensor of the checkpoint has a malformed shape or place")
        if 0 not in self.shape and self.stop > self.storage_nbytes:
            raise CheckpointCorruptError(
                f"a tensor of the checkpoint, of shape {self.shape}, would end at byte {self.stop} of storage "
                f"{self.key[:80]!r}, which has {self.storage_nbytes}"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements, which may be more than the storage has."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def start(self) -> int:
        """The first byte of the tensor in the storage."""
        return self.offset * DTYPES[self.dtype].itemsize

    @property
    def stop(self) -> int:
        """The byte behind the tensor's last element in the storage."""
        last = sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))
        return (self.offset + last + 1) * DTYPES[self.dtype].itemsize


def is_tensor(value: Any) -> bool:
    """Whether a value of a pickle is a tensor, also of a kind that `tensor_view` refuses by name."""
    return type(value) is PickledCall and (value.name in REBUILDS or value.name.startswith("torch._utils._rebuild_"))


def tensor_view(value: Any, where: str) -> StorageView:
    """Return the place of the elements of a pickled tensor: its storage, offset, shape and strides.

    Args:
        value: The value, as `parse_pickle` returns it.
        where: The tensor's name, for messages.

    Raises:
        TreeError: The tensor is of a kind that cannot be read, such as a sparse tensor; the message says which.
        CheckpointCorruptError: The tensor is malformed.
    """
    for _ in range(_MAX_WRAPPED):
        if not is_tensor(value):
            break
        name, arguments = value.name.rpartition(".")[2], value.arguments
        try:
            if name in ("_rebuild_parameter", "_rebuild_parameter_with_state"):
                value = arguments[0]
            elif name == "_rebuild_from_type_v2":
                function, kind, inner, state = arguments
                value = (
                    PickledCall(function, inner)
                    if kind.name in TENSOR_CLASSES
                    else _whole_part(kind.name, state, where)
                )
            elif name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"):
                return _view(name, arguments, where)
            else:
                raise _refusal(where, f"it was made by {value.name}")
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, TreeError | CheckpointCorruptError):
                raise
            raise _malformed(where, str(error)) from error
    raise _malformed(where, "it is no tensor")


def _view(name: str, arguments: tuple[Any, ...], where: str) -> StorageView:
    """Return the view that a call of one of the ``_rebuild_tensor`` functions would make."""
    storage, offset, shape, strides, *more = arguments
    key, dtype, storage_nbytes = _storage(storage, where)
    metadata = None
    if name == "_rebuild_tensor_v3":
        # requires_grad, hooks, dtype, metadata
        dtype = _dtype(more[2])
        metadata = more[3] if len(more) > 3 else None
    elif name == "_rebuild_tensor_v2":
        metadata = more[2] if len(more) > 2 else None
    if metadata:
        raise _refusal(where, "it is a lazy conjugate or negative of other elements; save tensor.resolve_conj()")
    if dtype not in DTYPES:
        raise _refusal(where, f"its dtype is {dtype or storage.key[1].name}")
    if not (type(shape) is type(strides) is tuple):
        raise _malformed(where, "its shape is no tuple")
    view = StorageView(key, dtype, offset, shape, strides, storage_nbytes)
    if view.nbytes and is_expanded_too_far(view.nbytes, view.stop - view.start):
        raise _refusal(
            where,
            f"it was expanded to {view.nbytes} bytes, of {view.stop - view.start} that are stored; load it with "
            "PyTorch, and save the tensor that it was expanded from",
        )
    return view


def _storage(storage: Any, where: str) -> tuple[str, str, int]:
    """Return the key of a storage, its dtype (empty, if it has none) and its bytes."""
    if type(storage) is not Persistent or type(storage.key) is not tuple:
        raise _malformed(where, "its storage is inside the pickle")
    tag, kind, key, location, count = storage.key
    if tag != "storage" or type(kind) is not Global or type(key) is not str or type(count) is not int:
        raise _malformed(where, "its storage is malformed")
    if location == "meta":
        raise _refusal(where, "it is on the meta device and has no elements")
    dtype = _TYPED.get(kind.name.replace("torch.cuda.", "torch."), "")
    if kind.name == UNTYPED_STORAGE:
        return key, dtype, count
    if not dtype:
        raise _refusal(where, f"its storage is {kind.name}")
    return key, dtype, count * DTYPES[dtype].itemsize


def _dtype(value: Any) -> str:
    if type(value) is not Global:
        raise TypeError("its dtype is no name")
    return value.name.removeprefix("torch.")


def _whole_part(kind: str, state: Any, where: str) -> Any:
    """Return the local tensor of a DTensor, if it has all elements."""
    if kind.rpartition(".")[2] == "ShardedTensor":
        raise _refusal(where, "it is one process's part of a tensor; open the folder with the files of all processes")
    if kind != DTENSOR:
        raise _refusal(where, f"its class is {kind}; save a plain tensor")
    try:
        fields = _fields(state)
        local, spec = fields["_local_tensor"], _fields(fields["_spec"].state)
        shape = tuple(map(operator.index, spec["tensor_meta"].arguments[0].arguments[0][:MAX_RANK]))
        placements = [placement.name.rpartition(".")[2] for placement in spec["placements"][:_MAX_FIELDS]]
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise _refusal(where, "it is a DTensor of another version of PyTorch; save tensor.full_tensor()") from error
    if "Partial" in placements or "_NormPartial" in placements or tensor_view(local, where).shape != shape:
        raise _refusal(
            where,
            f"it is one process's part of a DTensor of shape {shape}; save tensor.full_tensor(), or all processes' "
            "parts by torch.distributed.checkpoint",
        )
    return local


def _fields(state: Any) -> dict[str, Any]:
    """Return the fields of an object's state; attributes and slots may come apart."""
    parts = state if type(state) is tuple else (state,)
    pairs = [pair for part in parts if type(part) is Pairs for pair in part[:_MAX_FIELDS]]
    # Only names: the hash of a hostile key takes for ever.
    return {name: value for name, value in pairs if type(name) is str}


def _refusal(where: str, reason: str) -> TreeError:
    return TreeError(f"cannot read the tensor at {where!r}: {reason[:300]}")


def _malformed(where: str, reason: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(f"the tensor at {where!r} is malformed: {reason[:200]}")
