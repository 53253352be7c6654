"""Which steps belong to the run that saved last, in histories of saves, restores, crashes and removals."""

import random
from contextlib import suppress
from dataclasses import dataclass

import pytest

from dtckpt.checkpoint.managing.lineage import UNKNOWN, Lineage, Run, ancestry, current_steps


@dataclass(frozen=True)
class Commit:
    """A commit as the model knows it: with all that it truly descends from."""

    step: int
    order: int
    ancestors: frozenset


class History:
    """One root, of which the model remembers everything and the rules see what is on disk."""

    def __init__(self, chance, *, legacy=0):
        self.chance = chance
        self.disk, self.saved, self.order, self.clock = {}, {}, 0, 0
        chain = frozenset()
        for step in range(1, legacy + 1):  # saved by a version that recorded no lineage
            self.disk[step], self.saved[step] = Commit(step, 0, chain), UNKNOWN
            chain |= {self.disk[step]}
        self.newest = self.disk.get(legacy)
        self.restart()

    def restart(self):
        self.run, self.chain = None, None

    def restore(self, step):
        self.run = Run.at(self.saved, ancestry(self.saved, step))
        self.chain = self.disk[step].ancestors | {self.disk[step]}

    def save(self, step, *, fails=False):
        run = self.run or Run.at(self.saved, current_steps(self.saved))
        chain = self.chain
        if chain is None:
            chain = self.newest.ancestors | {self.newest} if self.newest else frozenset()
        self.clock += self.chance.choice((0, 1, 10**9)) - self.chance.choice((0, 0, 10**6))
        self.run, lineage = run.save(step, self.saved, self.clock)
        self.chain = frozenset(commit for commit in chain if commit.step < step or (fails and commit.step == step))
        if not fails:
            self.order += 1
            self.newest = Commit(step, self.order, frozenset(commit for commit in chain if commit.step < step))
            self.disk[step], self.saved[step] = self.newest, Lineage.from_bytes(lineage.to_bytes())
            self.chain |= {self.newest}

    def remove(self, step):
        if self.disk[step] != self.newest:
            del self.disk[step], self.saved[step]

    def check(self):
        chain = self.newest.ancestors | {self.newest} if self.newest else frozenset()
        expected = {step for step, commit in self.disk.items() if commit in chain}
        assert current_steps(self.saved) == expected
        if self.newest:
            assert max(expected) == self.newest.step


@pytest.mark.parametrize("legacy", [0, 4])
def test_random_histories(legacy):
    """Without damage, the rules know from the disk alone what the model remembers."""
    for seed in range(1500):
        chance = random.Random(seed)
        history = History(chance, legacy=legacy)
        for _ in range(25):
            steps = sorted(history.disk)
            match chance.choice(("save", "save", "save", "fail", "restore", "restart", "remove", "smaller")):
                case "save":
                    top = max((commit.step for commit in history.chain or ()), default=0)
                    history.save(top + chance.randint(1, 3))
                case "fail":
                    history.save(chance.randint(1, 12), fails=True)
                case "smaller":
                    history.save(chance.randint(1, 12))
                # What an older version saved does not say what it descends from: only while it is of the newest run.
                case "restore" if steps:
                    step = chance.choice(steps)
                    if history.saved[step].number or step in current_steps(history.saved):
                        history.restore(step)
                case "restart":
                    history.restart()
                case "remove" if steps:
                    history.remove(chance.choice(steps))
            history.check()


def test_what_lost_its_lineage_stays_where_the_newest_commit_says():
    """A step whose file is gone is of the run, unless the newest commit has set it aside."""
    saved, run = {}, Run(frozenset())
    for step in (10, 20, 30):
        run, saved[step] = run.save(step, saved, step)
    run, saved[15] = Run.at(saved, ancestry(saved, 10)).save(15, saved, 40)
    assert current_steps(saved) == {10, 15}
    assert current_steps(saved | dict.fromkeys((10, 20, 30), UNKNOWN)) == {10, 15}
    assert current_steps(saved | {40: UNKNOWN}) == {10, 15, 40}  # another program put it there
    assert ancestry(saved | {40: UNKNOWN}, 40) == {10, 15, 40}
    _, later = run.save(25, saved | {10: UNKNOWN}, 50)  # it cannot be read for a moment
    assert later.aside == {20, 30}


def test_copies_of_a_checkpoint_are_of_its_run():
    saved, run = {}, Run(frozenset())
    for step in (10, 20):
        run, saved[step] = run.save(step, saved, step)
    assert current_steps(saved | {40: saved[20]}) == {10, 20, 40}


def test_a_manager_that_was_replaced_commits_late():
    """On an object store two managers may save for a moment: the later manager has the newest run."""
    run, first = Run(frozenset()).save(10, {}, 100)
    saved = {10: first}
    _, late = run.save(40, saved, 200)
    later, saved[15] = Run.at(saved, ancestry(saved, 10)).save(15, saved, 300)
    saved[40] = late
    assert current_steps(saved) == {10, 15}
    _, saved[45] = later.save(45, saved, 400)
    assert current_steps(saved) == {10, 15, 45}


@pytest.mark.parametrize("file", [b"", b"{}", b'{"number": 1, "aside": []}\n0\n', b"[]\n1\n"])
def test_damaged_files(file):
    with pytest.raises(ValueError, match=r"unpack|invalid literal|digest differs"):
        Lineage.from_bytes(file)


def test_any_flipped_bit_is_noticed():
    lineage = Lineage(1_760_000_000_000_000_000, frozenset({20, 30}))
    file = lineage.to_bytes()
    for position in range(8 * len(file)):
        flipped = bytearray(file)
        flipped[position // 8] ^= 1 << position % 8
        with suppress(ValueError):
            assert Lineage.from_bytes(bytes(flipped)) == lineage  # a digit of the digest in another case
