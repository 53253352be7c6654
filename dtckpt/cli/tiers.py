"""``dtckpt tiers``: the steps that the hosts of a job hold, their copies, and the step that would come back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import click

from dtckpt.cli.options import LOCATION, debug_option, json_option
from dtckpt.cli.output import format_age, format_count, table_lines, write_event
from dtckpt.errors import CheckpointNotFoundError, ConfigError, capped, did_you_mean, format_nbytes, printable

if TYPE_CHECKING:
    from dtckpt.checkpoint.tiers.holdings import HeldSave
    from dtckpt.checkpoint.tiers.status import TierStatus

FAILING_AT_ONCE = (1, 2, 3, 4, 8)

EPILOG = """\b
Examples:
  dtckpt tiers run
  dtckpt tiers run --without host3,host7
  dtckpt tiers s3://bucket/run --json

"""


@click.command("tiers", epilog=EPILOG)
@click.argument("root", type=LOCATION)
@click.option("--without", metavar="HOST,...", help="Hosts that are taken to be lost.")
@json_option("Print one JSON line per host and local step, then one with the step that would come back.")
@debug_option
def command(*, root: str, without: str | None, as_json: bool) -> None:
    """Show which steps the hosts of a job hold, and which would come back if hosts were lost now.

    ROOT is the directory or URL of a CheckpointManager with a LocalTier. The command asks no host: it reads the
    inventory that client 0 keeps in a file there.
    """
    from dtckpt.checkpoint.managing.root import root_of
    from dtckpt.checkpoint.managing.step_folders import StepFolders
    from dtckpt.checkpoint.tiers.status import STATUS_NAME, read_status
    from dtckpt.storage.failures import translate_errors
    from dtckpt.storage.location import location_of

    job = root_of(location_of(root))
    with translate_errors("read the status of the local tier", job.where):
        status = read_status(job.folder)
    if status is None:
        raise CheckpointNotFoundError(
            f"there is no {STATUS_NAME} in {job.where}: the job has no local tier, or no step yet"
        )
    lost = _hosts(status, without)
    durable = {lineage.number: step for step, lineage in StepFolders(job).saved().items()}
    back = _what_comes_back(status, lost, durable)
    if as_json:
        _write_json(status, lost, back, root)
    else:
        for line in _lines(status, lost, back):
            click.echo(printable(line))


class _Return(NamedTuple):
    """The step from which a job would go on.

    Args:
        step: The step; None: nothing is left.
        tier: ``local``, ``root``, or empty if nothing is left.
        lost_s: Age of the step, in seconds before the newest save.
        moved: Bytes that hosts would send to each other.
        seconds: How long that would take at the measured rate; None: nothing was measured, or it is read from the root.
    """

    step: int | None
    tier: str
    lost_s: float
    moved: int
    seconds: float | None


def _hosts(status: TierStatus, text: str | None) -> frozenset[str]:
    names = frozenset(filter(None, (name.strip() for name in (text or "").split(","))))
    for name in sorted(names - status.domains.keys()):
        hint = did_you_mean(name, status.domains) or f"; they are {capped(status.domains)}"
        raise ConfigError(f"--without: the job has no host {name!r}{hint}")
    return names


def _what_comes_back(status: TierStatus, lost: frozenset[str], durable: dict[int, int]) -> _Return:
    """Return the step that would be restored: the newest that the other hosts have, or the newest of the root."""
    newest = status.saves[0].save.number if status.saves else 0
    local = status.newest_without(lost)
    in_root = max(durable, default=None)
    if local is None or (in_root is not None and in_root > local.save.number):
        if in_root is None:
            return _Return(None, "", 0.0, 0, None)
        return _Return(durable[in_root], "root", max(0.0, (newest - in_root) / 1e9), 0, None)
    moved = _moved_nbytes(status, local, lost)
    # Hosts send at the same time, each to another one.
    rate = status.rate * max(1, len(status.domains) - len(lost))
    return _Return(
        local.save.step,
        "local",
        max(0.0, (newest - local.save.number) / 1e9),
        moved,
        moved / rate if rate else (0.0 if not moved else None),
    )


def _moved_nbytes(status: TierStatus, held: HeldSave, lost: frozenset[str]) -> int:
    """Return the bytes that new hosts in place of the lost ones would receive: the parts of their clients."""
    clients = sum(len(status.clients[host]) for host in lost)
    return status.nbytes * clients // max(1, held.save.num_clients)


# --- output -----------------------------------------------------------------------------------------------------------


def _write_json(status: TierStatus, lost: frozenset[str], back: _Return, root: str) -> None:
    for host, domain in sorted(status.domains.items()):
        write_event(
            "host",
            name=host,
            domain=domain,
            clients=list(status.clients[host]),
            copies_on=list(status.copy_hosts.partners(host)),
            is_lost=host in lost,
        )
    for held in status.saves:
        left = held.without(lost)
        write_event(
            "local_step",
            step=held.save.step,
            saved_s=held.save.number / 1e9,
            copies=held.num_copies,
            copies_left=left.num_copies,
            is_restorable=left.is_restorable,
            holders={str(client): list(hosts) for client, hosts in sorted(held.holders.items())},
        )
    write_event(
        "tiers",
        root=root,
        at_s=status.at_s,
        without=sorted(lost),
        copies=status.copies,
        step=back.step,
        tier=back.tier or None,
        lost_s=round(back.lost_s, 3),
        moved_bytes=back.moved,
        seconds=None if back.seconds is None else round(back.seconds, 3),
        loss_probability={str(count): odds for count, odds in _odds(status)},
    )


def _odds(status: TierStatus) -> Iterator[tuple[int, float]]:
    copy_hosts = status.copy_hosts
    return ((count, copy_hosts.loss_probability(count)) for count in FAILING_AT_ONCE if count <= len(status.domains))


def _lines(status: TierStatus, lost: frozenset[str], back: _Return) -> Iterator[str]:
    rows = []
    for held in status.saves:
        left = held.without(lost)
        copies = "1 copy" if left.num_copies == 1 else f"{left.num_copies} copies"
        state = copies if left.is_restorable else _missing(status, left)
        rows.append((str(held.save.step), format_age(max(0.0, time.time() - held.save.number / 1e9)), state))
    yield from table_lines(("STEP", "AGE", "PROTECTED BY"), rows)
    yield ""
    hosts = format_count(len(status.domains), "host")
    domains = format_count(len(set(status.domains.values())), "domain")
    age = format_age(time.time() - status.at_s)
    yield f"{hosts} in {domains}, {format_nbytes(status.nbytes)} a step; as of {age} ago"
    odds = ", ".join(f"{100 * value:.2g} % of {count}" for count, value in _odds(status))
    yield f"a step is lost by these shares of simultaneous failures of hosts: {odds}"
    without = f"without {', '.join(sorted(lost))}: " if lost else ""
    if back.step is None:
        yield f"{without}no step would come back"
    elif back.tier == "root":
        yield f"{without}step {back.step} would come back, from the root; {back.lost_s:.0f} s of training would be lost"
    else:
        seconds = "" if back.seconds is None else f", in {back.seconds:.1f} s and the reading"
        yield (
            f"{without}step {back.step} would come back, from the hosts; {back.lost_s:.0f} s of training would be "
            f"lost, and hosts would send {format_nbytes(back.moved)}{seconds}"
        )


def _missing(status: TierStatus, left: HeldSave) -> str:
    holders = {host for host, clients in status.clients.items() if set(clients) & set(left.missing)}
    return f"lost: no host has the parts of {', '.join(sorted(holders))}"
