"""`SaveOptions` and `RestoreOptions`: frozen, validated when they are made."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from dtckpt.checkpoint.mapping.map_rules import TensorMap
from dtckpt.checkpoint.restoring.rename_rules import Rename, validate_rename
from dtckpt.checkpoint.restoring.report import RestoreReport
from dtckpt.checkpoint.signing.keys import KeySource
from dtckpt.errors import ConfigError
from dtckpt.format.codecs import CODECS
from dtckpt.format.dtypes import STORED_AS
from dtckpt.format.manifest import KVSTORES

CASTS = ("exact", "lossless", "any")
KEYS = ("union", "same")
STRICT = ("", "names")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """Options of a save.

    Args:
        kvstore: Storage format: ``ocdbt`` (few files, any number of tensors) or ``zarr`` (a plain Zarr v3 tree).
        save_as_bf16: Store float32 tensors as bfloat16, rounded to nearest even; they are restored as float32.
        stored_dtypes: The same for some tensors: ``bfloat16`` or, unchanged, ``float32``, by glob on their names. The
            first match wins, also over ``save_as_bf16``; tensors without a match are stored unchanged.
        codec: Compression of chunks: ``none``, ``zstd`` or ``blosc``; default: none, and in `dtckpt.reshard` as
            in the source.
        raw_bits: Describe bfloat16 and the float8 types in ``zarr.json`` as unsigned integers of the same bits, so that
            Zarr readers that lack these data types open the group. The stored bits and the restored tensors do not
            change; default: no, and in `dtckpt.reshard` as in the source.
        chunk_nbytes: Bound on the bytes of one chunk, where shards can be cut evenly.
        keys: Whether clients may pass different names: ``union`` saves the names of all clients, ``same`` refuses a
            name that not all clients pass (below a `dtckpt.PerClient` each client has its own).
        overwrite: Replace a checkpoint at the path; the old one stays until the new one is durable.
        check_replicas: Compare all copies of a value, on one client and across clients, before the commit; copies that
            differ are refused. Buffers of modules under DDP or FSDP2, and the running statistics of BatchNorm and
            InstanceNorm in any module, may differ. The lowest client's copy is saved, and one line of the log names
            them. By glob on names, as ``{"*/running_*": False, "*/mask": True}``, another rule: False saves the lowest
            client's copy and compares nothing, True refuses copies that differ. The first match wins. Plain ``False``
            compares nothing. Such buffers are then saved as above; each chunk of any other tensor comes from the client
            that writes it, so the saved tensor may mix copies that differ.
        content_digest: Store a digest of every tensor's elements, independent of its layout; see
            `TensorInfo.content_digest`.
        staging_nbytes: Bound on the bytes of copies that wait to be written by `dtckpt.save_async`, beside three
            chunks; default: all that this client writes is copied first. With a bound the call returns when the last
            bytes are copied, so it lasts about as long as the write; sync and commit follow in the background.
        fsync: Whether a finished save survives a power loss.
        progress: Show client 0's progress on standard error, if that is a terminal.
        timeout_s: Longest wait, in seconds, for other clients at each barrier.
    """

    kvstore: str = "ocdbt"
    save_as_bf16: bool = False
    stored_dtypes: Mapping[str, str] | tuple[tuple[str, str], ...] = ()
    codec: str | None = None
    raw_bits: bool | None = None
    chunk_nbytes: int = 16 << 20
    keys: str = "union"
    overwrite: bool = False
    check_replicas: bool | Mapping[str, bool] | tuple[tuple[str, bool], ...] = True
    content_digest: bool = True
    staging_nbytes: int | None = None
    fsync: bool = True
    progress: bool = False
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        _validate_choice("kvstore", self.kvstore, KVSTORES)
        _validate_positive("chunk_nbytes", self.chunk_nbytes, Integral)
        _validate_choice("keys", self.keys, KEYS)
        _validate_flags(self, "save_as_bf16", "overwrite", "content_digest", "fsync", "progress")
        _validate_positive("timeout_s", self.timeout_s)
        if self.staging_nbytes is not None:
            _validate_positive("staging_nbytes", self.staging_nbytes, Integral)
        if self.codec is not None:
            _validate_choice("codec", self.codec, CODECS)
        if self.raw_bits is not None:
            _validate_flags(self, "raw_bits")
        # As pairs: they are hashable, and keep the order, on which clients must agree.
        object.__setattr__(self, "stored_dtypes", _stored_dtypes(self.stored_dtypes))
        object.__setattr__(self, "check_replicas", _check_replicas(self.check_replicas))

    @property
    def replica_rules(self) -> tuple[tuple[str, bool], ...]:
        """The patterns of ``check_replicas``, each with whether the copies must be equal."""
        return self.check_replicas if isinstance(self.check_replicas, tuple) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions:
    """Options of a restore.

    Args:
        cast: The dtype conversions that are allowed: none (``exact``), only conversions that keep every value
            (``lossless``), or ``any``.
        allow_missing: Leave tensors and values of the target unchanged if the checkpoint lacks them.
        allow_unexpected: Pass over tensors and values of the checkpoint that the target does not ask for.
        strict: ``names`` refuses items that find their owner by anything but a name: the state of an optimizer by
            position, and options of its groups that the checkpoint lacks. By default these are in
            `RestoreReport.owners` only.
        rename: New names for tensors and values of the checkpoint; see
            `dtckpt.checkpoint.restoring.rename_rules.Rename`.
        map: Rules for other names and shapes of its tensors: a `dtckpt.TensorMap`, or its source, as for
            `dtckpt.open_checkpoint`. They come before ``rename``.
        report: Called with the `RestoreReport`, when all is restored, or when the restore is refused because something
            is missing, unexpected, reshaped or cast.
        read_once: Whether one client reads each byte from storage, and hands it on to the clients that need it: in the
            memory of a host, or by messages. Applies to large tensors. Default: where that is faster
            (docs/checkpointing.md).
        trusted_keys: Public keys, PEM files or their bytes, of which one must have signed the checkpoint
            (`dtckpt.sign`). Every byte is compared with the signed digests before it gets to a tensor; files that the
            restore does not read are not (`dtckpt verify --key` compares all). The clients must pass the same keys.
        progress: As in `SaveOptions`.
        timeout_s: Longest wait, in seconds, for other clients at each barrier.
    """

    cast: str = "lossless"
    allow_missing: bool = False
    allow_unexpected: bool = False
    strict: str = ""
    rename: Rename | None = None
    map: TensorMap | str | os.PathLike[str] | None = None
    report: Callable[[RestoreReport], object] | None = None
    read_once: bool | None = None
    trusted_keys: Sequence[KeySource] = ()
    progress: bool = False
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "trusted_keys", validated_keys(self.trusted_keys))
        _validate_choice("cast", self.cast, CASTS)
        _validate_choice("strict", self.strict, STRICT)
        if self.rename is not None:
            validate_rename(self.rename)
        if self.map is not None and not isinstance(self.map, TensorMap | str | os.PathLike):
            raise ConfigError(f"option map must be a TensorMap, its name or its file; got {self.map!r}")
        if self.report is not None and not callable(self.report):
            raise ConfigError(f"option report must be a function of a RestoreReport; got {self.report!r}")
        _validate_flags(self, "allow_missing", "allow_unexpected", "progress")
        if self.read_once is not None:
            _validate_flags(self, "read_once")
        _validate_positive("timeout_s", self.timeout_s)


def validated_keys(keys: object) -> tuple[KeySource, ...]:
    """Return the option ``trusted_keys`` as a tuple. Raises: ConfigError: It is no sequence of keys."""
    if isinstance(keys, str | bytes) or not isinstance(keys, Sequence):
        raise ConfigError(f"option trusted_keys must be a list of public keys; got {keys!r:.80}")
    if not all(isinstance(key, str | bytes | os.PathLike) for key in keys):
        raise ConfigError(f"option trusted_keys must hold paths of PEM files, or their bytes; got {keys!r:.80}")
    return tuple(keys)


def _stored_dtypes(rules: object) -> tuple[tuple[str, str], ...]:
    pairs = tuple(rules.items()) if isinstance(rules, Mapping) else rules
    if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise ConfigError(f"option stored_dtypes must be a dict of patterns and dtypes; got {rules!r}")
    for pattern, dtype in pairs:
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(f"option stored_dtypes has a bad pattern; got {pattern!r}, expected a glob over names")
        if dtype not in STORED_AS["float32"]:
            raise ConfigError(
                f"option stored_dtypes has a bad dtype for {pattern!r}; got {dtype!r}, expected one of "
                f"{', '.join(STORED_AS['float32'])}, in which float32 tensors are stored"
            )
    return pairs


def _check_replicas(rules: object) -> bool | tuple[tuple[str, bool], ...]:
    if isinstance(rules, bool):
        return rules
    pairs = tuple(rules.items()) if isinstance(rules, Mapping) else rules
    if not isinstance(pairs, tuple) or not all(map(_is_replica_rule, pairs)):
        raise ConfigError(
            f"option check_replicas must be True, False, or a dict of globs over names and True or False; got {rules!r}"
        )
    return pairs or True


def _is_replica_rule(pair: object) -> bool:
    match pair:
        case (str(pattern), bool()):
            return bool(pattern)
    return False


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
