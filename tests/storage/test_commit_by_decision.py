"""The commit by decision: a crash between any two operations, or two leaders at once, leave one whole checkpoint."""

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.shares import share

from dtckpt.errors import CheckpointExistsError, CheckpointNotFoundError, StorageError
from dtckpt.format.manifest import MANIFEST_NAME
from dtckpt.storage import commit_by_decision
from dtckpt.storage.commit_by_decision import (
    COMMITTED,
    FORGET_AFTER_S,
    REGISTER_FOLDER,
    SILENT_AFTER_S,
    AttemptRegister,
    ObjectStoreTarget,
)
from dtckpt.storage.fsspec_folder import FsspecFolder
from dtckpt.storage.url import Url

WHERE = Url("memory", "run/step_1")
HOUR_S = 3600.0
RACES = 40
"""How many races of rivals one run tries."""


class Clock:
    def __init__(self):
        self.now = 1e9

    def __call__(self):
        return self.now


class Folder(FsspecFolder):
    """A folder in memory that tells ``watch`` of every operation before it is done, file by file."""

    watch = staticmethod(lambda: None)
    committed: ClassVar[list[str]] = []

    def write(self, name, data, **options):
        self.watch()
        super().write(name, data, **options)

    def create(self, name, data):
        self.watch()
        is_new = super().create(name, data)
        if is_new and data == COMMITTED:
            self.committed.append(name)
        return is_new

    def read(self, name, *args):
        self.watch()
        return super().read(name, *args)

    def names(self, prefix=""):
        self.watch()
        return super().names(prefix)

    def remove(self, names):
        for name in names:
            self.watch()
            super().remove([name])

    def clear(self):
        self.remove(self.names())


@pytest.fixture
def folder():
    MemoryFileSystem.store.clear()
    yield Folder(MemoryFileSystem(), "/run", "memory://run")
    MemoryFileSystem.store.clear()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def target(folder, clock):
    return ObjectStoreTarget(AttemptRegister(WHERE, folder, clock))


def save(target, token, *, overwrite=True):
    attempt = target.begin(token)
    fill(attempt, token)
    attempt.commit(overwrite=overwrite)
    return attempt


def fill(attempt, token):
    for name in ("data", "more/data", MANIFEST_NAME):
        attempt.folder.write(name, token.encode())


def content(target):
    """What the checkpoint holds, all of which must be of one attempt; None if there is none."""
    try:
        folder = target.locate()
    except CheckpointNotFoundError:
        return None
    found = {folder.read(name) for name in ("data", "more/data", MANIFEST_NAME)}
    assert len(found) == 1
    return found.pop().decode()


class Crash(BaseException):
    pass


def crash_at(monkeypatch, number):
    count = itertools.count()

    def watch():
        if next(count) >= number:
            raise Crash

    monkeypatch.setattr(Folder, "watch", staticmethod(watch))
    return count


@pytest.mark.parametrize("leftover", [False, True])
def test_a_crash_anywhere_leaves_old_or_new(target, monkeypatch, leftover):
    """Also where there is still something to be tidied up of a crash before."""
    seen = []
    for number in itertools.count():
        MemoryFileSystem.store.clear()
        save(target, "old")
        if leftover:
            fill(target.begin("dead"), "dead")
        with monkeypatch.context() as patch:
            crash_at(patch, number)
            try:
                save(target, "new")
            except Crash:
                is_over = False
            else:
                is_over = True
        seen.append(content(target))
        assert seen[-1] in ("old", "new")
        save(target, "newer")
        assert content(target) == "newer"
        if is_over:
            break
    changes = [this for this, last in zip(seen, [None, *seen], strict=False) if this != last]
    assert changes == ["old", "new"]
    assert len(seen) > 10


def test_a_crash_amid_removal_leaves_all_or_nothing(target, monkeypatch):
    seen = []
    for number in itertools.count():
        MemoryFileSystem.store.clear()
        save(target, "old")
        with monkeypatch.context() as patch:
            crash_at(patch, number)
            try:
                target.remove()
            except Crash:
                is_over = False
            else:
                is_over = True
        seen.append(content(target))
        if is_over:
            break
    changes = [this for this, last in zip(seen, ["", *seen], strict=False) if this != last]
    assert changes == ["old", None]
    save(target, "new")
    assert content(target) == "new"


