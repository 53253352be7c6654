"""The interface through which clients meet: the `Coordination` Protocol, and the values that go through it.

Clients send each other one kind of message: they arrive at a barrier, with a vote. A client that fails votes no with a
reason. So the others learn the reason at once, and do not wait for a deadline.

Clients meet at one *meeting point*: the coordinator (`GrpcCoordination`), a `torch.distributed` store
(`TorchStoreCoordination`), or, for a single client, nowhere (`SingleClientCoordination`). `dtckpt.coordination.connect`
chooses. All implementations keep the same rules:

* A barrier passes when every participant has arrived with an ok vote and the same topic.
* There is one verdict, equal for all clients, and it stays: late and repeated arrivals get the stored verdict.
* An arrival belongs to one call of one incarnation of one client. No rule counts arrivals.
* A client that is silent for longer than the heartbeat timeout is lost, and every open barrier of which it is a
  participant fails. The coordinator, or each client at a store, measures silence with its own monotonic clock. A client
  that never registered is not lost but missing.
* A name may be used again. The meeting point numbers the rounds of a name, by the rules of
  `dtckpt.coordination.barrier_rules`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from dtckpt import errors

# Each client with ``collect=True`` gets every payload: with 4096 clients 16 MiB. The coordinator has the same limits,
# and refuses longer values (`dtckpt_server.events`).
MAX_PAYLOAD_BYTES = 4096
MAX_NAME_BYTES = 256
MAX_TOPIC_BYTES = 256


def wire_text(text: str) -> str:
    """Return ``text`` in a form that can be sent: cut to the allowed length, and with lone surrogates escaped.

    UTF-8 cannot encode lone surrogates; they come from file names that are not valid Unicode.
    """
    return text[: errors.MAX_MESSAGE_CHARS].encode("utf-8", "backslashreplace").decode()


@dataclass(frozen=True, slots=True)
class Vote:
    """A client's vote, which it brings when it arrives at a barrier.

    Args:
        ok: False fails the barrier for all clients, at once.
        payload: At most `MAX_PAYLOAD_BYTES`; participants that ask with ``collect=True`` get it.
        topic: Digest of the client's subject, such as a save's plan; all topics must be equal.
        code: With ``ok=False``: the error class of `errors.to_wire`.
        reason: With ``ok=False``: its message.
    """

    ok: bool = True
    payload: bytes = b""
    topic: bytes = b""
    code: str = ""
    reason: str = ""

    def __post_init__(self) -> None:
        # A vote that is too long fails here, on its own client; later it would fail the barrier.
        for what, value, limit in (
            ("payload", self.payload, MAX_PAYLOAD_BYTES),
            ("topic", self.topic, MAX_TOPIC_BYTES),
        ):
            if len(value) > limit:
                raise errors.ConfigError(f"vote's {what} is too long: got {len(value)} bytes, at most {limit} fit")
        # Cut, not refused: these texts come from any exception, and the report of a failure must not fail.
        object.__setattr__(self, "code", wire_text(self.code)[:64])
        object.__setattr__(self, "reason", wire_text(self.reason))

    @classmethod
    def of_error(cls, error: BaseException) -> Vote:
        """Return the no-vote that makes every participant raise this error."""
        code, reason = errors.to_wire(error)
        return cls(ok=False, code=code, reason=reason)


YES = Vote()


@dataclass(frozen=True, slots=True)
class Operation:
    """A save or a restore, to which several barriers belong. A client is in one operation at a time.

    Clients come to the operation's first barrier with `BEGIN`, and to later barriers with the operation that the first
    barrier returned.

    Args:
        id: Equal for all participants; the meeting point makes it at the first barrier. "": not begun.
        calls: Number of the call with which each participant began; empty where a coordinator knows them.
    """

    id: str = ""
    # Not compared: the id alone is the identity, and a dict has no hash.
    calls: Mapping[int, int] = field(default_factory=dict, compare=False)


BEGIN = Operation()


@dataclass(frozen=True, slots=True)
class Position:
    """A client's own view of the round for which it comes; see `dtckpt.coordination.barrier_rules`.

    Args:
        text: Compared for equality only. At most `MAX_NAME_BYTES`.
        is_certain: Whether a client that skipped rounds would have another text.
    """

    # The meeting point never orders positions: it treats steps and counts of calls in the same way.
    text: str = ""
    is_certain: bool = False


NO_POSITION = Position()


@dataclass(frozen=True, slots=True)
class Verdict:
    """A passed barrier.

    Args:
        name: Of the barrier.
        generation: Number of the round among the rounds of its name.
        payloads: By client, for callers that asked with ``collect=True``.
        operation: The operation that began with this barrier, or that it belongs to.
        cut_off: The clients whose arrival succeeded only at a later try, or after the coordinator lost its state.
    """

    name: str
    generation: int
    payloads: Mapping[int, bytes]
    operation: Operation = BEGIN
    # Such a client may have missed rounds of the others, so its count of operations is less reliable than theirs.
    cut_off: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Member:
    """The identity of a client: its place in the job, and the process that has this place.

    Args:
        job: Name of the job.
        client: From 0 to ``num_clients`` - 1.
        num_clients: Of the job.
        incarnation: Random id of the process, different from an earlier process in the same place.
        attempt: Number of the start of the whole job, from 0 to 2^32 - 1.
        job_name: Name of the job in full task names (`dtckpt.job_name`); empty: ``job``.

    Raises:
        ConfigError: The numbers make no sense, or a name is not valid Unicode.
    """

    job: str
    client: int
    num_clients: int
    incarnation: int
    attempt: int = 0
    job_name: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.client < self.num_clients:
            raise errors.ConfigError(
                f"client {self.client} does not fit job {self.job!r}: expected an id from 0 to {self.num_clients - 1}"
            )
        # A field of 32 bits on the wire.
        if not 0 <= self.attempt < 1 << 32:
            raise errors.ConfigError(f"attempt of job {self.job!r} is {self.attempt}; expected 0 to 2^32 - 1")
        for name in (self.job, self.job_name):
            try:
                # Names go into messages and keys as UTF-8. An error there would appear in the middle of a barrier or a
                # heartbeat.
                name.encode()
            except UnicodeEncodeError as error:
                raise errors.ConfigError(f"name of the job, {name!r}, is not valid Unicode: {error.reason}") from None

    def full_task_name(self, client: int | None = None) -> str:
        """Return the full task name of ``client``, by default of this client."""
        return f"{self.job_name or self.job}/replica:0/task:{self.client if client is None else client}"


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a client's work. A stuck client still sends heartbeats, so only progress separates slow from hung.

    Args:
        phase: Name of the phase, as ``write``.
        step: Training step, 0 if there is none.
        bytes_done: Of the phase.
        bytes_total: Of the phase; 0: not known.

    Raises:
        ConfigError: A value cannot be sent. Checked here, because the heartbeat thread has no caller to raise it to.
    """

    phase: str = ""
    step: int = 0
    bytes_done: int = 0
    bytes_total: int = 0

    def __post_init__(self) -> None:
        numbers = {name: getattr(self, name) for name in ("step", "bytes_done", "bytes_total")}
        if not isinstance(self.phase, str) or not all(map(_is_sendable, numbers.values())):
            raise errors.ConfigError(
                f"progress is phase {self.phase!r} with {numbers}; expected a text, and whole numbers below 2^63"
            )
        object.__setattr__(self, "phase", wire_text(self.phase))
        for name, number in numbers.items():
            # Plain integers: heartbeats at a store are JSON, which has no NumPy numbers.
            object.__setattr__(self, name, operator.index(number))


