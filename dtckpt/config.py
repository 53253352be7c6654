"""Configuration from environment variables: this client's id, its job, and the number of clients.

Four sources, of which the first that is set counts: TensorFlow's variables (``DTENSOR_JOBS``, ``DTENSOR_CLIENT_ID``,
``DTENSOR_NUM_CLIENTS``), torchrun's (``RANK``, ``WORLD_SIZE``), the default process group that the program has made,
else a single client. The number of addresses in ``DTENSOR_JOBS`` is the number of clients; ``DTENSOR_NUM_CLIENTS``
counts only without them.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from dtckpt.errors import ConfigError, ConfigTypeError

# Longer than clients usually stall: a call that holds the interpreter's lock holds their heartbeats back, too.
DEFAULT_HEARTBEAT_TIMEOUT_S = 60.0
_BNS_PREFIX = "/bns/"


@dataclass(frozen=True, slots=True)
class Config:
    """The values of the variables (None: not set). Properties parse and check them.

    A property raises `ConfigError` if it cannot use a value. So a bad variable affects only callers that need it.
    """

    jobs_text: str | None
    client_id_text: str | None
    num_clients_text: str | None
    job_name_text: str | None
    heartbeat_text: str
    heartbeat_timeout_text: str | None
    job: str | None
    rank: str | None
    world_size: str | None
    local_world_size_text: str | None
    attempt_text: str
    host_transport_text: str

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read the variables, by default from the environment of this process."""
        get = (os.environ if environ is None else environ).get
        rank, world_size = get("RANK"), get("WORLD_SIZE")
        if environ is None and None in (rank, world_size):
            # Other launchers than torchrun (SLURM's, MPI's, Lightning's) set none of the two, or one.
            rank, world_size = _position_in_default_group() or (rank, world_size)
        return cls(
            jobs_text=get("DTENSOR_JOBS"),
            client_id_text=get("DTENSOR_CLIENT_ID"),
            num_clients_text=get("DTENSOR_NUM_CLIENTS"),
            job_name_text=get("DTENSOR_JOB_NAME"),
            heartbeat_text=get("DTENSOR_ENABLE_HEARTBEAT", "true"),
            heartbeat_timeout_text=get("DTCKPT_HEARTBEAT_TIMEOUT_S"),
            job=get("DTCKPT_JOB"),
            rank=rank,
            world_size=world_size,
            local_world_size_text=get("LOCAL_WORLD_SIZE"),
            attempt_text=get("DTCKPT_ATTEMPT") or get("TORCHELASTIC_RESTART_COUNT") or "0",
            host_transport_text=get("DTCKPT_HOST_TRANSPORT", "true"),
        )

    @property
    def is_torchrun(self) -> bool:
        """Whether client id and count come from torchrun's variables, or from the default process group."""
        tensorflow = (self.jobs_text, self.client_id_text, self.num_clients_text)
        return tensorflow == (None, None, None) and (self.rank, self.world_size) != (None, None)

    @property
    def jobs(self) -> list[str]:
        """One entry per client: the addresses of ``DTENSOR_JOBS``, else full job names; none for a single client."""
        if self.jobs_text is None:
            count = self.num_clients
            return [f"{self.job_name}/replica:0/task:{task}" for task in range(count)] if count > 1 else []
        entries = self.jobs_text.split(",")
        if any(entry.startswith(_BNS_PREFIX) for entry in entries):
            _require_sorted(entries)
        return entries

    @property
    def num_clients(self) -> int:
        if self.is_torchrun:
            return self._torchrun_position[1]
        if self.jobs_text is not None:
            return len(self.jobs)
        return 1 if self.num_clients_text is None else _integer("DTENSOR_NUM_CLIENTS", self.num_clients_text, 1, None)

    @property
    def client_id(self) -> int:
        if self.is_torchrun:
            return self._torchrun_position[0]
        text = "0" if self.client_id_text is None else self.client_id_text
        return _integer("DTENSOR_CLIENT_ID", text, 0, self.num_clients)

    @property
    def job_name(self) -> str:
        if self.job_name_text is not None:
            return self.job_name_text
        return "localhost" if self.num_clients == 1 else self.job or "worker"

    @property
    def heartbeat_enabled(self) -> bool:
        return self.heartbeat_text.lower() in ("true", "1")

    @property
    def heartbeat_timeout_s(self) -> float:
        """Silence after which a client counts as lost."""
        if not self.heartbeat_timeout_text:
            return DEFAULT_HEARTBEAT_TIMEOUT_S
        try:
            timeout_s = float(self.heartbeat_timeout_text)
        except ValueError:
            timeout_s = math.nan
        if not 0 < timeout_s < math.inf:
            raise ConfigError(
                f"DTCKPT_HEARTBEAT_TIMEOUT_S is {self.heartbeat_timeout_text!r}; expected a positive number of seconds"
            )
        return timeout_s

    @property
    def uses_host_transport(self) -> bool:
        """Whether clients of one host may exchange messages without the network (see `dtckpt.comm.same_host`)."""
        return self.host_transport_text.lower() in ("true", "1")

    @property
    def attempt(self) -> int:
        """Number of restarts of the job, as far as the environment of this client tells."""
        if not self.attempt_text.isdecimal():
            raise ConfigError(
                f"DTCKPT_ATTEMPT (or TORCHELASTIC_RESTART_COUNT) is {self.attempt_text!r}; expected a whole number"
            )
        return int(self.attempt_text)

    @property
    def local_world_size(self) -> int:
        """Number of clients that torchrun started on this machine; 1 if torchrun did not start them."""
        if not self.is_torchrun or self.local_world_size_text is None:
            return 1
        return _integer("LOCAL_WORLD_SIZE", self.local_world_size_text, 1, self.num_clients + 1)

    @property
    def _torchrun_position(self) -> tuple[int, int]:
        """This client's rank, and the number of clients."""
        for name, text, other in (("RANK", self.rank, "WORLD_SIZE"), ("WORLD_SIZE", self.world_size, "RANK")):
            if text is None:
                raise ConfigError(f"{name}: is not set, but {other} is; set both variables or neither")
        count = _integer("WORLD_SIZE", self.world_size or "", 1, None)
        return _integer("RANK", self.rank or "", 0, count), count