def test_two_leaders_at_once(target, monkeypatch):
    """In any order of their operations, each is committed or told that it is not, and what counts is whole.

    They are committed in the order of their numbers: what was committed last is what is read.
    """
    outcomes = set()
    # A hundred of them bring about every outcome; others are tried beside them each day.
    for seed in (*range(100), *share(range(100, 1000), 20, "orders of two leaders")):
        saves = race(target, monkeypatch, random.Random(seed), leaders=2, rounds=1)
        outcomes.add(tuple(save.leader for save in saves if save.token))
    assert outcomes >= {("a",), ("b",), ("a", "b"), ("b", "a")}  # the last one is what is there


@pytest.mark.share(1)
@pytest.mark.parametrize(("leaders", "rounds"), [(2, 6), (3, 3)])
def test_rivals_that_try_again_and_again(target, monkeypatch, leaders, rounds):
    """An attempt is refused only for a committed rival: of attempts at the same time at least one is committed."""
    count = 0
    for seed in share(range(600), RACES, f"races of {leaders}"):
        saves = race(target, monkeypatch, random.Random(seed), leaders=leaders, rounds=rounds)
        for refused in saves:
            rivals = [save for save in saves if save.token and save.start < refused.end and refused.start < save.end]
            assert refused.token or rivals, f"seed {seed}: {refused} of {saves}"
        count += sum(bool(save.token) for save in saves)
    assert count > RACES * leaders * rounds * 0.7


@dataclass
class Save:
    """A save of a race: from which operation to which; its attempt's name if it was committed."""

    leader: str
    start: int
    end: int = 0
    token: str = ""


def race(target, monkeypatch, chance, *, leaders, rounds):
    """Let leaders save, and a reader look, one operation at a time; return the saves, in the order of their ends."""
    MemoryFileSystem.store.clear()
    Folder.committed.clear()
    save(target, "old")
    turn, may_go, saves, seen, now = threading.Condition(), {}, [], [""], itertools.count()

    def watch():
        with turn:
            may_go[threading.current_thread().name] = False
            turn.notify_all()
            assert turn.wait_for(lambda: may_go[threading.current_thread().name], 30)
            next(now)

    def lead():
        for number in range(rounds):
            this = Save(threading.current_thread().name, next(now))
            with suppress(StorageError):
                this.token = save(target, f"{this.leader}{number}").token
            this.end = next(now)
            saves.append(this)

    def look():
        seen.extend(str(target.locate()) for _ in range(3 * leaders * rounds))

    def take_part(name, work):
        threading.current_thread().name = name
        watch()
        try:
            work()
        finally:
            with turn:
                del may_go[name]
                turn.notify_all()

    names = "abc"[:leaders]
    may_go.update(dict.fromkeys([*names, "reader"], True))
    with monkeypatch.context() as patch, ThreadPoolExecutor(leaders + 1) as pool:
        patch.setattr(Folder, "watch", staticmethod(watch))
        all_done = [pool.submit(take_part, name, lead) for name in names] + [pool.submit(take_part, "reader", look)]
        with turn:
            while may_go:
                # All stand before an operation; one may do it, and comes to its next or to its end.
                assert turn.wait_for(lambda: not any(may_go.values()), 30)
                if may_go:
                    may_go[chance.choice(sorted(may_go))] = True
                    turn.notify_all()
        for done in all_done:
            done.result(30)
    assert Folder.committed == sorted(set(Folder.committed))
    committed = [save for save in saves if save.token]
    assert [f"{name}.decision" for name in sorted(save.token for save in committed)] == Folder.committed[1:]
    assert content(target)[0] == max(committed, key=lambda save: save.token).leader
    assert seen == sorted(seen)
    return sorted(saves, key=lambda save: (save.token, save.end))


def test_a_living_rival_is_given_up_for_one_that_is_committed(target, clock):
    older, newer = target.begin("older"), target.begin("newer")
    fill(older, "older")
    older.commit(overwrite=True)  # the newer one has not come so far
    assert content(target) == "older"
    fill(newer, "newer")
    newer.commit(overwrite=True)
    assert content(target) == "newer"
    assert older.folder.names() == []

    older, newer = target.begin("older"), target.begin("newer")
    fill(newer, "newer")
    newer.commit(overwrite=True)
    with pytest.raises(StorageError, match="took over"):
        older.commit(overwrite=True)


def test_a_silent_attempt_is_given_up_by_whoever_begins(target, clock):
    silent = target.begin("silent")
    fill(silent, "silent")
    clock.now += SILENT_AFTER_S + 1
    newer = target.begin("newer")
    assert silent.folder.names() == []
    with pytest.raises(StorageError, match="took over"):
        silent.commit(overwrite=True)
    fill(newer, "newer")
    newer.commit(overwrite=True)


