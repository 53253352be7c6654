"""Choose how this process meets the other clients of its job, and keep the single connection of the process.

The first choice that applies:

1. the coordinator that an argument or the environment names (`dtckpt.coordination.discovery`)
2. a single client: it meets no others
3. the store of `torch.distributed`
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dtckpt.comm import fork_guard
from dtckpt.comm.background_threads import begin
from dtckpt.config import Config
from dtckpt.coordination import identity
from dtckpt.coordination.api import (
    Coordination,
    JobStatus,
    Member,
)
from dtckpt.coordination.barrier_texts import BESIDE, COMMAND
from dtckpt.coordination.discovery import find_coordinator
from dtckpt.coordination.single_client import SingleClientCoordination
from dtckpt.errors import ConfigError, ConfigTypeError

if TYPE_CHECKING:
    from dtckpt.coordination.grpc_client import GrpcCoordination

logger = logging.getLogger("dtckpt.coordination")
_lock = threading.RLock()
_current: Coordination | None = None
GOODBYE_S = 2.0
"""Longest wait for a goodbye to the clients of an earlier attempt."""
_arguments: dict[str, Any] = {}
"""The arguments of `initialize_multi_client`."""
_has_process_group = False
"""Whether `initialize_multi_client` has made the default process group."""


def connect(
    env: Mapping[str, str] | None = None,
    *,
    coordinator: str | None = None,
    heartbeat_timeout_s: float | None = None,
    fallback: str | None = None,
    attempt: int | None = None,
) -> Coordination:
    """Return a new coordination for this process, not yet registered.

    Args:
        env: Environment variables; default: the process's variables.
        coordinator: ``host:port``; default: from the environment.
        heartbeat_timeout_s: Silence after which a client counts as lost, in seconds; default: from the environment.
        fallback: As for `initialize_multi_client`; default: from the environment.
        attempt: The attempt of the job; default: from the environment.

    Raises:
        ConfigError: A variable has a value that cannot be used, or the clients have no place to meet.
        DependencyError: The installed protobuf or gRPC is too old for the coordinator.
        CoordinatorUnavailableError: The store of `torch.distributed` cannot be reached.
    """
    env = os.environ if env is None else env
    member = _member(env)
    if attempt is not None:
        member = replace(member, attempt=attempt, incarnation=identity.incarnation(attempt))
    timeout_s = Config.from_environ(env).heartbeat_timeout_s if heartbeat_timeout_s is None else heartbeat_timeout_s
    if endpoint := find_coordinator(env, coordinator):
        from dtckpt._proto import COORDINATOR, require

        require(*COORDINATOR)
        from dtckpt.coordination.grpc_client import GrpcCoordination
        from dtckpt.coordination.grpc_credentials import Access

        logger.info("the coordinator is at %s, says %s", endpoint.address, endpoint.source)
        access = Access.from_environ(env)
        primary = GrpcCoordination(endpoint.address, member, access=access, heartbeat_timeout_s=timeout_s)
        return _with_fallback(primary, env.get("DTCKPT_COORDINATOR_FALLBACK") if fallback is None else fallback)
    if member.num_clients == 1:
        return SingleClientCoordination(member)
    from dtckpt.coordination.torch_store import from_environment

    return from_environment(member, heartbeat_timeout_s=timeout_s)


def _with_fallback(coordination: GrpcCoordination, fallback: str | None) -> Coordination:
    if not fallback:
        return coordination
    from dtckpt.coordination.fallback import FALLBACKS, with_fallback

    if fallback not in FALLBACKS:
        expected = ", ".join(FALLBACKS)
        raise ConfigError(f"fallback (or DTCKPT_COORDINATOR_FALLBACK) is {fallback!r}; expected {expected}, or none")
    return with_fallback(coordination)


def _member(env: Mapping[str, str]) -> Member:
    config = Config.from_environ()
    job = env.get("DTCKPT_JOB") or env.get("DTENSOR_JOB_NAME") or env.get("TORCHELASTIC_RUN_ID") or config.job_name
    attempt = Config.from_environ(env).attempt
    if config.num_clients > 1 and not env.get("DTCKPT_ATTEMPT"):
        from dtckpt.comm.default_process_group import attempt_of_default_group

        # The attempt on which the clients have agreed, if any, because nodes of a job may count restarts differently.
        agreed = attempt_of_default_group()
        attempt = attempt if agreed is None else agreed
    return Member(job, config.client_id, config.num_clients, identity.incarnation(), attempt, config.job_name)


def current_coordination() -> Coordination:
    """Return this process's coordination; connect on first use, and leave when the process exits.

    Raises:
        ForkedProcessError: The parent of this forked process uses checkpoints.
        DtckptError: As `connect`.
    """
    fork_guard.claim_process()
    with _lock:
        if _current is None:
            set_coordination(connect())
        assert _current is not None  # noqa: S101  set just above
        return _current


def joined_member() -> Member | None:
    """Return this client's place in the job that this process is connected to; None without a connection."""
    return None if _current is None else _current.member


