"""`TensorParts`: a tensor of a wrapper subclass, taken apart into its inner tensors and everything else.

Such a subclass, for example one of torchao's, has no elements of its own. PyTorch's `__tensor_flatten__` returns the
names of its inner tensors and a context. A checkpoint stores the inner tensors, named ``tensor/inner``, and the
context, which must be a tree of plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtckpt.errors import TreeError


def has_parts(value: object) -> bool:
    """Whether a value is a tensor of a subclass that can be taken apart and put together again."""
    if not all(hasattr(type(value), name) for name in ("__tensor_flatten__", "__tensor_unflatten__")):
        return False
    import torch  # here, because it takes seconds, and other values than tensors are recognised without it

    return isinstance(value, torch.Tensor)


class TensorParts(dict[str, Any]):
    """The parts of a tensor of a wrapper subclass, by name; it stands for the tensor where its class is not known.

    ``Subclass.__tensor_unflatten__(dict(parts), parts.context, parts.shape, stride)`` makes the tensor anew. In a tree
    to be saved it counts as the tensor does.

    Args:
        parts: The inner tensors, by name.
        kind: Name of the subclass.
        shape: The shape of the tensor.
        context: What `__tensor_flatten__` returned beside the names.
    """

    __slots__ = ("context", "kind", "shape")

    def __init__(self, parts: Mapping[str, Any], kind: str, shape: tuple[int, ...], context: Any) -> None:
        if not (type(kind) is str and isinstance(shape, tuple) and all(type(name) is str for name in parts)):
            raise TreeError(f"parts of a tensor need names, a class name and a shape; got {[*parts, kind, shape]!r}")
        super().__init__(parts)
        self.kind = kind
        self.shape = shape
        self.context = context

    @classmethod
    def of(cls, value: Any) -> TensorParts:
        """Return the parts of a tensor that `has_parts`; `TensorParts` as they are."""
        if isinstance(value, cls):
            return value
        names, context = value.__tensor_flatten__()
        return cls({name: getattr(value, name) for name in names}, type(value).__name__, value.shape, context)

    @property
    def facts(self) -> tuple[str, tuple[int, ...], Any]:
        """All but the tensors."""
        return self.kind, self.shape, self.context

    def __repr__(self) -> str:
        return f"TensorParts({super().__repr__()}, kind={self.kind!r}, shape={self.shape}, context={self.context!r})"
