"""Errors: every class that dtckpt raises, in one tree, their transfer between clients, and the text of messages.

The classes are grouped by the reaction that they ask of the caller. Each is also a subclass of the fitting builtin, so
that ``except ValueError`` or ``except TimeoutError`` works without this module. A message has the form "failure, on
which object; got X, expected Y; remedy". Facts for programs are attributes.

An error travels from one client to the others as ``(code, message)``; see `to_wire` and `from_wire`. The code is the
name of the class, so all clients of a failed save raise the same class with the same text.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

MAX_MESSAGE_CHARS = 4000
"""Longest message that `to_wire` returns; gRPC drops status texts that exceed the peer's metadata limit."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class DtckptError(Exception):
    """Base of all errors that dtckpt raises on purpose.

    Args:
        message: The text.
        facts: Attributes of the error, by name.
    """

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        for name, value in facts.items():
            setattr(self, name, value)

    def __str__(self) -> str:
        # KeyError and OSError have special formats, which garble a message that is the only argument.
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message), self.__dict__


def _rebuild(cls: type[DtckptError], message: str) -> DtckptError:
    return cls(message)


# --- arguments: the caller described something that does not exist or does not fit ----------------------------


class ConfigError(DtckptError, ValueError):
    """An environment variable or option has a value that cannot be used."""


class ConfigTypeError(ConfigError, TypeError):
    """An environment variable holds values of types that cannot be compared."""


class DependencyError(DtckptError, ImportError):
    """An installed library is too old."""


class MeshError(DtckptError, ValueError, RuntimeError):
    """A mesh cannot be built, parsed or used as asked. TensorFlow raises ValueErrors, PyTorch RuntimeErrors."""


class AxisNotFoundError(MeshError, KeyError, IndexError):
    """A mesh has no axis of this name or at this position."""


class MeshTypeError(MeshError, TypeError):
    """An argument that should be a mesh, or part of the description of one, has a wrong type."""


class DeviceNotFoundError(DtckptError, RuntimeError):
    """This client lacks devices of the requested kind, or the library that drives them."""


class LayoutError(DtckptError, ValueError, RuntimeError):
    """A layout, a sharding spec or a placement is invalid, or does not fit the tensor or the mesh.

    TensorFlow raises ValueErrors, PyTorch RuntimeErrors.
    """


class LayoutTypeError(LayoutError, TypeError):
    """An argument that should be a layout, or part of the description of one, has a wrong type."""


class RegionError(DtckptError, ValueError):
    """A region is malformed or outside the tensor."""


class SliceError(DtckptError, ValueError):
    """A ``shape_and_slices`` string is malformed or does not fit its tensor."""


class MeshMismatchError(LayoutError, AssertionError):
    """DTensors of one call are on different meshes. PyTorch's `local_map` is documented to raise AssertionErrors."""


class ComponentError(LayoutError):
    """Components do not fit their layout: wrong count, shape, dtype or kind."""


class ParallelPlanError(LayoutError, AssertionError):
    """The layouts of a style of tensor parallelism do not fit each other, or do not fit the module's arguments.

    PyTorch raises ValueError for some of these cases, AssertionError for others.
    """


class UnsupportedModuleError(LayoutError, NotImplementedError):
    """A style of tensor parallelism cannot be applied to a module of this class."""


class ReplicaMismatchError(DtckptError, ValueError):
    """Copies of one value that must be equal differ between devices or clients."""


class DTypeError(DtckptError, TypeError):
    """A dtype cannot be stored, or a conversion would lose values and the caller has not allowed that."""


class RandomParameterError(DtckptError, ValueError, RuntimeError):
    """A distribution's parameters are out of range. torch raises RuntimeErrors."""


class OperatorError(DtckptError, NotImplementedError):
    """An operator cannot be applied to such a DTensor."""

    # Not a TypeError: torch's arithmetic operators catch TypeErrors and raise "unsupported operand" instead.


class TensorNameError(DtckptError, ValueError):
    """A tensor name cannot be stored: it is empty, would leave its folder, is too long, or is used twice."""


class TreeError(DtckptError, TypeError):
    """A state tree holds something that cannot be saved, or does not have the structure that was saved."""


class SaveDisagreementError(DtckptError, ValueError):
    """Clients called the same save with different state."""


class TensorPartMissingError(SaveDisagreementError):
    """No client of a save holds a part of a tensor."""


class ForkedProcessError(DtckptError, RuntimeError):
    """The parent of this forked process uses checkpoints. A process that uses them too must be spawned."""


# --- checkpoints ----------------------------------------------------------------------------------------------


class CheckpointError(DtckptError):
    """Base of the errors about checkpoints on storage."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at the path."""


class CheckpointIncompleteError(CheckpointError, FileNotFoundError):
    """There is data at the path but no commit marker: a save has not finished."""


class CheckpointExistsError(CheckpointError, FileExistsError):
    """There is something at the path already, and the caller has not allowed to replace it."""


class CheckpointCorruptError(CheckpointError, ValueError):
    """Stored bytes are not the bytes that were saved."""


class CheckpointUntrustedError(CheckpointCorruptError):
    """No trusted key has signed the checkpoint, or stored bytes are not the bytes that were signed."""


class CheckpointVersionError(CheckpointError, ValueError):
    """The checkpoint was written in a format that this version does not read."""


class CheckpointConflictError(CheckpointError, RuntimeError):
    """Clients see different checkpoints at the same path."""


class TensorNotFoundError(CheckpointError, KeyError):
    """The checkpoint lacks a tensor or value that the caller asks for."""


