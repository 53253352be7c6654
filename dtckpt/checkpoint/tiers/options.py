"""`LocalTier`: the options of checkpoints in the memory or on the local disks of the hosts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from dtckpt.coordination import identity
from dtckpt.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTier:
    """Frequent checkpoints on the hosts themselves; give it to `dtckpt.CheckpointManager`.

    All clients pass equal options, except ``path``, ``host``, ``domain`` and ``address``, which may differ by host.

    Args:
        path: A directory of this host that outlives the processes: below ``/dev/shm``, a mounted tmpfs, or a local
            disk. All clients of a host pass the same directory.
        every_steps: The tier saves steps that are multiples of this number.
        copies: Number of hosts that hold each part of a step, including the host that saved it.
        keep: Number of steps that the tier keeps. While copies of the newest steps are missing, it also keeps the
            newest step that has all of its copies.
        near_copies: Whether a host keeps a copy of each value that its clients have and clients of other hosts save.
            Examples are the weights of norms, and most values under HSDP and DDP. Hosts that come back then read
            nothing from each other. A save copies these values, too, and the tier needs memory for them.
        max_nbytes: Bound on the bytes below ``path`` of all clients of one host, including copies for other hosts. The
            tier skips a save that would exceed it. Default: the available space.
        max_rate: Bound on the bytes per second that a client sends to other hosts. Default: none.
        max_root_rate: Bound on the bytes per second that a client writes to the root. Default: none.
        link_rate: Bytes per second that hosts should send to each other. Below a quarter of this rate a warning names
            the host: copies may use the wrong network; see ``address``. Default: no warning.
        max_restores: Number of restores of a step from the tier without a newer save. Further restores skip the step:
            so a job does not try a state for ever that fails soon after its restore, as by NaN. Default: no bound.
        host: Name of this host. Default: the variable ``DTCKPT_HOST``, else its host name.
        domain: The part of the cluster that fails as one, such as a rack or a power supply. Copies lie in other domains
            if there are several. Default: the variable ``DTCKPT_DOMAIN``, else each host is a separate domain.
        address: Address at which other hosts reach this host. Default: the address from which this host reaches
            ``MASTER_ADDR``.
        timeout_s: Longest wait for an answer of another host, in seconds.

    Raises:
        ConfigError: A value is out of range.
    """

    path: str | PathLike[str]
    every_steps: int = 10
    copies: int = 2
    keep: int = 2
    near_copies: bool = True
    max_nbytes: int | None = None
    max_rate: float | None = None
    max_root_rate: float | None = None
    link_rate: float | None = None
    max_restores: int | None = None
    host: str | None = None
    domain: str | None = None
    address: str | None = None
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("every_steps", "copies", "keep", "max_restores"):
            value = getattr(self, name)
            if value is None and name == "max_restores":
                continue
            if type(value) is not int or value < 1:
                raise ConfigError(f"LocalTier: {name} must be a whole number from 1 on; got {value!r}")
        if type(self.near_copies) is not bool:
            raise ConfigError(f"LocalTier: near_copies must be True or False; got {self.near_copies!r}")
        for name in ("max_nbytes", "max_rate", "max_root_rate", "link_rate", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise ConfigError(f"LocalTier: {name} must be positive; got {value!r}")
        for name in ("host", "domain"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value.isprintable() and 0 < len(value) <= 200):
                raise ConfigError(f"LocalTier: {name} must be a name of 1 to 200 printable characters; got {value!r}")

    @property
    def folder(self) -> Path:
        """The directory, absolute."""
        return Path(self.path).absolute()

    @property
    def host_name(self) -> str:
        """The name of this host."""
        return self.host or identity.host_name()

    @property
    def domain_name(self) -> str:
        """The name of this host's failure domain."""
        return self.domain or os.environ.get("DTCKPT_DOMAIN") or self.host_name
