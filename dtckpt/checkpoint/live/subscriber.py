"""`Subscriber`: takes the versions of a feed into a target, on any mesh, beside it or in place.

::

    fetch     choose a version | read and verify it beside the target      the target is as it was
    apply     copy it into the target                                      every tensor keeps its address

    update(in_place=True)      read and verify it in the target itself     MIXED until every client has verified it

A target has version n whole, or version n+1 whole, or the subscriber says that it is mixed. No collective joins the two
jobs, so neither can hang the other.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from torch import nn

from dtckpt.checkpoint.live.announcer import Announcer
from dtckpt.checkpoint.live.coverage import validate_covered
from dtckpt.checkpoint.live.feed_client import feed_client
from dtckpt.checkpoint.live.publisher import default_folder
from dtckpt.checkpoint.live.relay import PullTraffic, Relay
from dtckpt.checkpoint.live.version_choice import VersionChoice
from dtckpt.checkpoint.live.versions import location_of_version, title_of_version, validate_registry
from dtckpt.checkpoint.options import RestoreOptions
from dtckpt.checkpoint.participants import Group
from dtckpt.checkpoint.parts.held_boxes import HeldBoxes
from dtckpt.checkpoint.parts.layout_tags import validate_tags
from dtckpt.checkpoint.restoring.aside import AsideMemory
from dtckpt.checkpoint.restoring.report import RestoreReport
from dtckpt.checkpoint.restoring.restore import StagedRestore, restore_chosen, stage_restore
from dtckpt.comm import fork_guard
from dtckpt.coordination.connect import current_coordination
from dtckpt.coordination.feeds.events import APPLIED, FAILED, FETCHED, MAX_KEEP, Want, validate_feed
from dtckpt.errors import CheckpointError, ConfigError, VersionTimeoutError, format_nbytes

logger = logging.getLogger("dtckpt.live")


@dataclass(frozen=True, slots=True)
class LiveVersion:
    """A version of a feed.

    Args:
        feed: Name of the feed.
        number: Its number; later versions have greater ones.
        step: The step of the training.
        is_rewound: Whether the feed had a version of a later step before.
    """

    feed: str
    number: int
    step: int
    is_rewound: bool


@dataclass(frozen=True, slots=True)
class LiveReport:
    """The bytes that this client took of a version, by source.

    Args:
        version: The version.
        nbytes_mapped: Bytes from the memory of this host.
        nbytes_by_host: Bytes of elements and changes that servers sent, by host.
        nbytes_unchanged: Bytes that this client held already, as their digests told, and did not take.
        nbytes_verified: Bytes that were compared with the publisher's digests where they arrived: in the memory of this
            client. Of a box that came as changes, all bytes count.
        nbytes_verified_at_source: Bytes that were compared with the publisher's digests before they were sent or
            copied. The publisher had no digests of these boxes, as this client had not announced them yet.
        passed_over: Sources that were damaged or did not answer, and the reasons.
        seconds: From the choice of the version until every client had verified it.
        restore: The report of the restore: names that were filled, missing, unexpected and converted.
        nbytes_pulled_by_host: Bytes that this client pulled from other hosts to serve them on, by host; reads then map
            them.
    """

    version: LiveVersion
    nbytes_mapped: int
    nbytes_by_host: Mapping[str, int]
    nbytes_unchanged: int
    nbytes_verified: int
    nbytes_verified_at_source: int
    passed_over: tuple[str, ...]
    seconds: float
    restore: RestoreReport | None = field(repr=False)
    nbytes_pulled_by_host: Mapping[str, int] = field(default_factory=dict)

    @property
    def nbytes_received(self) -> int:
        """Bytes from all sources."""
        return self.nbytes_mapped + sum(self.nbytes_by_host.values())


def _log_taken(report: LiveReport) -> None:
    version = report.version
    logger.info(
        "%s is in the target: this client received %s in %.3f s",
        title_of_version(version.feed, version.number, version.step),
        format_nbytes(report.nbytes_received),
        report.seconds,
    )


class StagedVersion:
    """A version that every client has verified, beside the target of a subscriber.

    Args:
        subscriber: The subscriber.
        staged: The restore.
        report: The report.
        choice: How the version was chosen.
    """

    def __init__(
        self, subscriber: Subscriber, staged: StagedRestore, report: LiveReport, choice: VersionChoice
    ) -> None:
        self.report = report
        self._subscriber = subscriber
        self._choice = choice
        self._staged: StagedRestore | None = staged

    @property
    def version(self) -> LiveVersion:
        """The version."""
        return self.report.version

    def apply(self) -> Any:
        """Copy the version into the target: its tensors keep their addresses. Local; each client calls it.

        If this fails, the subscriber `is_mixed` until a whole version is in.

        Returns:
            The target.

        Raises:
            CheckpointError: The version was applied or dropped, or a later one has taken its memory.
        """
        return self._subscriber._apply(self)

    def drop(self) -> None:
        """Forget the version; the target stays as it is."""
        self._staged = None


class Subscriber:
    """Takes versions of a feed into one target. A context manager. Local; its calls are collective.

    Thread-safe: of `fetch`, `update`, `StagedVersion.apply` and `close`, each waits until the others are done. But a
    staged version is dropped when the next `fetch` or `update` begins, and its `apply` then raises at once.

    Args:
        name: Name of the feed.
        target: As for `dtckpt.restore`: a tree of tensors and stateful objects, on any mesh. Its tensors may be views
            of a model's parameters, such as slices of a fused weight.
        covers: Modules whose parameters and persistent buffers the target's tensors must fill, byte by byte, each byte
            once. So no parameter is left out, and no tensor of the target is a copy that the model never reads.
            Default: not checked.
        options: See `dtckpt.RestoreOptions`. By default every published tensor must be in the target;
            ``allow_unexpected`` passes over others, which the report lists.
        group: The clients that read, as for `dtckpt.restore`.
        allow_rewound: Whether to take versions of an earlier step than the feed has had before, as a publisher that was
            restarted makes them.
        layout_tags: The layout tags that the tensors must have, by glob on their published names; the first match wins.
            Of others this reader expects none. See `dtckpt.Publisher.publish`.
        max_staging_nbytes: Bound on the memory beside the target. Default: none.
        timeout_s: Longest wait for each answer of a publisher's client, in seconds.
        serve: Whether to keep the version in the memory of this host, and to serve it to further readers.
        folder: A directory in the memory of this host for these versions. Default: as for `Publisher`.
        keep: How many of them stay. While the next one is pulled there is one more.
        address: Address at which other hosts reach this client, if it serves. Default: as for `Publisher`.
        registry: ``host:port`` of the registry that the publisher runs. Default: the coordinator.

    Raises:
        ConfigError: A value is out of range.
        LayoutError: The target does not cover the modules.
    """

    def __init__(
        self,
        name: str,
        target: Any,
        *,
        covers: nn.Module | tuple[nn.Module, ...] = (),
        options: RestoreOptions | None = None,
        group: Group | None = None,
        allow_rewound: bool = True,
        layout_tags: Mapping[str, str] = MappingProxyType({}),
        max_staging_nbytes: int | None = None,
        timeout_s: float = 60.0,
        serve: bool = False,
        folder: str | PathLike[str] | None = None,
        keep: int = 1,
        address: str | None = None,
        registry: str | None = None,
    ) -> None:
        validate_feed(name)
        if registry is not None:
            validate_registry(registry)
        if type(keep) is not int or not 1 <= keep <= MAX_KEEP:
            raise ConfigError(f"Subscriber: keep is {keep!r}; expected 1 to {MAX_KEEP} versions")
        if target is None:
            raise ConfigError("Subscriber: expected a target; `dtckpt.restore('live://feed')` makes new tensors")
        self.name = name
        self.target = target
        self.report: LiveReport | None = None
        self._options = options or RestoreOptions()
        self._group = group
        self._allow_rewound = allow_rewound
        validate_tags(layout_tags)
        self._layout_tags = dict(layout_tags)
        self._timeout_s = timeout_s
        self._aside = AsideMemory(max_staging_nbytes)
        self._held_in_place = HeldBoxes()
        self._announcer = Announcer()
        self._relay: Relay | None = None
        self._serve, self._keep, self._address = serve, keep, address
        self._registry = registry or ""
        self._folder = default_folder() if folder is None else Path(folder).absolute()
        self._version: LiveVersion | None = None
        self._is_mixed = False
        self._staged: StagedVersion | None = None
        self._is_closed = False
        # Reads and `apply` use the same memory. A handler of signals may call `close` amid another call of its thread.
        self._lock = threading.RLock()
        modules = (covers,) if isinstance(covers, nn.Module) else covers
        if modules:
            validate_covered(target, modules)

    @property
    def version(self) -> LiveVersion | None:
        """The version that the target has; None: none yet, or it was invalidated, or the target is mixed."""
        return self._version

    def ready(self) -> bool:
        """Whether the target has a whole version: for the health check of a server, which a router asks."""
        return self._version is not None

    @property
    def is_mixed(self) -> bool:
        """Whether the target has parts of several versions; only a whole version changes that."""
        return self._is_mixed

    def invalidate(self) -> None:
        """Forget which version the target has, as its memory was changed: the next update takes even the same one.

        The update takes all bytes.
        """
        self._version = None
        self._aside.held.clear()
        self._held_in_place.clear()

    def fetch(self, *, newer: bool = True, step: int | None = None, timeout_s: float = 60.0) -> StagedVersion:
        """Read a version beside the target. When this returns, every client has verified its part of it.

        Collective: Over the clients of the group, as `dtckpt.restore`; also round ``restore/lease``.

        Blocks: On the wait for a version, at most ``timeout_s`` seconds, and on the read.

        Args:
            newer: Only a version newer than the target's.
            step: The newest version of this step; default: the newest of all.
            timeout_s: How long to wait for such a version.

        Raises:
            VersionTimeoutError: There is no such version in time.
            VersionGoneError: The version ended while it was read; fetch again.
            SourceLostError: The publisher's clients that have it are lost.
            DtckptError: As `dtckpt.restore`. The target is as it was, whatever is raised.
        """
        with self._lock:
            choice, start = self._choice(timeout_s, step, self._aside.held, newer=newer), time.monotonic()
            choice.outcome = FETCHED
            if self._staged is not None:
                self._staged.drop()  # the new version takes its memory
            staged = stage_restore(
                location_of_version(self.name, step, self._registry),
                choice,
                self.target,
                self._aside,
                options=self._restore_options(timeout_s),
                group=self._group,
            )
            self._staged = StagedVersion(self, staged, self._report_of(choice, start, staged.report), choice)
            choice.opened.clear()  # else the publisher's memory would stay mapped for as long as the version is staged
            return self._staged

    def update(
        self, *, in_place: bool = False, newer: bool = True, step: int | None = None, timeout_s: float = 60.0
    ) -> LiveVersion | None:
        """Take a version into the target.

        Collective: As `fetch`.

        Args:
            in_place: Read into the target itself, which needs no memory beside it. If this fails, the target is mixed,
                and `is_mixed` says so until a whole version is in.
            newer: As for `fetch`.
            step: As for `fetch`.
            timeout_s: As for `fetch`; 0: return at once if there is no such version.

        Returns:
            The version; None if ``timeout_s`` is 0 and there is no such version.

        Raises:
            DtckptError: As `fetch`.
        """
        with self._lock:
            try:
                if not in_place:
                    self.fetch(newer=newer, step=step, timeout_s=timeout_s).apply()
                else:
                    self._read_in_place(newer=newer, step=step, timeout_s=timeout_s)
            except VersionTimeoutError:
                if timeout_s > 0:
                    raise
                return None
            return self._version

    def _read_in_place(self, *, newer: bool, step: int | None, timeout_s: float) -> None:
        choice, start = self._choice(timeout_s, step, self._held_in_place, newer=newer), time.monotonic()
        reports = list[RestoreReport]()
        if self._staged is not None:
            self._staged.drop()  # to apply it later would take the target back

        def tell(report: RestoreReport) -> None:
            reports.append(report)
            if self._options.report is not None:
                self._options.report(report)

        def begin() -> None:
            # Before the first byte, on every client: also a client that reads nothing gets bytes that others have read.
            self._version, self._is_mixed = None, True

        try:
            restore_chosen(
                location_of_version(self.name, step, self._registry),
                choice,
                self.target,
                options=replace(self._restore_options(timeout_s), report=tell),
                group=self._group,
                begin=begin,
            )
        except Exception as error:
            if self._is_mixed:
                logger.error("the target of feed %r has parts of several versions: %s", self.name, error)
            raise
        self.report = self._report_of(choice, start, reports[-1])
        self._version, self._is_mixed = self.report.version, False
        _log_taken(self.report)

    def _apply(self, staged: StagedVersion) -> Any:
        self._restore_of(staged)  # raises at once: the read that has dropped the version may wait for long
        with self._lock:
            restore, staged._staged = self._restore_of(staged), None
            self._version, self._is_mixed, self._staged = None, True, None
            try:
                result = restore.apply()
            except BaseException:
                staged._choice.tell_use(FAILED)
                raise
            staged._choice.tell_use(APPLIED)
            self._version, self._is_mixed, self.report = staged.version, False, staged.report
            _log_taken(staged.report)
            return result

    def _restore_of(self, staged: StagedVersion) -> StagedRestore:
        if staged is not self._staged or (restore := staged._staged) is None:
            raise CheckpointError(f"this version of feed {self.name!r} was applied or dropped; fetch again")
        return restore

    def _choice(self, timeout_s: float, step: int | None, held: HeldBoxes, *, newer: bool) -> VersionChoice:
        if self._is_closed:
            raise ConfigError(f"the subscriber of feed {self.name!r} is closed")
        newer_than = self._version.number if newer and self._version is not None else 0
        want = Want(newer_than=newer_than, step=step, allow_rewound=self._allow_rewound)
        return VersionChoice(
            self.name,
            want,
            wait_s=timeout_s,
            timeout_s=self._timeout_s,
            layout_tags=self._layout_tags,
            held=held,
            announcer=self._announcer,
            relay=self._open_relay(),
            registry=self._registry,
        )

    def _open_relay(self) -> Relay | None:
        if self._serve and self._relay is None:
            coordination = current_coordination()
            self._relay = Relay(
                self.name,
                feed_client(coordination, self._registry),
                coordination.member,
                folder=self._folder,
                keep=self._keep,
                address=self._address,
                timeout_s=self._timeout_s,
            )
        return self._relay

    def _restore_options(self, wait_s: float) -> RestoreOptions:
        # The others wait for the leader, which waits for a version.
        return replace(self._options, timeout_s=self._options.timeout_s + wait_s)

    def _report_of(self, choice: VersionChoice, start: float, restore: RestoreReport | None) -> LiveReport:
        lease, traffic = choice.lease, choice.opened[-1].parts.traffic
        assert lease is not None  # noqa: S101  a version was read
        version = LiveVersion(self.name, lease.number, lease.step, lease.is_rewound)
        pulled = PullTraffic() if self._relay is None else self._relay.traffic
        return LiveReport(
            version,
            traffic.local,
            dict(traffic.by_host),
            traffic.unchanged,
            traffic.verified,
            traffic.verified_at_source,
            (*pulled.passed_over, *traffic.damaged),
            time.monotonic() - start,
            restore,
            pulled.by_host,
        )

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free the memory beside the target, and serve nothing more. Local."""
        if fork_guard.is_forked():
            return  # the versions that are served are the parent's
        self._is_closed = True  # calls that wait for this one are refused
        with self._lock:
            if self._relay is not None:
                self._relay.close()
                self._relay = None
            if self._staged is not None:
                self._staged.drop()
                self._staged = None
            self._aside.clear()
