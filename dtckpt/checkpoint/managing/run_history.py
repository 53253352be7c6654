"""`RunHistory`: the runs that saved to a root, by which failures are counted; one small file for each run.

    .dtckpt-runs/
        00000001764108000000000000     a run: when it began, when it was last seen, whether it ended, the cost of saves
        00000001764115200000000000     the next one

A run writes its file when it first saves, after each commit, and when its manager is closed. So the file of a run that
was killed says "not ended", and until when it lived, to within one interval.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from dtckpt.checkpoint.managing.interval import Costs, PastRun
from dtckpt.format import json_facts
from dtckpt.storage.folder import Folder

logger = logging.getLogger("dtckpt.checkpoint")

RUNS_FOLDER = ".dtckpt-runs"
MAX_RUNS = 32
"""Runs that are remembered: older ones say little about the machines of today."""
MAX_NBYTES = 1 << 12
MAX_NUMBER = 10**26 - 1
"""The number of the last name that `_RUN_NAME` matches."""
_RUN_NAME = re.compile(r"[0-9]{26}")


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The contents of the file of a run; times are seconds since the epoch.

    Args:
        began_s: When the run began to save.
        seen_s: When it last had a checkpoint committed, or was closed.
        has_ended: Whether its manager was closed.
        costs: The costs of its saves; None if unknown.
    """

    began_s: float
    seen_s: float
    has_ended: bool = False
    costs: Costs | None = None

    def to_bytes(self) -> bytes:
        """Return the file."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> RunRecord:
        """Read the file.

        Raises:
            ValueError: The file is damaged.
        """
        facts = json_facts.parse_object(data)
        began_s, seen_s = (json_facts.amount(facts.get(name)) for name in ("began_s", "seen_s"))
        costs = None
        if facts.get("costs") is not None:
            measured = json_facts.fields(facts["costs"])
            costs = Costs(*(json_facts.amount(measured.get(name)) for name in ("blocking_s", "lag_s")))
        return cls(began_s, seen_s, json_facts.truth(facts.get("has_ended")), costs)


class RunHistory:
    """The runs of a root, and the record of this run. Only for the process with the right to the root.

    Args:
        folder: The root's folder for them.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._name = ""
        self._record = RunRecord(0.0, 0.0)

    def begin(self, now_s: float) -> tuple[Sequence[PastRun], Costs | None]:
        """Write the record of this run; return the runs before it, and the costs of the newest that knew any.

        Raises:
            OSError: Storage refused.
        """
        names = self._names()
        records = [record for name in names if (record := self._read(name)) is not None]
        self._folder.make()
        # Greater than all names, also where this clock is behind.
        number = max(int(now_s * 1e9), 1 + max(map(int, names), default=0))
        self._name = f"{min(number, MAX_NUMBER):026d}"
        self._record = RunRecord(now_s, now_s)
        self._folder.write(self._name, self._record.to_bytes())
        self._folder.remove(names[: 1 - MAX_RUNS])
        costs = next((record.costs for record in reversed(records) if record.costs is not None), None)
        return [PastRun(max(0.0, each.seen_s - each.began_s), not each.has_ended) for each in records], costs

    def note(self, now_s: float, costs: Costs | None, *, has_ended: bool) -> None:
        """Write how far this run is; nothing if it has not begun.

        Raises:
            OSError: Storage refused.
        """
        if self._name:
            costs = costs or self._record.costs
            self._record = replace(self._record, seen_s=now_s, costs=costs, has_ended=has_ended)
            self._folder.write(self._name, self._record.to_bytes())

    @property
    def uptime_s(self) -> float:
        """Seconds that this run was seen."""
        return self._record.seen_s - self._record.began_s

    def _names(self) -> list[str]:
        with suppress(FileNotFoundError):
            return [name for name in self._folder.names() if _RUN_NAME.fullmatch(name)]
        return []

    def _read(self, name: str) -> RunRecord | None:
        """Return a run's record; None if it is damaged, as by a power loss: it says too little then."""
        try:
            return RunRecord.from_bytes(self._folder.read_whole(name, MAX_NBYTES))
        except FileNotFoundError:
            return None
        except ValueError as error:
            logger.warning(
                "the record of a run, %s/%s, cannot be read and does not count: %s", self._folder, name, error
            )
            return None