class UnexpectedTensorError(CheckpointError, KeyError):
    """The checkpoint holds tensors or values that the target does not ask for."""


class ShapeMismatchError(CheckpointError, ValueError):
    """The stored shape and the target's shape differ."""


class RegionNotFoundError(CheckpointError, LookupError):
    """A tensor was saved in part, and the requested region is outside the saved part."""


class RestoreMismatchError(CheckpointError, AssertionError):
    """A checkpoint and the restored objects do not match. Attributes ``missing``, ``unexpected``: names."""

    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()


class SaveTimeoutError(CheckpointError, TimeoutError):
    """A save takes longer than the caller waits for it; the save continues."""


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
    """Clients called the same barrier with different participants, topics or generations."""


class ClientFailedError(CoordinationError):
    """A client failed with an error whose class is not one of dtckpt's."""


class BarrierCancelledError(CoordinationError):
    """A participant cancelled the barrier."""


class FencedError(CoordinationError, PermissionError):
    """A newer incarnation or attempt has taken this client's place."""


class CoordinatorUnavailableError(CoordinationError, ConnectionError):
    """The coordinator, or the store through which clients coordinate, cannot be reached."""


class CoordinatorPermissionError(CoordinationError, PermissionError):
    """The coordinator refuses this client's token, or this client refuses the coordinator's certificate."""


class GeneratorMismatchError(CoordinationError):
    """Clients that make a random tensor together have generators in different states."""


class JobNotFoundError(CoordinationError, LookupError):
    """The coordinator knows no such job."""


class FeedConflictError(CoordinationError, ValueError):
    """Clients say different things of one version of a feed, or ask for a step that its state does not allow."""


class VersionGoneError(CoordinationError, LookupError):
    """A version of a feed is retired or has failed, so no reader gets it any more."""


class VersionTimeoutError(CoordinationError, TimeoutError):
    """A feed had no version of the wanted kind in time."""


class VersionLeasedError(CoordinationError):
    """Readers hold leases on a version, or may hold some, so its memory must stay."""


class SourceLostError(CoordinationError, ConnectionError):
    """The clients that have the bytes of a version are lost."""


class TicketError(CoordinationError, PermissionError):
    """A ticket does not let its bearer read: it is forged, expired, or for another version."""


# --- transfer between clients -----------------------------------------------------------------------------------


def _tree(cls: type[DtckptError]) -> Iterable[type[DtckptError]]:
    yield cls
    for sub in cls.__subclasses__():
        yield from _tree(sub)


def to_wire(error: BaseException) -> tuple[str, str]:
    """Return the code and message of an error, from which `from_wire` rebuilds it on another client."""
    if isinstance(error, DtckptError):
        return type(error).__name__, error.message[:MAX_MESSAGE_CHARS]
    return ClientFailedError.__name__, f"{type(error).__name__}: {error}"[:MAX_MESSAGE_CHARS]


def from_wire(code: str, message: str, **facts: Any) -> DtckptError:
    """Rebuild an error from the code and message of `to_wire`; an unknown code becomes `ClientFailedError`."""
    classes = {cls.__name__: cls for cls in _tree(DtckptError)}
    return classes.get(code, ClientFailedError)(message, **facts)


# --- text of messages, logs and tables -----------------------------------------------------------------------------


def capped(names: Iterable[object], limit: int = 8, *, count: int | None = None) -> str:
    """Join names for a message, at most ``limit`` of them ("a, b, c and 93 more").

    Args:
        names: The names.
        limit: Largest number of names in the result.
        count: Number of names in all, if ``names`` are only the first of them.
    """
    listed = [str(name) for name in names]
    num_more = (len(listed) if count is None else count) - limit
    shown = ", ".join(listed[:limit])
    return shown if num_more <= 0 else f"{shown} and {num_more} more"


def printable(text: str) -> str:
    """Escape characters that could break a line or control a terminal; names and paths may hold any."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def format_nbytes(nbytes: float) -> str:
    """Return a size in bytes with a binary unit, such as ``1.5 GiB``."""
    for unit in _UNITS[:-1]:
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} {_UNITS[-1]}"


MAX_COMPARED = 20_000
"""Names that are compared letter by letter, which takes some 50 us for each."""
MAX_SUGGESTED = 3


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return a question for a message, such as ``; did you mean 'model/w'?``; empty if no name is close."""
    known = list(names)
    plain = name.replace(".", "/").strip("/")
    # The same name with other separators, then a longer name with this end, then similar spelling.
    close = [each for each in known if each.replace(".", "/") == plain]
    close = close or [each for each in known if each.replace(".", "/").endswith(f"/{plain}")]
    close = close or difflib.get_close_matches(name, known[:MAX_COMPARED], MAX_SUGGESTED)
    close = close or close_prefixes(plain, known)
    return f"; did you mean {' or '.join(map(repr, close[:MAX_SUGGESTED]))}?" if close else ""


def close_prefixes(name: str, names: Iterable[str]) -> list[str]:
    """Return prefixes of names that begin as a name does, up to its first key that no name has there."""
    split = [each.split("/") for each in names]
    path = name.split("/")
    for depth, key in enumerate(path):
        keys = dict.fromkeys(each[depth] for each in split if len(each) > depth)
        if key not in keys:
            close = difflib.get_close_matches(key, list(keys)[:MAX_COMPARED], MAX_SUGGESTED)
            return ["/".join((*path[:depth], each)) for each in close]
        split = [each for each in split if len(each) > depth and each[depth] == key]
    return []
