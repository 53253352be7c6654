"""Training time that failures and saves cost a day: with a local tier of 1, 2 and 3 copies, and without one.

Run: ``python -m benchmarks.tiers_simulation [--days 365] [--output tiers.svg]``. 16 384 clients on 2 048 hosts train
for a year, in a simulation. Failures come at random, as often and of such kinds as in the training of Llama 3
(419 in 54 days; The Llama 3 Herd of Models, 2024). Which hosts are lost together is drawn for each of them, and the
real `CopyHosts` of the tier decide whether a step is lost (`dtckpt.checkpoint.tiers.copy_hosts`).

Costs, in seconds, are assumptions of `Costs`; the costs of a save and a restore follow from bytes and bandwidths. A
save to the root is asynchronous; its interval is the best one by Daly's formula (`dtckpt.optimal_interval`).
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

import dtckpt
from benchmarks.results import show
from dtckpt.checkpoint.tiers.copy_hosts import CopyHosts
from dtckpt.pictures.svg import Picture

NUM_HOSTS, HOSTS_PER_RACK, RACKS_PER_ROW = 2048, 8, 32
MTBF_S = 54 * 86400 / 419
DAY_S = 86400.0
# Shares of the causes in the table of that report, by the machines that they take.
KINDS = {"processes": 0.15, "host": 0.74, "rack": 0.10, "row": 0.01}


@dataclass(frozen=True)
class Costs:
    """Seconds, but for the bytes.

    Args:
        state_nbytes: Bytes of the state: 405 billion parameters, 14 bytes each.
        detect_s: Until a failure is noticed.
        restart_s: Until all processes run again.
        local_block_s: How long a save in the tier stops training.
        root_block_s: How long an asynchronous save to the root does.
        link: Bytes per second between two hosts.
        storage: Bytes per second of the storage of the root, all hosts together.
    """

    state_nbytes: float = 405e9 * 14
    detect_s: float = 30.0
    restart_s: float = 60.0
    local_block_s: float = 0.25
    root_block_s: float = 1.5
    link: float = 40e9
    storage: float = 100e9

    @property
    def copy_s(self) -> float:
        """Until a host's part is on another host."""
        return self.state_nbytes / NUM_HOSTS / self.link

    @property
    def root_s(self) -> float:
        """Until the state is written to the root, or read from it."""
        return self.state_nbytes / self.storage


@dataclass(frozen=True)
class Outcome:
    """Hours a day that were not training, by why; and failures after which the root was needed."""

    saves: float
    waiting: float
    repeated: float
    from_root: int
    failures: int

    @property
    def total(self) -> float:
        """All hours a day."""
        return self.saves + self.waiting + self.repeated


def lost_hosts(kind: str, chance: random.Random) -> list[str]:
    """Return the hosts that a failure takes, with their memory."""
    first = chance.randrange(NUM_HOSTS)
    size = {"processes": 0, "host": 1, "rack": HOSTS_PER_RACK, "row": HOSTS_PER_RACK * RACKS_PER_ROW}[kind]
    start = first // size * size if size else 0
    return [name(host) for host in range(start, start + size)]


def name(host: int) -> str:
    return f"host{host:04}"


def simulate(copies: int, costs: Costs, days: int, seed: int) -> Outcome:
    """Train for some days; ``copies`` is 0 without a local tier."""
    chance = random.Random(seed)
    # What fails as one is a row of racks; so copies are in other rows.
    domains = {name(host): f"row{host // (HOSTS_PER_RACK * RACKS_PER_ROW)}" for host in range(NUM_HOSTS)}
    copy_hosts = CopyHosts.of(domains, max(copies, 1))
    partners = {host: frozenset((host, *copy_hosts.partners(host))) for host in domains}
    root_every_s = max(dtckpt.optimal_interval(costs.root_block_s, MTBF_S), costs.root_s)
    local_every_s = dtckpt.optimal_interval(costs.local_block_s, MTBF_S) if copies else 0.0
    waiting = repeated = 0.0
    from_root = failures = 0
    at_s = chance.expovariate(1 / MTBF_S)
    while at_s < days * DAY_S:
        failures += 1
        lost = set(lost_hosts(chance.choices(list(KINDS), list(KINDS.values()))[0], chance))
        waiting += costs.detect_s + costs.restart_s
        if copies and not any(partners[host] <= lost for host in lost):
            # The newest step with all of its copies; the step before it, if the failure came amid the copies.
            repeated += chance.uniform(0, local_every_s) + (costs.copy_s if lost else 0.0)
            waiting += costs.copy_s if lost else 0.0
        else:
            from_root += 1
            repeated += chance.uniform(0, root_every_s) + costs.root_s
            waiting += costs.root_s
        at_s += chance.expovariate(1 / MTBF_S)
    blocked_s = DAY_S * (
        (costs.local_block_s / local_every_s if copies else 0.0)
        + (0.0 if copies else costs.root_block_s / root_every_s)
    )
    return Outcome(blocked_s / 3600, waiting / days / 3600, repeated / days / 3600, from_root, failures)


def draw(outcomes: Sequence[tuple[str, Outcome]], file: Path) -> None:
    """Draw the hours as bars."""
    colours = {"saves": "#0072b2", "waiting": "#e69f00", "repeated": "#d55e00"}
    most = max(outcome.total for _, outcome in outcomes)
    picture = Picture("Hours a day that are not training", 840, 90 + 44 * len(outcomes))
    picture.text(16, 26, "Hours a day that are not training, 16 384 clients, failures as of Llama 3", "h")
    for number, (label, colour) in enumerate(colours.items()):
        picture.rect(16 + 170 * number, 40, 12, 12, colour)
        picture.text(
            34 + 170 * number,
            50,
            {"saves": "saves", "waiting": "detect, restart, read", "repeated": "steps done again"}[label],
            "s",
        )
    for row, (label, outcome) in enumerate(outcomes):
        y = 70 + 44 * row
        picture.text(16, y + 19, label)
        x = 190.0
        for part, colour in colours.items():
            hours = getattr(outcome, part)
            picture.rect(x, y, 480 * hours / most, 28, colour, f"{part}: {hours:.2f} h")
            x += 480 * hours / most
        picture.text(x + 8, y + 19, f"{outcome.total:.2f} h, {100 * outcome.total / 24:.1f} %")
    file.write_text(picture.svg())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=365)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    fast, slow = Costs(), Costs(storage=10e9)
    cases = [
        ("root at 10 GB/s", 0, slow),
        ("  tier, 2 copies", 2, slow),
        ("root at 100 GB/s", 0, fast),
        ("  tier, 1 copy", 1, fast),
        ("  tier, 2 copies", 2, fast),
        ("  tier, 3 copies", 3, fast),
    ]
    outcomes = [(label, simulate(copies, costs, arguments.days, arguments.seed)) for label, copies, costs in cases]
    table = Table("", "saves h/day", "waiting", "repeated", "all", "of the day", "failures", "from the root")
    for label, each in outcomes:
        hours = [f"{value:.2f}" for value in (each.saves, each.waiting, each.repeated, each.total)]
        table.add_row(label, *hours, f"{100 * each.total / 24:.1f} %", str(each.failures), str(each.from_root))
    show(table, width=120)
    if arguments.output is not None:
        draw(outcomes, arguments.output)


if __name__ == "__main__":
    main()