def rejoin(timeout_s: float, call: str) -> Coordination:
    """Leave the job as it was, and join it with the clients that the environment describes now.

    The clients have made the default process group anew, among other processes. In its store they agree on an attempt
    that is newer than the attempts of all of them. Without a process group, ``DTCKPT_ATTEMPT`` tells the attempts
    apart; if nothing has changed, this client stays in the job.

    Collective: Over all clients of the new process group.

    Blocks: On the slowest client, at most for ``timeout_s``.

    Args:
        timeout_s: Longest wait for the other clients, in seconds.
        call: The function by which all clients come, for errors.

    Raises:
        BarrierTimeoutError: Clients did not come in time; its ``missing`` has their ids.
        ConfigError: The environment and the process group describe different clients.
        DtckptError: As `connect`.
    """
    from dtckpt.comm import default_process_group, process_groups, torch_private  # they import torch

    fork_guard.claim_process()
    torch_private.forget_meshes()
    config, before = Config.from_environ(), _current
    rank, world = process_groups.rank(), process_groups.size()
    if rank is not None and (rank, world) != (config.client_id, config.num_clients):
        raise ConfigError(
            f"the environment says that this is client {config.client_id} of {config.num_clients}, and the default "
            f"process group that it is client {rank} of {world}; set RANK and WORLD_SIZE when you make the process "
            "group anew, or remove both"
        )
    here = _member(os.environ)
    attempt = here.attempt if before is None else max(here.attempt, before.member.attempt + 1)
    if rank is not None and config.num_clients > 1:
        attempt = default_process_group.agree_anew(attempt, config, timedelta(seconds=timeout_s), call)
    elif before is not None and _is_same_place(here, before.member):
        return before
    elif config.num_clients > 1:
        attempt = here.attempt  # the clients have no other place to agree on one
    if before is not None:
        set_coordination(None)
        # A coordinator hears the goodbye before it hears of the new attempt, which would fence this client. The process
        # that had an old store may be gone, and a goodbye to it takes a while.
        with suppress(TimeoutError):
            begin(before.leave, "dtckpt-leave").result(GOODBYE_S)
    coordination = connect(**_arguments, attempt=attempt)
    set_coordination(coordination)
    return coordination


def _is_same_place(here: Member, before: Member) -> bool:
    """Whether the environment describes the place in the job that this client has, whatever the attempt."""
    return replace(here, attempt=before.attempt, incarnation=before.incarnation) == before


def connect_beside(name: str) -> Coordination:
    """Return a further coordination of this process, not yet registered, in a job beside its own.

    Work that runs beside the job's saves and restores needs its own job, because in one job a client is in one
    operation at a time. The caller leaves the job.

    Args:
        name: Name of the work. A client that left such a job must not join it again, because others may still count it
            as left.

    Raises:
        DtckptError: As `connect`.
    """
    member = current_coordination().member
    env = {**os.environ, "DTCKPT_JOB": f"{member.job}{BESIDE}{name}"}
    return connect(env, **_arguments, attempt=member.attempt)


@contextmanager
def as_job_of_command(heartbeat_timeout_s: float) -> Iterator[Coordination]:
    """Let this process coordinate in a new job beside its own; yield this coordination, and leave the job in the end.

    So a command in the shell of a training job does not take the place of a client of the job. Two commands at one time
    do not take each other's place.

    Args:
        heartbeat_timeout_s: Half of the time for which this process looks for the coordinator.

    Raises:
        DtckptError: As `connect`.
    """
    job = f"{_member(os.environ).job}{BESIDE}{COMMAND}{secrets.token_hex(4)}"
    own = connect({**os.environ, "DTCKPT_JOB": job}, heartbeat_timeout_s=heartbeat_timeout_s, fallback="")
    before = _current
    set_coordination(own)
    try:
        yield own
    finally:
        set_coordination(before)
        own.leave()


def set_coordination(coordination: Coordination | None) -> None:
    """Make ``coordination`` the coordination of this process. The owner of the earlier coordination leaves it."""
    global _current  # noqa: PLW0603  (one coordination per process)
    with _lock:
        _current = coordination


