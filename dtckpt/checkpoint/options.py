"""Options of saves and restores: frozen, validated when made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real

from dtckpt.checkpoint.renaming import Rename, validate_rename
from dtckpt.checkpoint.restore_report import RestoreReport
from dtckpt.errors import ConfigError
from dtckpt.format.manifest import KVSTORES

CASTS = ("exact", "lossless", "any")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How a checkpoint is written.

    Args:
        kvstore: ``ocdbt`` (few files, any number of tensors) or ``zarr`` (a plain Zarr v3 tree).
        save_as_bf16: Store float32 tensors as bfloat16, rounded to nearest even; they come back as float32.
        chunk_nbytes: Bound on the bytes of one chunk, where shards can be cut evenly.
        overwrite: Replace a checkpoint at the path; the old one stays until the new one is durable.
        check_replicas: Compare all copies of a value, on one client and across clients, before committing.
        content_digest: Say of every tensor what it holds, whatever its layout; see `TensorInfo.content_digest`.
        fsync: Whether a finished save survives a power loss.
        timeout_s: Longest wait, in seconds, for other clients at each barrier.
    """

    kvstore: str = "ocdbt"
    save_as_bf16: bool = False
    chunk_nbytes: int = 16 << 20
    overwrite: bool = False
    check_replicas: bool = True
    content_digest: bool = True
    fsync: bool = True
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        _validate_choice("kvstore", self.kvstore, KVSTORES)
        _validate_positive("chunk_nbytes", self.chunk_nbytes, Integral)
        _validate_flags(self, "save_as_bf16", "overwrite", "check_replicas", "content_digest", "fsync")
        _validate_positive("timeout_s", self.timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions:
    """How a checkpoint is read.

    Args:
        cast: Which dtype conversions are fine: none (``exact``), those that keep every value (``lossless``), ``any``.
        allow_missing: Leave tensors and values of the target as they are where the checkpoint has none.
        allow_unexpected: Pass over tensors and values of the checkpoint that the target does not ask for.
        rename: Other names for what is in the checkpoint; see `dtckpt.checkpoint.renaming.Rename`.
        report: Called with the `RestoreReport`, when all is restored or when the restore is refused because something
            is missing, unexpected, reshaped or cast.
        timeout_s: Longest wait, in seconds, for other clients at each barrier.
    """

    cast: str = "lossless"
    allow_missing: bool = False
    allow_unexpected: bool = False
    rename: Rename | None = None
    report: Callable[[RestoreReport], object] | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        _validate_choice("cast", self.cast, CASTS)
        if self.rename is not None:
            validate_rename(self.rename)
        if self.report is not None and not callable(self.report):
            raise ConfigError(f"option report must be a function of a RestoreReport; got {self.report!r}")
        _validate_flags(self, "allow_missing", "allow_unexpected")
        _validate_positive("timeout_s", self.timeout_s)


def _validate_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"option {name} is unknown; got {value!r}, expected one of {', '.join(choices)}")


def _validate_positive(name: str, value: float, kind: type = Real) -> None:
    if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ConfigError(f"option {name} must be a positive {kind.__name__} number; got {value!r}")


def _validate_flags(options: object, *names: str) -> None:
    for name in names:
        if not isinstance(getattr(options, name), bool):
            raise ConfigError(f"option {name} must be True or False; got {getattr(options, name)!r}")
