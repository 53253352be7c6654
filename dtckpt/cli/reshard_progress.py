"""Progress output of ``dtckpt reshard``: progress, JSON events, the plan of a dry run, or one line at the end."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from dtckpt.checkpoint.resharding.reshard import ReshardReport
from dtckpt.checkpoint.resharding.reshard_plan import ReshardedTensor
from dtckpt.checkpoint.resharding.workers import PartReport
from dtckpt.cli.output import (
    account_facts,
    format_count,
    format_layout,
    format_shape,
    open_progress,
    write_event,
    write_left,
    write_line,
    write_summary,
    write_table,
)
from dtckpt.errors import capped, format_nbytes, printable


class Reporter:
    """Prints one line at the end. Base of the other reporters; a context manager around the work.

    Args:
        plan: The report of the dry run.
        start: Start of the work, by `time.monotonic`.
    """

    def __init__(self, plan: ReshardReport, start: float) -> None:
        self.plan = plan
        self.part: PartReport | None = None
        """This worker's part, if there are several workers; set before `finish`."""
        self._start = start

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def advance(self, name: str, nbytes: int) -> None:
        """Note that bytes of a tensor were passed to storage."""

    def finish(self) -> None:
        """Report that all work is done."""
        seconds = self.seconds
        rate = format_nbytes(self.plan.nbytes / max(seconds, 1e-9))
        if self.part is not None:
            write_summary(part_text(self.part, printable(str(self.plan.target))))
        if self.part is not None and not self.part.is_committed:
            return
        write_left(self.plan.account)
        source, target = printable(str(self.plan.source)), printable(str(self.plan.target))
        write_summary(f"resharded {source} to {target}: {self.totals} in {seconds:.1f} s ({rate}/s)")

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return round(time.monotonic() - self._start, 6)

    @property
    def totals(self) -> str:
        """Number of tensors and size of the new checkpoint."""
        return f"{format_count(len(self.plan.tensors), 'tensor')}, {format_nbytes(self.plan.nbytes)}"


def part_text(part: PartReport, target: str) -> str:
    """Return a line about the part of one of several workers."""
    worker = part.worker
    did = f"wrote {format_nbytes(part.nbytes)}" if part.nbytes else "its part was finished already"
    if part.is_committed:
        then = f"{target} is committed"
    elif part.missing:
        then = f"{target} waits for {format_count(len(part.missing), 'part')}: {capped(part.missing)}"
    else:
        then = f"another worker commits {target}"
    return f"worker {worker.index} of {worker.count}: {did}; {then}"


class PlanReporter(Reporter):
    """Prints the plan of a dry run, one row per tensor."""

    def finish(self) -> None:
        """Print the plan."""
        rows = [
            (
                tensor.name,
                format_shape(tensor.shape),
                _change(tensor.dtype, tensor.new_dtype),
                _change(format_layout(tensor.layout), format_layout(tensor.new_layout)),
                _change(str(tensor.num_chunks), str(tensor.new_num_chunks)),
                format_nbytes(tensor.new_nbytes),
            )
            for tensor in self.plan.tensors
        ]
        write_table(("TENSOR", "SHAPE", "DTYPE", "LAYOUT", "CHUNKS", "SIZE"), rows)
        write_left(self.plan.account)
        target = printable(str(self.plan.target))
        read = format_nbytes(self.plan.read_nbytes)
        write_line(f"would read {read}, and write {self.totals} to {target}; this was a dry run, nothing was written")


def _change(old: str, new: str) -> str:
    return new if old == new else f"{old} -> {new}"


class ProgressReporter(Reporter):
    """Shows progress on standard error during the work, and prints one line at the end."""

    def __enter__(self) -> Self:
        self._context = open_progress("resharding", self.plan.nbytes)
        self._progress = self._context.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.__exit__(kind, error, trace)

    def advance(self, name: str, nbytes: int) -> None:
        """Move the progress."""
        self._progress.advance(name, nbytes)

    def finish(self) -> None:
        """Remove the progress, and print the line."""
        self._context.__exit__(None, None, None)
        super().finish()


class JsonReporter(Reporter):
    """Prints one JSON object per event: ``start``, ``tensor`` for each tensor in order, ``done``.

    Args:
        plan: The report of the dry run.
        start: Start of the work, by `time.monotonic`.
        kvstore: Storage format of the new checkpoint.
        is_dry_run: Whether nothing is written.
    """

    def __init__(self, plan: ReshardReport, start: float, kvstore: str, *, is_dry_run: bool) -> None:
        super().__init__(plan, start)
        self._waiting = list(reversed(plan.tensors))
        self._left = {tensor.name: tensor.new_nbytes for tensor in plan.tensors}
        self._kvstore = kvstore
        self._facts = {
            "source": str(plan.source),
            "target": str(plan.target),
            "tensors": len(plan.tensors),
            "bytes": plan.nbytes,
            "dry_run": is_dry_run,
        }

    def __enter__(self) -> Self:
        write_event(
            "start",
            **self._facts,
            mesh=self.plan.mesh.axis_sizes,
            format=self._kvstore,
            max_memory=self.plan.max_memory,
            read_bytes=self.plan.read_nbytes,
            **account_facts(self.plan.account),
        )
        return self

    def advance(self, name: str, nbytes: int) -> None:
        """Print the tensors that are complete, in the plan's order."""
        self._left[name] -= nbytes
        while self._waiting and not self._left[self._waiting[-1].name]:
            self._complete(self._waiting.pop())

    def finish(self) -> None:
        """Print the other tensors, of which another process has written a part, and the result."""
        while self._waiting:
            self._complete(self._waiting.pop())
        part = {} if self.part is None else _part_facts(self.part)
        write_event("done", **self._facts, **part, seconds=self.seconds)

    def _complete(self, tensor: ReshardedTensor) -> None:
        write_event(
            "tensor",
            name=tensor.name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            new_dtype=tensor.new_dtype,
            sharding_specs=None if tensor.layout is None else tensor.layout.sharding_specs,
            new_sharding_specs=tensor.new_layout.sharding_specs,
            chunks=tensor.num_chunks,
            new_chunks=tensor.new_num_chunks,
            bytes=tensor.new_nbytes,
            seconds=self.seconds,
        )


def _part_facts(part: PartReport) -> dict[str, object]:
    return {
        "worker": part.worker.index,
        "workers": part.worker.count,
        "part_bytes": part.nbytes,
        "missing": part.missing,
        "committed": part.is_committed,
    }
