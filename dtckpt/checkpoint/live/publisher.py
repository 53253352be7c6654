"""`Publisher`: a job publishes versions of its state from the memory of its hosts; other jobs read them.

::

    training      | publish: copy |  next steps ...
    background                    | digests | held: all parts are whole and known to the registry: readable
    next publish  | retired versions that no reader leases give their memory back | copy | ...

The bytes stay here. The registry (`dtckpt.coordination.feeds`) knows which client has which part, which clients read,
and when memory may be freed. A version becomes readable with its last part, so a reader sees all of a version or
nothing of it.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Literal, overload
from weakref import WeakKeyDictionary

import torch

from dtckpt.checkpoint.collective import Collective
from dtckpt.checkpoint.leaves import torch_dtype
from dtckpt.checkpoint.live.fan_out import MAX_COPIES
from dtckpt.checkpoint.live.feed_client import feed_client
from dtckpt.checkpoint.live.lent_version import POLL_S, LentVersion, await_readers, validate_lendable
from dtckpt.checkpoint.live.own_registry import OwnRegistry, start_registry
from dtckpt.checkpoint.live.pulls import PullService
from dtckpt.checkpoint.live.version_checkpoint import index_digest
from dtckpt.checkpoint.live.versions import (
    PartAddress,
    job_of_feed,
    location_of_version,
    save_of_version,
    title_of_version,
)
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.parts.announced_boxes import AnnouncedBoxes
from dtckpt.checkpoint.parts.host_folder import PartFile
from dtckpt.checkpoint.parts.layout_tags import validate_tags
from dtckpt.checkpoint.parts.lending_folder import LendingFolder
from dtckpt.checkpoint.parts.lent_memory import LentMemory
from dtckpt.checkpoint.parts.part_writer import PartInProgress, described_pieces
from dtckpt.checkpoint.parts.peers import Peer, own_address
from dtckpt.checkpoint.parts.records import NO_COPIES, PartIndex, SaveId
from dtckpt.checkpoint.parts.server import PartServer
from dtckpt.checkpoint.saving.agree import Agreed, Proposal, agree
from dtckpt.checkpoint.saving.plan import SavePlan
from dtckpt.checkpoint.saving.report import SaveReport
from dtckpt.checkpoint.saving.save_handle import SaveHandle
from dtckpt.checkpoint.saving.state import State, state_of_tree
from dtckpt.checkpoint.saving.stored_dtypes import CAST_DTYPES, Casts
from dtckpt.checkpoint.timing import BARRIER
from dtckpt.comm import fork_guard
from dtckpt.coordination.api import Coordination
from dtckpt.coordination.connect import current_coordination
from dtckpt.coordination.feeds.client import FeedClient
from dtckpt.coordination.feeds.events import MAX_KEEP, validate_feed
from dtckpt.coordination.identity import host_name
from dtckpt.errors import (
    ConfigError,
    DtckptError,
    FeedConflictError,
    StorageFullError,
    TicketError,
    VersionGoneError,
    VersionLeasedError,
)
from dtckpt.format.digest import bytes_digest
from dtckpt.format.dtypes import DTYPES

logger = logging.getLogger("dtckpt.live")

_open_feeds: WeakKeyDictionary[Coordination, set[str]] = WeakKeyDictionary()
"""The feeds that publishers of this process have open: two of one feed would free each other's versions."""
WhenFull = Literal["wait", "skip", "raise"]
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  every user's directory lies below it, and is private


def default_folder() -> Path:
    """Return the directory of live versions: ``DTCKPT_LIVE_FOLDER``, else one of this user in shared memory."""
    if named := os.environ.get("DTCKPT_LIVE_FOLDER"):
        return Path(named).absolute()
    memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    return memory / f"dtckpt-live-{os.getuid()}"


@dataclass(frozen=True, slots=True, eq=False)
class _BegunVersion:
    """A version whose elements are in memory, before its digests are taken.

    Args:
        save: Its identity.
        tree_digest: For the registry; see `save_of_version`.
        agreed: The agreed plan, and this client's state in the file, or where it lies.
        part: The file.
        lent: The memory, if there is no file.
        tags: The layout tags, by glob on names.
    """

    save: SaveId
    tree_digest: bytes
    agreed: Agreed
    part: PartInProgress
    lent: LentMemory | None
    tags: Mapping[str, str]

    @property
    def memory(self) -> PartFile | LentMemory:
        """Where readers find the elements."""
        return self.lent or self.part.take(self.agreed.plan, self.agreed.state)