def _is_sendable(number: object) -> bool:
    # A signed field of 64 bits on the wire. `__index__` lets NumPy's and PyTorch's integers pass, and no floats.
    return hasattr(number, "__index__") and -(1 << 63) <= operator.index(number) < 1 << 63


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """One client, as the others see it.

    Args:
        client: Its id.
        state: unknown, registered, suspect, lost, left or fenced.
        heartbeat_age_s: Seconds since its last heartbeat; None: not known.
        progress_age_s: Seconds since its progress last changed; None: not known.
        host: Name of its host; empty: not known.
        name: Its full task name, as `dtckpt.full_job_name` returns it.
    """

    client: int
    state: str
    incarnation: int = 0
    heartbeat_age_s: float | None = None
    progress: Progress = Progress()
    # Beside the heartbeat's age, because a stuck client still sends heartbeats: this age separates slow from hung.
    progress_age_s: float | None = None
    host: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class BarrierStatus:
    """One open barrier and the participants that have not arrived.

    The coordinator lists only the first of thousands in ``missing``; ``num_unlisted`` is the number of the others.
    """

    name: str
    generation: int
    num_participants: int
    missing: tuple[int, ...]
    age_s: float | None = None
    num_unlisted: int = 0

    @property
    def num_missing(self) -> int:
        return len(self.missing) + self.num_unlisted


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The job, as this client sees it."""

    job: str
    num_clients: int
    tasks: tuple[TaskStatus, ...]
    barriers: tuple[BarrierStatus, ...]
    attempt: int = 0


@runtime_checkable
class Coordination(Protocol):
    """One client's connection to the others of its job.

    Thread-safe: several threads may wait at barriers of different names at the same time.
    """

    @property
    def member(self) -> Member:
        """Who this client is."""
        ...

    @property
    def heartbeat_timeout_s(self) -> float:
        """Silence after which a client is lost."""
        ...

    def register(self) -> None:
        """Announce this client and start its heartbeats. Idempotent; `barrier` calls it.

        Raises:
            FencedError: Another live process, or a newer attempt, has this client's place.
            CoordinatorUnavailableError: The meeting point cannot be reached.
        """
        ...

    def heartbeat(self, progress: Progress) -> None:
        """Set the progress that heartbeats report. A new phase is sent at once.

        Never blocks. A thread sends heartbeats, also between calls of this method.
        """
        ...

    def barrier(
        self,
        name: str,
        vote: Vote = YES,
        *,
        timeout_s: float,
        participants: Sequence[int] | None = None,
        collect: bool = False,
        operation: Operation | None = None,
        position: Position = NO_POSITION,
    ) -> Verdict:
        """Wait until all participants (default: all clients) have arrived.

        Collective: Over ``participants``. Returns on all clients, or raises the same error class and text on all.
        Blocks: At most about ``timeout_s``; the shortest timeout among the participants that arrived decides.

        An error has these attributes, where they apply. ``is_verdict``: the error is the barrier's verdict; without it,
        the caller does not know how the round ended. ``was_cut_off``: this client's arrival succeeded only at a later
        try, or after the coordinator lost its state. ``is_retold``: the error comes from an earlier round, which this
        client had missed.

        Args:
            name: 1 to `MAX_NAME_BYTES` bytes of UTF-8.
            vote: This client's vote.
            timeout_s: Seconds.
            participants: Ids of the clients that take part.
            collect: Whether to return the payloads of all participants.
            operation: The operation that the barrier belongs to; `BEGIN` at its first one. None: it stands alone.
            position: Tells late arrivals from new ones.

        Raises:
            ConfigError: The arguments cannot be used (this caller only).
            BarrierConflictError: This client is no participant (this caller only); or topics or participants differ,
                or a participant is in another operation.
            BarrierTimeoutError: The clients in ``missing`` did not arrive in time.
            ClientLostError: The clients in ``clients`` fell silent or left.
            BarrierCancelledError: A participant was interrupted while it waited.
            FencedError: Another process has taken this client's place.
            CoordinatorUnavailableError: The meeting point cannot be reached.
            DtckptError: Any class that a no-vote named, else ClientFailedError.
        """
        ...

    def leave(self) -> None:
        """Leave the job: say goodbye, stop threads and close connections. Idempotent."""
        ...

    def status(self) -> JobStatus:
        """Return the states of all clients, and the open barriers with their missing clients."""
        ...
