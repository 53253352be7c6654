"""Every error that dtckpt raises, in one tree.

Classes are grouped by what the caller can do about them, and each is also the fitting builtin, so that
``except ValueError`` or ``except TimeoutError`` works without knowing this module. A message reads
"what failed, on what; got X, expected Y; what to do"; facts that a program may want stay as attributes.

An error crosses from one client to the others as ``(code, message)``: `to_wire` and `from_wire`. The code is
the class's name, so all clients of a failed save raise the same class with the same text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

MAX_MESSAGE_CHARS = 4000
"""Longest text that `to_wire` passes on; gRPC drops status texts that outgrow the peer's metadata limit."""


class DtckptError(Exception):
    """Base of all errors raised by dtckpt on purpose."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        for name, value in facts.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        # KeyError and OSError format themselves in ways that garble a one-argument message.
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message), self.__dict__


def _rebuild(cls: type[DtckptError], message: str) -> DtckptError:
    return cls(message)


# --- vocabulary: the caller described something that does not exist or does not fit ---------------------------


class ConfigError(DtckptError, ValueError):
    """An environment variable or option has a value that cannot be used."""


class ConfigTypeError(ConfigError, TypeError):
    """An environment variable holds values of kinds that cannot be compared."""


class MeshError(DtckptError, ValueError, RuntimeError):
    """A mesh cannot be built, parsed or used as asked. TensorFlow raises ValueErrors, PyTorch RuntimeErrors."""


class AxisNotFoundError(MeshError, KeyError, IndexError):
    """A mesh has no axis of this name or at this position."""


class MeshTypeError(MeshError, TypeError):
    """Something that is not a mesh (or not the right kind of argument) stands where one is needed."""


class DeviceNotFoundError(DtckptError, RuntimeError):
    """A kind of device was asked for that this client does not have, or not the library that drives it."""


class LayoutError(DtckptError, ValueError, RuntimeError):
    """A layout, a sharding spec or a placement is invalid, or does not fit the tensor or the mesh.

    TensorFlow raises ValueErrors, PyTorch RuntimeErrors.
    """


class LayoutTypeError(LayoutError, TypeError):
    """Something that is not a layout (or not the right kind of argument) stands where one is needed."""


class RegionError(DtckptError, ValueError):
    """A region is malformed or lies outside the tensor."""


class SliceError(DtckptError, ValueError):
    """A ``shape_and_slices`` string is malformed or does not fit its tensor."""


class ComponentError(LayoutError):
    """Components do not fit their layout: wrong count, shape, dtype or kind."""


class ReplicaMismatchError(DtckptError, ValueError):
    """Copies of one value that must be equal differ between devices or clients."""


class DTypeError(DtckptError, TypeError):
    """A dtype cannot be stored, or a conversion would lose values without consent."""


class RandomParameterError(DtckptError, ValueError, RuntimeError):
    """A distribution's parameters are out of range. A RuntimeError as well, because torch raises those."""


class OperatorError(DtckptError, NotImplementedError):
    """An operation cannot be done on such a DTensor."""

    # Not a TypeError: torch's arithmetic operators swallow those and say "unsupported operand" instead.


class TensorNameError(DtckptError, ValueError):
    """A tensor name cannot be stored: empty, escaping, too long, or used twice."""


class TreeError(DtckptError, TypeError):
    """A state tree holds something that cannot be saved, or does not have the structure that was saved."""


class SaveDisagreementError(DtckptError, ValueError):
    """Clients came to one save with different state."""


class ForkedProcessError(DtckptError, RuntimeError):
    """This process was forked from one that uses checkpoints; it must be spawned to use them."""


# --- checkpoints ----------------------------------------------------------------------------------------------


class CheckpointError(DtckptError):
    """Base of the errors about checkpoints on storage."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path."""