class Publisher:
    """Publishes versions of a job's state to a feed. A context manager.

    Collective: Over all clients of the job, with the same arguments but ``folder`` and ``address``; barrier
    ``live/registry``, then ``live/open``.

    Args:
        name: Name of the feed, in the coordinator.
        keep: How many readable versions stay in memory. While the next version is copied there is one more.
        folder: A directory in the memory of this host. Readers of this host and user map it; the others ask this
            client's server. Default: ``DTCKPT_LIVE_FOLDER``, else one of this user below ``/dev/shm``.
        max_nbytes: Bound on the bytes that the clients of this host take together; checked before the first byte is
            copied. Default: the space that there is.
        when_full: What `publish` does while readers hold all versions but the newest ones, or memory is full: it waits
            at most ``timeout_s`` seconds, skips the version, or raises. ``wait`` raises in the end.
        address: Address at which readers reach this client. Default: the address from which it reaches ``MASTER_ADDR``;
            where that is a loopback address, the address from which it reaches the coordinator.
        options: Of these, ``timeout_s`` and ``chunk_nbytes`` count, and how copies of one value are told apart.
        timeout_s: Longest wait of `publish` for memory, and of readers' requests, in seconds.
        registry: ``host:port`` at which client 0 runs the registry of the feed, where there is no coordinator. Readers
            are given the same address. Default: the coordinator.

    Raises:
        ConfigError: A value is out of range, there is no coordinator, or the registry cannot listen at its address.
        FencedError: Another job, or a newer attempt of this one, publishes the feed.
        CoordinatorPermissionError: The token of this job may not publish it.
        StorageError: The folder cannot be made.
    """

    def __init__(
        self,
        name: str,
        *,
        keep: int = 2,
        folder: str | PathLike[str] | None = None,
        max_nbytes: int | None = None,
        when_full: WhenFull = "wait",
        address: str | None = None,
        options: SaveOptions | None = None,
        timeout_s: float = 60.0,
        registry: str | None = None,
    ) -> None:
        validate_feed(name)
        if type(keep) is not int or not 1 <= keep <= MAX_KEEP:
            raise ConfigError(f"Publisher: keep is {keep!r}; expected 1 to {MAX_KEEP} versions")
        if when_full not in ("wait", "skip", "raise"):
            raise ConfigError(f"Publisher: when_full is {when_full!r}; expected 'wait', 'skip' or 'raise'")
        self.name = name
        self.keep = keep
        self._when_full = when_full
        self._timeout_s = timeout_s
        self._options = options or SaveOptions()
        self._coordination = current_coordination()
        self._own_registry = None if registry is None else OwnRegistry(registry, self._coordination)
        member = self._coordination.member
        self._client = member.client
        self._host = host_name()
        self._where = default_folder() if folder is None else Path(folder).absolute()
        self._root = job_of_feed(name, member.job)
        self._folder = LendingFolder(self._where, self._root, host=self._host, max_nbytes=max_nbytes)
        atexit.register(self._folder.free)  # else the versions of a process that ends without `close` would stay
        self._pulls = PullService(self._folder, max_copies=MAX_COPIES)
        self._held: dict[int, SaveId] = {}
        self._boxes = AnnouncedBoxes(self._client)
        self._handle: SaveHandle | None = None
        self._lent: LentVersion | None = None
        self._is_open = False
        self._feeds: FeedClient | None = None
        self._server: PartServer | None = None
        self._next_number = 1
        try:
            self._open(address)
        except BaseException:
            self._end()
            raise

    def _open(self, address: str | None) -> None:
        """Open the feed and this client's server, and learn the others' servers."""
        collective = Collective(self._coordination, "live", self._options.timeout_s)

        def introduce() -> tuple[None, bytes]:
            names = _open_feeds.setdefault(self._coordination, set())
            if self.name in names:
                raise ConfigError(
                    f"feed {self.name!r} has a publisher in this process; close it before you open another"
                )
            names.add(self.name)
            self._is_open = True
            own = self._own_registry
            self._feeds = feed_client(self._coordination) if own is None else own.feeds()
            self._folder.make()
            self._folder.remove_spare_of_the_dead()
            try:
                self._server = PartServer(
                    self._folder,
                    address or own_address(self._feeds.address),
                    self._timeout_s,
                    self._check_ticket,
                    boxes=self._boxes,
                    answer_pull=self._pulls,
                )
            except OSError as error:
                raise ConfigError(f"Publisher: this client cannot listen at {address!r}: {error}") from error
            number = self._feeds.open(self.name, keep=self.keep)
            tokens = [secrets.token_hex(16), secrets.token_hex(8)] if collective.is_leader else ["", ""]
            return None, json.dumps([self._server.url, self._host, *tokens, number, self.keep]).encode()

        with collective.process_lock():
            start_registry(self._own_registry, collective)
            _, payloads = collective.run_round_with_value("open", introduce, phase="plan")
        facts = {client: json.loads(data) for client, data in payloads.items()}
        _, _, token, self._life, self._next_number, keep = facts[collective.leader]
        if any(fact[-1] != keep for fact in facts.values()):
            raise ConfigError(f"Publisher: clients pass different keep; got {[fact[-1] for fact in facts.values()]}")
        assert self._server is not None  # noqa: S101  made in the round
        self._server.open(token)
        self._peers: Mapping[int, Peer] = {
            client: Peer(url, host, token, self._timeout_s) for client, (url, host, *_) in facts.items()
        }
        self._folder.remove_saves_of_the_dead()

    @property
    def _registry(self) -> FeedClient:
        if self._feeds is None or self._server is None:
            raise ConfigError(f"the publisher of feed {self.name!r} is closed")
        return self._feeds

    def _check_ticket(self, shown: str, save: SaveId) -> None:
        try:
            ticket = bytes.fromhex(shown)
        except ValueError:
            raise TicketError("the request has neither the token of this job nor a ticket") from None
        self._registry.check(self.name, save.number, ticket, time.time())

    # --- publishing ---------------------------------------------------------------------------------------------------

    @overload
    def publish(
        self,
        tree: Any,
        *,
        step: int,
        wait: bool = False,
        cast: Mapping[str, Any] = MappingProxyType({}),
        layout_tags: Mapping[str, str] = MappingProxyType({}),
        copy: Literal[True] = True,
    ) -> SaveHandle | None: ...

    @overload
    def publish(
        self, tree: Any, *, step: int, layout_tags: Mapping[str, str] = MappingProxyType({}), copy: Literal[False]
    ) -> LentVersion: ...

    def publish(
        self,
        tree: Any,
        *,
        step: int,
        wait: bool = False,
        cast: Mapping[str, Any] = MappingProxyType({}),
        layout_tags: Mapping[str, str] = MappingProxyType({}),
        copy: bool = True,
    ) -> SaveHandle | LentVersion | None:
        """Publish a version. When this returns, training may change the tensors again.

        The version becomes readable in the background, when all clients have digested their parts; the handle says
        when, and raises the error if it did not.

        With ``copy=False`` the version is in the tensors themselves, and takes no memory. It is readable when this
        returns, and training must not change the tensors before the context ends that this returns::

            with policy.publish({"model": model}, step=step, copy=False):
                ...  # wait for the readers, or do what leaves the weights as they are

        Collective: Over all clients of the job, with the same arguments but ``wait``; barriers ``live/begin`` (and
        ``live/united`` where clients pass different things for the first time), and ``live/held`` in the background.

        Blocks: On the copy to the memory of this host; before it, on the version before, and on readers that hold old
        versions (see ``when_full``).

        Args:
            tree: As for `dtckpt.save`.
            step: The step of the training, from 0 on. Readers may ask for it. A step before an earlier one is published
                all the same, and marked as rewound.
            wait: Return only when the version is readable.
            cast: Dtypes of floating-point tensors, by glob on their names, as ``{"model/*": torch.bfloat16}``; the
                first match wins. The copy converts them. Others keep their dtype, whatever readers have.
            layout_tags: By glob on names of tensors, any text on how their elements are to be understood, as
                ``{"*/qkv": "interleaved"}``. A reader that wants such a tensor must expect the same text.
            copy: Whether to copy the elements to the memory of this host. Else all tensors must be in host memory, and
                there is no ``cast``.

        Returns:
            The handle; None if ``when_full="skip"`` and there is no memory. With ``copy=False`` a context; its exit
            waits for readers. See `LentVersion`.

        Raises:
            ConfigError: The tensors still hold the last version, or ``copy=False`` cannot serve a tensor.
            StorageFullError: There is no memory for the version; nothing was published.
            FencedError: A newer attempt of the job publishes the feed.
            CoordinatorUnavailableError: The coordinator does not answer.
            DtckptError: As `dtckpt.save_async`; or the error of the version before, if the caller has not seen it.
        """
        if type(step) is not int or step < 0:
            raise ConfigError(f"feed {self.name!r}: step is {step!r}; expected a whole number from 0 on")
        if not copy and cast:
            raise ConfigError(f"feed {self.name!r}: copy=False makes no copy that could be cast; drop one of the two")
        if self._lent is not None:
            raise ConfigError(
                f"feed {self.name!r}: the version of step {self._lent.step} is in the training's tensors until its "
                "context ends; use `with publisher.publish(..., copy=False):`, and publish behind it"
            )
        casts = Casts(cast) if cast else None
        validate_tags(layout_tags)
        start, before = time.monotonic(), self._handle
        if before is not None:
            before.wait()
        collective = Collective(self._coordination, "live", self._options.timeout_s)
        with ExitStack() as stack:
            stack.enter_context(collective.process_lock())
            try:
                version = self._begin(tree, step, collective, casts, dict(layout_tags), lends=not copy)
            except StorageFullError as error:
                if self._when_full != "skip":
                    raise
                logger.warning("step %d is not published to feed %r: %s", step, self.name, error)
                return None
            if not copy:
                self._hold(version, collective)
                self._lent = LentVersion(step, lambda error: self._take_back(version.save, error))
                return self._lent
            locks = stack.pop_all()
        path = location_of_version(self.name, step)
        handle = SaveHandle(
            path, collective.phases, timeout_s=self._options.timeout_s, blocking_s=time.monotonic() - start
        )

        def complete() -> SaveReport:
            self._hold(version, collective)
            return SaveReport(path, version.agreed.plan.nbytes, collective.phases.costs)

        handle.launch(complete, locks, lambda _: None)
        self._handle = handle
        if wait:
            handle.result()
        return handle

    def _begin(
        self,
        tree: Any,
        step: int,
        collective: Collective,
        casts: Casts | None,
        tags: Mapping[str, str],
        *,
        lends: bool,
    ) -> _BegunVersion:
        """Copy this client's part, or lend it, and agree with the others. Collective: as `publish`."""
        client, phases, before = collective.client, collective.phases, self._handle
        phases.begin(location_of_version(self.name, step), is_shown=False)
        part = PartInProgress(self._folder, client)
        server, of_arguments = self._server, bytes_digest(repr((tags, lends)).encode())

        def propose() -> tuple[Proposal, bytes]:
            # In the first round, so that all clients raise it together.
            if before is not None:
                before.raise_unseen_failure()
            registry = self._registry
            state = state_of_tree(tree, self._options, client, collective.participants, casts=casts)
            proposal = Proposal.of(state, collective.participants, self._options)
            if lends:
                validate_lendable(state)
                self._free_versions(registry)
            else:
                self._take_memory(part, proposal, registry)
            summary = proposal.summary()
            assert server is not None  # noqa: S101  the registry is open
            server.keep_texts({proposal.digest: proposal.text, summary.tree: proposal.state.tree})
            number = registry.open(self.name, keep=self.keep) if collective.is_leader else 0
            facts = [max(number, self._next_number), summary.to_bytes().decode(), of_arguments]
            return proposal, json.dumps(facts, ensure_ascii=False).encode()

        def stage(state: State, plan: SavePlan) -> State:
            if lends:
                return state
            dtypes: dict[str, torch.dtype] = {}
            if casts is not None:
                specs = [tensor.spec for tensor in plan.tensors]
                casts.validate_all_used((spec.name, spec.dtype) for spec in specs)
                dtypes = {spec.name: torch_dtype(spec.dtype) for spec in specs if spec.dtype in CAST_DTYPES}
            with phases.measure("stage"):
                return part.take(plan, state).staging.stage(
                    state, plan, client, with_copies=False, count=phases.count, beside=NO_COPIES, dtypes=dtypes
                )

        def read(_: str, other: int, digest: int) -> bytes:
            assert server is not None  # noqa: S101  as above
            return server.texts[digest] if other == client else self._peers[other].text(digest)

        with part.given_back_on_failure():
            agreed = agree(
                collective, propose, stage, read, step=step, summary_of=lambda data: json.loads(data)[1].encode()
            )
            facts = {client: json.loads(data) for client, data in agreed.payloads.items()}
            if strangers := [other for other, (*_, passed) in facts.items() if passed != facts[collective.leader][2]]:
                raise ConfigError(
                    f"feed {self.name!r}, step {step}: clients {strangers} pass other layout_tags, or another copy=, "
                    f"than client {collective.leader}; pass the same on all clients"
                )
            number = facts[collective.leader][0]
            self._next_number = number + 1
            tree = bytes_digest(repr([self._life, *sorted(agreed.agreement.trees)]).encode()).to_bytes(8, "big")
            save = save_of_version(self.name, number, step, len(collective.participants), tree)
            return _BegunVersion(save, tree, agreed, part, LentMemory() if lends else None, tags)

    def _take_memory(self, part: PartInProgress, proposal: Proposal, registry: FeedClient) -> None:
        """Take the file for a version; first free the versions that are retired and that no reader leases.

        Raises:
            StorageFullError: There is no memory in time.
        """
        deadline = time.monotonic() + (self._timeout_s if self._when_full == "wait" else 0.0)
        while True:
            readers = self._free_versions(registry)
            try:
                if len(self._held) > self.keep:
                    raise StorageFullError(
                        f"feed {self.name!r} has {len(self._held)} versions in memory, and keeps {self.keep}; readers "
                        f"hold older ones: {readers}; end these readers, or keep more"
                    )
                part.take(proposal.plan, proposal.state)
                return
            except StorageFullError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(POLL_S)

    def _free_versions(self, registry: FeedClient) -> str:
        """Free old versions as far as readers let go of them; return why one of them stays."""
        # A former attempt may have lived on for a while. Readers that have mapped its parts keep them.
        self._folder.remove_saves_of_the_dead()
        stays = ""
        for number, save in sorted(self._held.items())[: -self.keep]:
            try:
                with suppress(VersionGoneError):
                    registry.withdraw(self.name, number)
            except (VersionLeasedError, FeedConflictError) as error:
                stays = stays or str(error)
                continue
            self._free(number, save)
        return stays

    def _free(self, number: int, save: SaveId) -> None:
        del self._held[number]
        self._folder.remove(save, self._client)
        self._pulls.forget(save)
        if self._server is not None:
            self._server.forget_part(save, self._client)

    def _hold(self, version: _BegunVersion, collective: Collective) -> None:
        """Take digests, and make the version readable. Collective: Over all clients; barrier ``live/held``."""
        save, plan, client, registry = version.save, version.agreed.plan, collective.client, self._registry

        def put() -> bytes:
            state, memory = version.agreed.state, version.memory
            tensors, pieces, _ = described_pieces(state, plan, memory, client, NO_COPIES, tags=version.tags)
            index = PartIndex(save, client, memory.nbytes, state.tree, tensors, pieces, {})
            index = self._boxes.digested(index, memory.view)
            data = index.to_bytes()
            registry.announce(
                self.name,
                save.number,
                step=save.step,
                num_parts=save.num_clients,
                tree_digest=version.tree_digest,
                timeout_s=self._options.timeout_s,
            )
            if isinstance(memory, LentMemory):
                self._folder.lend(memory, index, data)
            else:
                self._folder.put(memory, index, data, is_voted=True)
            self._held[save.number] = save
            registry.put_part(
                self.name,
                save.number,
                endpoint=self._endpoint(),
                digest=index_digest(data),
                nbytes=sum(each.region.numel * DTYPES[tensors[each.tensor].dtype].itemsize for each in pieces),
            )
            return b""

        try:
            collective.run_round("held", put, phase="digest")
        except BaseException as error:
            self._abort(version, error)
            raise
        collective.phases.end()
        logger.info("%s is readable", title_of_version(self.name, save.number, save.step))

    def _endpoint(self) -> bytes:
        assert self._server is not None  # noqa: S101  the feed is open
        token = self._folder.token()  # now: if a user has removed the directory, a part is in another one
        return PartAddress(self._server.url, self._host, str(self._where), self._root, token).to_bytes()

    def _abort(self, version: _BegunVersion, cause: BaseException) -> None:
        """Let a version fail, and free its memory, unless readers may have it already."""
        number = version.save.number
        try:
            self._registry.abort(self.name, number, f"{type(cause).__name__}: {cause}")
        except DtckptError as error:
            if number in self._held and version.lent is None:
                # The version may be readable. As all versions, it is freed when a newer one is published.
                title = title_of_version(self.name, number, version.save.step)
                logger.warning("%s stays in memory for now: %s", title, error)
                return
            if self._feeds is not None:
                self._feeds.abandon(self.name, number)
        if version.lent is None:
            self._held.pop(number, None)
            version.part.give_back()
        elif number in self._held:
            self._free(number, version.save)

    def _take_back(self, save: SaveId, cause: BaseException | None) -> None:
        """End a loan. Collective: as the exit of `LentVersion`.

        Args:
            save: The version.
            cause: The error of the body.
        """

        def wait() -> tuple[None, bytes]:
            if cause is not None:
                raise cause
            if self._feeds is not None and save.number in self._held:
                await_readers(self._feeds, self.name, save.number, self._timeout_s)
            return None, b""

        timeout_s = self._options.timeout_s + self._timeout_s
        collective = Collective(self._coordination, "live-return", timeout_s)
        try:
            with collective.process_lock():
                collective.run_first_round("returned", wait, phase=BARRIER)
        finally:
            self._lent = None
            if save.number in self._held:
                self._free(save.number, save)
                if self._feeds is not None:
                    self._feeds.abandon(self.name, save.number)

    # --- the end ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(has_failed=error is not None)

    def close(self, *, has_failed: bool = False) -> None:
        """End publishing, and free the versions. Local; readers under way may go on for ``timeout_s`` seconds.

        Args:
            has_failed: Whether the job ends by an error; then this client waits for no reader.
        """
        if fork_guard.is_forked():
            return  # the versions are the parent's
        if self._handle is not None:
            self._handle.wait()
        feeds = self._feeds
        if feeds is not None and self._held:
            try:
                self._await_readers(feeds, time.monotonic() + (0.0 if has_failed else self._timeout_s))
            except DtckptError as error:
                logger.warning("feed %r ends, and the coordinator does not know yet: %s", self.name, error)
        self._end(0.0 if has_failed else self._timeout_s)

    def _await_readers(self, feeds: FeedClient, deadline: float) -> None:
        """Retire all versions, and free them as readers let go of them. Raises: The coordinator does not answer."""
        for number in self._held:
            with suppress(VersionGoneError, FeedConflictError):
                feeds.retire(self.name, number)
        while self._held and time.monotonic() < deadline:
            for number, save in list(self._held.items()):
                with suppress(VersionLeasedError, FeedConflictError):
                    with suppress(VersionGoneError):
                        feeds.withdraw(self.name, number)
                    self._free(number, save)
            time.sleep(POLL_S if self._held else 0.0)

    def _end(self, wait_s: float = 0.0) -> None:
        if self._is_open:
            _open_feeds[self._coordination].discard(self.name)
            self._is_open = False
        if self._feeds is not None:
            self._feeds.abandon(self.name)
        if self._own_registry is not None:
            self._own_registry.end(wait_s)
        if self._server is not None:
            self._server.close()
        self._server = self._feeds = None
        for number, save in list(self._held.items()):
            self._free(number, save)
        self._folder.close()
        atexit.unregister(self._folder.free)
        self._folder.remove_if_empty()
