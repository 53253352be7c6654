"""``dtckpt live``: show the feeds of a coordinator, their versions, readers and holders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from dtckpt.cli.looks import VARIABLES, look, look_options
from dtckpt.cli.options import debug_option, json_option
from dtckpt.cli.output import format_age, format_count, table_lines
from dtckpt.errors import format_nbytes, printable

if TYPE_CHECKING:
    from dtckpt._proto import feeds_pb2 as pb

_HEADER = ("version", "step", "state", "age", "parts", "size", "readers", "holders", "")

EPILOG = f"""\b
States of a version:
  publishing  The publisher's clients have not put all parts yet.
  readable    A reader gets all of it.
  retiring    No reader begins to read it. Its memory stays while others do.
  lost        Clients that have its bytes are lost. These clients may come back.

\b
{VARIABLES}  DTCKPT_COORDINATOR_TOKEN_FILE or _TOKEN: the job's feeds, and other feeds that it may read.

\b
Examples:
  dtckpt live --coordinator localhost:50051
  dtckpt live --watch
  dtckpt inspect live://policy                     the newest version of a feed, as a checkpoint
  dtckpt diff live://policy@100 live://policy      the newest of step 100, and the newest

"""


@click.command("live", epilog=EPILOG)
@look_options
@json_option("Print one JSON line per look.")
@debug_option
def command(*, coordinator: str | None, watch: bool, interval_s: float, timeout_s: float, as_json: bool) -> None:
    """Show the feeds of a coordinator: versions, their ages and sizes, readers and relays."""
    look(
        coordinator,
        lambda client: client.feeds(timeout_s),
        lambda feeds: {"feeds": [_feed_json(feed) for feed in feeds]},
        _report,
        event="live",
        watch=watch,
        interval_s=interval_s,
        as_json=as_json,
    )


# --- as text ----------------------------------------------------------------------------------------------------------


def _report(address: str, feeds: Sequence[pb.FeedStatus]) -> Iterator[str]:
    yield f"coordinator {address}: {format_count(len(feeds), 'feed')}"
    for feed in feeds:
        yield ""
        publishers = format_count(feed.num_publishers, "client")
        yield printable(
            f"feed {feed.feed}: published by {feed.job}, {publishers} alive, attempt {feed.attempt}, keeps {feed.keep}"
        )
        newest_first = sorted(feed.versions, key=lambda version: -version.number)
        for line in table_lines(_HEADER, [_row(version) for version in newest_first]):
            yield f"  {line}"
        for line in (each for version in newest_first for each in _users(version)):
            yield printable(f"  {line}")
        for ended in reversed(feed.latest):
            yield printable(f"  {ended.reader}: {ended.outcome} version {ended.number}")


def _row(version: pb.VersionStatus) -> Sequence[str]:
    return (
        str(version.number),
        str(version.step),
        _phase(version),
        format_age(version.age_s),
        f"{version.num_parts_put}/{version.num_parts}",
        format_nbytes(version.nbytes),
        str(version.num_leases),
        str(version.num_holders),
        "rewound" if version.is_rewound else "",
    )


def _users(version: pb.VersionStatus) -> Iterator[str]:
    """Yield a line for each group that reads a version, and for each client that serves it on."""
    for reader in version.readers:
        yield f"{reader.reader}: reads version {version.number}, for {format_age(reader.age_s)}"
    yield from _more(version.num_leases - len(version.readers), "reader", version)
    for holder in version.holders:
        yield (
            f"{holder.job} client {holder.client} on {holder.host}: serves {format_nbytes(holder.nbytes)} of version "
            f"{version.number}"
        )
    yield from _more(version.num_holders - len(version.holders), "holder", version)


def _more(count: int, noun: str, version: pb.VersionStatus) -> Iterator[str]:
    if count > 0:
        yield f"and {format_count(count, noun)} more of version {version.number}"


def _phase(version: pb.VersionStatus) -> str:
    from dtckpt._proto import feeds_pb2 as pb  # here, because ``--help`` does without it

    return pb.VersionPhase.Name(version.phase).removeprefix("VERSION_PHASE_").lower()


# --- as JSON ----------------------------------------------------------------------------------------------------------


def _feed_json(feed: pb.FeedStatus) -> dict[str, Any]:
    return {
        "feed": feed.feed,
        "job": feed.job,
        "attempt": feed.attempt,
        "keep": feed.keep,
        "publishers": feed.num_publishers,
        "versions": [_version_json(version) for version in feed.versions],
        "ended": [{"reader": each.reader, "number": each.number, "outcome": each.outcome} for each in feed.latest],
    }


def _version_json(version: pb.VersionStatus) -> dict[str, Any]:
    return {
        "number": version.number,
        "step": version.step,
        "state": _phase(version),
        "is_rewound": version.is_rewound,
        "parts": version.num_parts,
        "parts_put": version.num_parts_put,
        "bytes": version.nbytes,
        "age_s": round(version.age_s, 3),
        "num_readers": version.num_leases,
        "readers": [{"reader": each.reader, "age_s": round(each.age_s, 3)} for each in version.readers],
        "num_holders": version.num_holders,
        "holders": [
            {"job": each.job, "client": each.client, "host": each.host, "bytes": each.nbytes, "is_whole": each.is_whole}
            for each in version.holders
        ],
    }