def test_of_two_that_would_not_replace_one_is_committed(target):
    older, newer = target.begin("older"), target.begin("newer")
    for attempt, token in ((older, "older"), (newer, "newer")):
        fill(attempt, token)
    older.commit(overwrite=False)
    with pytest.raises(CheckpointExistsError):
        newer.commit(overwrite=False)
    assert content(target) == "older"


# --- leftovers ---------------------------------------------------------------------------------------


def test_only_what_is_old_is_dead(target, folder, clock):
    register = AttemptRegister(WHERE, folder, clock)
    attempt = target.begin("1")
    fill(attempt, "1")

    clock.now += 2 * HOUR_S
    register.renew(attempt.token)
    clock.now += HOUR_S / 2
    assert register.collect(silent_for_s=HOUR_S) == []
    clock.now += HOUR_S
    assert register.collect(silent_for_s=HOUR_S) == [attempt.token]
    assert attempt.folder.names() == []
    with pytest.raises(StorageError, match="took over"):
        attempt.commit(overwrite=True)
    assert content(target) is None


def test_what_comes_late_is_removed_by_the_next(target, folder, clock):
    attempt = target.begin("1")
    save(target, "2")
    fill(attempt, "late")
    assert content(target) == "2"
    save(target, "3")
    assert attempt.folder.names() == []
    fill(attempt, "later")
    target.join(attempt.token).sweep()
    assert attempt.folder.names() == []


def test_a_given_up_attempt_is_forgotten_in_the_end(target, folder, clock):
    attempt = target.begin("1")
    attempt.abandon()
    save(target, "2")
    register = AttemptRegister(WHERE, folder, clock)
    assert attempt.token in register.attempts()
    clock.now += FORGET_AFTER_S + 1
    save(target, "3")
    assert attempt.token not in register.attempts()
    with pytest.raises(StorageError, match="took over"):
        attempt.commit(overwrite=True)
    assert content(target) == "3"
    assert len((folder / REGISTER_FOLDER).names()) == 2


def test_clocks_may_differ(target, folder, clock):
    """Attempts count on when the clock of the next leader is behind."""
    save(target, "1")
    clock.now -= HOUR_S
    save(target, "2")
    assert content(target) == "2"
    clock.now -= HOUR_S
    newest = target.begin("3")
    clock.now -= HOUR_S
    other = target.begin("4")
    assert other.token > newest.token
    other.commit(overwrite=True)
    with pytest.raises(StorageError, match="took over"):
        newest.commit(overwrite=True)


def test_a_leader_says_that_it_lives(target, folder, clock, monkeypatch):
    monkeypatch.setattr(commit_by_decision, "RENEW_S", 0.001)
    register, attempt = AttemptRegister(WHERE, folder, clock), target.begin("1")
    renewed = threading.Event()
    renew = AttemptRegister.renew
    monkeypatch.setattr(AttemptRegister, "renew", lambda *args: (renew(*args), renewed.set()))
    clock.now += HOUR_S
    with attempt.keep_alive():
        assert renewed.wait(30)
    assert not register.is_silent(attempt.token, 0)


def test_a_commit_counts_whatever_becomes_of_the_old_one(target, monkeypatch, caplog):
    older = save(target, "old")
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "clear", lambda *args: (_ for _ in ()).throw(OSError("no removals here")))
        newer = target.begin("new")
        fill(newer, "new")
        newer.commit(overwrite=True)
    assert "no removals here" in caplog.text
    assert content(target) == "new"
    assert older.folder.names() != []
    save(target, "newer")
    assert older.folder.names() == newer.folder.names() == []
    assert content(target) == "newer"


def test_the_newest_that_was_committed_counts(target, folder, clock):
    """Also while the attempt before it is still there."""
    register = AttemptRegister(WHERE, folder, clock)
    for token in ("1", "2"):
        fill(target.join(attempt := register.claim(token)), token)
        assert register.decide(attempt, COMMITTED)
    assert content(target) == "2"


def test_a_commit_whose_answer_was_lost(target, monkeypatch):
    """Storage that is asked again, after it had done it, says that it is done already."""
    attempt = target.begin("1")
    fill(attempt, "1")
    create = Folder.create
    monkeypatch.setattr(Folder, "create", lambda *args: create(*args) and create(*args))
    attempt.commit(overwrite=False)
    assert content(target) == "1"