class CheckpointIncompleteError(CheckpointError, FileNotFoundError):
    """There is data at the path but no commit marker: a save that never finished."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """The path is taken and replacing it was not allowed."""


class CheckpointCorruptError(CheckpointError, ValueError):
    """Stored bytes are not the bytes that were saved."""


class CheckpointVersionError(CheckpointError, ValueError):
    """The checkpoint was written in a format that this version does not read."""


class CheckpointConflictError(CheckpointError, RuntimeError):
    """Clients see different checkpoints at one path."""


class TensorNotFoundError(CheckpointError, KeyError):
    """A tensor or value that was asked for is not in the checkpoint."""


class UnexpectedTensorError(CheckpointError, KeyError):
    """The checkpoint holds tensors or values that the target does not ask for."""


class ShapeMismatchError(CheckpointError, ValueError):
    """The stored shape and the target's shape differ."""


class RegionNotFoundError(CheckpointError, LookupError):
    """A tensor was saved in part, and the region asked for is outside what was saved."""


class RestoreMismatchError(CheckpointError, AssertionError):
    """A checkpoint and the objects that it was restored to do not cover each other: ``missing``, ``unexpected``."""

    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()


class SaveTimeoutError(CheckpointError, TimeoutError):
    """A save takes longer than the caller wants to wait; it goes on."""


class StorageError(CheckpointError, OSError):
    """Storage refused an operation."""


class StorageFullError(StorageError):
    """No space (or quota) is left on storage."""


class StoragePermissionError(StorageError, PermissionError):
    """Storage denies access."""


# --- coordination ---------------------------------------------------------------------------------------------


class CoordinationError(DtckptError, RuntimeError):
    """Base of the errors about clients working together."""


class ClientLostError(CoordinationError, ConnectionError):
    """A client stopped sending heartbeats. Attribute ``clients``: the lost client ids."""

    clients: Sequence[int] = ()


class BarrierTimeoutError(CoordinationError, TimeoutError):
    """Clients did not arrive in time. Attribute ``missing``: their client ids."""

    missing: Sequence[int] = ()


class BarrierConflictError(CoordinationError, ValueError):
    """Clients came to one barrier with different participants, topics or generations."""


class ClientFailedError(CoordinationError):
    """A client voted no with an error that has no class of ours."""


class BarrierCancelledError(CoordinationError):
    """A participant cancelled the barrier."""


class FencedError(CoordinationError, PermissionError):
    """A newer incarnation or attempt has taken this client's place."""


class CoordinatorUnavailableError(CoordinationError, ConnectionError):
    """The coordinator or store that clients meet at cannot be reached."""


class CoordinatorPermissionError(CoordinationError, PermissionError):
    """The coordinator refuses this client's token, or this client the coordinator's certificate."""


class GeneratorMismatchError(CoordinationError):
    """Clients that are to make one random tensor have generators in different states."""


class JobNotFoundError(CoordinationError, LookupError):
    """The coordinator knows no such job."""


# --- crossing between clients -----------------------------------------------------------------------------------


def _tree(cls: type[DtckptError]) -> Iterable[type[DtckptError]]:
    yield cls
    for sub in cls.__subclasses__():
        yield from _tree(sub)


def to_wire(error: BaseException) -> tuple[str, str]:
    """Return ``(code, message)`` of an error, for `from_wire` on another client."""
    if isinstance(error, DtckptError):
        return type(error).__name__, error.message[:MAX_MESSAGE_CHARS]
    return ClientFailedError.__name__, f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS]


def from_wire(code: str, message: str, **facts: Any) -> DtckptError:
    """Rebuild an error from `to_wire`'s pair; an unknown code becomes `ClientFailedError`."""
    known = {cls.__name__: cls for cls in _tree(DtckptError)}
    return known.get(code, ClientFailedError)(message, **facts)


def capped(names: Iterable[object], limit: int = 8, *, count: int | None = None) -> str:
    """Join names for a message, at most ``limit`` of them ("a, b, c and 93 more").

    Args:
        count: How many there are, if ``names`` are only the first of them.
    """
    listed = [str(name) for name in names]
    num_more = (len(listed) if count is None else count) - limit
    shown = ", ".join(listed[:limit])
    return shown if num_more <= 0 else f"{shown} and {num_more} more"