def _position_in_default_group() -> tuple[str, str] | None:
    """Return the rank and the size of the default process group of `torch.distributed`; None if there is none."""
    # Not imported: a program without torch, as the command line is, has no process group.
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return None
    return str(dist.get_rank()), str(dist.get_world_size())


def _integer(name: str, text: str, low: int, end: int | None) -> int:
    """Parse the variable's text as an integer ``n`` with ``low <= n < end``; None as ``end``: no upper bound."""
    allowed = f"an integer of at least {low}" if end is None else f"an integer from {low} to {end - 1}"
    try:
        number = int(text)
    except ValueError:
        raise ConfigError(f"{name}: got {text!r}, expected {allowed}") from None
    if number < low or (end is not None and number >= end):
        raise ConfigError(f"{name}: got {number}, expected {allowed}")
    return number


def _require_sorted(entries: list[str]) -> None:
    """Refuse BNS addresses whose task numbers do not ascend, because an entry's position is the client's id."""
    tasks = [entry.rpartition("/")[2].partition(":")[0] for entry in entries]
    if not all(task.isdecimal() for task in tasks):
        raise ConfigTypeError(f"DTENSOR_JOBS: got tasks {', '.join(tasks)}, expected a number behind the last '/'")
    if [int(task) for task in tasks] != sorted(map(int, tasks)):
        raise ConfigError(f"DTENSOR_JOBS: got tasks {', '.join(tasks)}, expected them in ascending order")
