"""`ScrubState`: where the rounds of `scrub` through a root are, in a small file of the root; pure but for its bytes.

Any process with write access to the root may have written the file. So each fact is bounded, and a file of wrong types
counts as none: then the round begins again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from dtckpt.format import json_facts

STATE_NAME = ".dtckpt-scrub.json"
MAX_STATE_NBYTES = 16 << 20
DAY_S = 86400.0
_VERSION = 1


@dataclass(frozen=True, slots=True)
class KnownCheckpoint:
    """A checkpoint as the last round has seen it.

    Args:
        manifest: Digest of its manifest.
        rest: Digest of the bytes that no chunk covers, when they were seen first; some have no digest elsewhere.
        num_damages: Damages that the last round found and that were not mended.
    """

    manifest: int
    rest: int
    num_damages: int = 0


@dataclass(frozen=True, slots=True)
class ScrubState:
    """The state of the rounds.

    Args:
        name: The checkpoint that is next; empty: a round begins.
        segment: Number of the segment of it that is next.
        rotations: Rounds that have ended.
        began_s: When the round began, in seconds since the epoch.
        at_s: When the last run ended.
        left: Bytes of the budget that it left.
        known: The checkpoints that were seen, by name.
    """

    name: str = ""
    segment: int = 0
    rotations: int = 0
    began_s: float = 0.0
    at_s: float = 0.0
    left: float = 0.0
    known: Mapping[str, KnownCheckpoint] = field(default_factory=dict)

    def allowance(self, bytes_per_day: float | None, now: float) -> float:
        """Return the bytes that a run may read at a time: the rest of the last run, and the share of the day since."""
        if bytes_per_day is None:
            return float("inf")
        # At first, and if the clock went back or the file is prepared, a whole day's.
        if not 0 < self.at_s <= now:
            return bytes_per_day
        return min(bytes_per_day, self.left + (now - self.at_s) / DAY_S * bytes_per_day)

    def order(self, names: Collection[str]) -> list[str]:
        """Return the checkpoints among ``names`` that this round has not visited yet; the oldest first."""
        ordered = sorted(names, key=lambda name: (len(name), name))
        return [name for name in ordered if (len(name), name) >= (len(self.name), self.name)]

    def seen(self, name: str, known: KnownCheckpoint) -> ScrubState:
        """Return the state in which a checkpoint is known."""
        return replace(self, known={**self.known, name: known})

    def only(self, names: Collection[str]) -> ScrubState:
        """Return the state without checkpoints that are gone."""
        return replace(self, known={name: known for name, known in self.known.items() if name in names})

    def to_bytes(self) -> bytes:
        """Return the file."""
        facts = {
            "version": _VERSION,
            "name": self.name,
            "segment": self.segment,
            "rotations": self.rotations,
            "began_s": self.began_s,
            "at_s": self.at_s,
            "left": self.left,
            "known": {name: [each.manifest, each.rest, each.num_damages] for name, each in self.known.items()},
        }
        return json.dumps(facts, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> ScrubState:
        """Read the file.

        Raises:
            ValueError: The file is damaged, prepared, or of a newer version.
        """
        facts = json_facts.parse_object(data)
        if facts.get("version") != _VERSION:
            raise ValueError(f"its version is not {_VERSION}")
        known = json_facts.fields(facts.get("known"))
        rows = {name: json_facts.items(row) for name, row in known.items()}
        if any(len(row) != 3 for row in rows.values()):
            raise ValueError("a checkpoint has not three numbers")
        return cls(
            name=json_facts.text(facts.get("name")),
            segment=json_facts.whole(facts.get("segment")),
            rotations=json_facts.whole(facts.get("rotations")),
            began_s=json_facts.amount(facts.get("began_s")),
            at_s=json_facts.amount(facts.get("at_s")),
            left=json_facts.amount(facts.get("left")),
            known={
                name: KnownCheckpoint(*(json_facts.whole(each, 1 << 64) for each in row)) for name, row in rows.items()
            },
        )