def initialize_multi_client(
    coordinator: str | None = None,
    *,
    enable_coordination_service: bool = True,
    heartbeat_timeout_s: float | None = None,
    fallback: str | None = None,
) -> None:
    """Connect this process to the other clients of its job and register it.

    If there are several clients and no default process group of `torch.distributed`, the call makes the group, because
    operators and changes of layout need it. The group uses Gloo on the host, and also NCCL if there are GPUs. The
    clients find each other

    1. at the store that ``MASTER_ADDR`` and ``MASTER_PORT`` name, as under torchrun;
    2. else through the coordinator, if there is one: client 0 opens a port, and sends its address to the others;
    3. else at the first address of ``DTENSOR_JOBS``, where client 0 listens.

    Collective: Over all clients, if the call makes the process group.

    Blocks: On the slowest client then, at most 5 minutes.

    Args:
        coordinator: ``host:port`` of a running ``dtckpt-coordinator serve``; default: the coordinator that the
            environment names (`dtckpt.coordination.discovery`), else the store of `torch.distributed`.
        enable_coordination_service: Register this client now, so that the others notice its loss. False: the client
            registers at its first need, such as a save, or a process group through the coordinator.
        heartbeat_timeout_s: Silence after which a client counts as lost; default ``DTCKPT_HEARTBEAT_TIMEOUT_S`` or 60.
        fallback: ``process_group``: when the coordinator has not answered one of the clients for two heartbeat
            timeouts, all clients meet at the store of `torch.distributed` from then on. All clients pass the same
            value. Default: ``DTCKPT_COORDINATOR_FALLBACK``, else none: calls that need the coordinator fail.

    Raises:
        ConfigError: The function was called before, or the environment cannot be used.
        ForkedProcessError: The parent of this forked process uses checkpoints.
        FencedError: Another process has this client's place.
        CoordinatorUnavailableError: The meeting point cannot be reached.
        BarrierTimeoutError: Clients did not come in time.
        CoordinationError: The clients came, but could not be connected.
    """
    fork_guard.claim_process()
    if coordinator is not None and not isinstance(coordinator, str):
        raise ConfigTypeError(
            f"initialize_multi_client: coordinator is {coordinator!r}, expected host:port; pass "
            "enable_coordination_service by its name"
        )
    with _lock:
        if _current is not None:
            raise ConfigError(
                "multi-client is already initialized (by an earlier call, or by first use); call it once, before "
                "anything that coordinates, or call shutdown_multi_client() in between"
            )
        endpoint = find_coordinator(os.environ, coordinator)
        coordination: Coordination | None = None
        try:
            made = endpoint is None or _has_store_address()
            if made:
                _make_process_group()
            arguments = {"coordinator": coordinator, "heartbeat_timeout_s": heartbeat_timeout_s, "fallback": fallback}
            coordination = connect(**arguments)  # type: ignore[arg-type]  # of several types
            if enable_coordination_service:
                coordination.register()
            if endpoint is not None and not made:
                _make_process_group(coordination, endpoint.address)
        except BaseException:
            if coordination is not None:
                coordination.leave()
            _end_process_group()
            raise
        set_coordination(coordination)
        _arguments.clear()
        _arguments.update(arguments)


def _has_store_address() -> bool:
    return all(os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))


def _make_process_group(coordination: Coordination | None = None, coordinator: str = "") -> None:
    """Make the default process group if several clients lack it; through the coordinator if there is one."""
    global _has_process_group  # noqa: PLW0603  (one default group per process)
    if Config.from_environ().num_clients == 1:
        return
    from dtckpt.coordination import multi_client_group  # it imports torch, which a single client may not need

    if multi_client_group.is_wanted():
        _has_process_group = True
        if coordination is None:
            multi_client_group.make_at_store()
        else:
            multi_client_group.make_through(coordination, coordinator)


def _end_process_group() -> None:
    """Destroy the default process group if `initialize_multi_client` has made it."""
    global _has_process_group  # noqa: PLW0603  (one default group per process)
    if _has_process_group:
        from dtckpt.coordination import multi_client_group

        _has_process_group = False
        multi_client_group.end()


def job_status() -> JobStatus:
    """Return all tasks of this client's job, with full names and states, and the barriers that are open.

    Asks the coordinator if there is one, else the store where the clients meet. A client that has not joined its job
    yet joins it by this call, as by `initialize_multi_client`.

    Raises:
        FencedError: Another process has this client's place.
        CoordinatorUnavailableError: The meeting point cannot be reached.

    >>> [task.name for task in job_status().tasks]
    ['localhost/replica:0/task:0']
    """
    coordination = current_coordination()
    coordination.register()
    return coordination.status()


def shutdown_multi_client() -> None:
    """Leave the job, if this process is part of one. Idempotent; runs by itself when the process exits.

    The call destroys the default process group only if `initialize_multi_client` has made it.
    """
    if fork_guard.is_forked():
        return  # the parent process is the client
    with _lock:
        coordination = _current
        set_coordination(None)
        _arguments.clear()
    if coordination is not None:
        coordination.leave()
    _end_process_group()


atexit.register(shutdown_multi_client)
