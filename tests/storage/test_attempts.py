"""Attempts on an object store: whatever happens between any two operations, there is the old checkpoint or the new."""

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from dtckpt.errors import CheckpointNotFoundError, StorageError
from dtckpt.format.manifest import MANIFEST_NAME
from dtckpt.storage import attempts
from dtckpt.storage.attempts import COMMITTED, FORGET_AFTER_S, REGISTER, ObjectPlace, Register
from dtckpt.storage.foreign import ForeignFolder
from dtckpt.storage.locations import Url

WHERE = Url("memory", "run/step_1")
HOUR_S = 3600.0


class Clock:
    def __init__(self):
        self.now = 1e9

    def __call__(self):
        return self.now


class Folder(ForeignFolder):
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
def place(folder, clock):
    return ObjectPlace(Register(WHERE, folder, clock))


def save(place, token, *, overwrite=True):
    attempt = place.begin(token)
    fill(attempt, token)
    attempt.commit(overwrite=overwrite)
    return attempt


def fill(attempt, token):
    for name in ("data", "more/data", MANIFEST_NAME):
        attempt.folder.write(name, token.encode())


def content(place):
    """What the checkpoint holds, all of which must be of one attempt; None if there is none."""
    try:
        folder = place.locate()
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
def test_a_crash_anywhere_leaves_old_or_new(place, monkeypatch, leftover):
    """Also where there is still something to be tidied up of a crash before."""
    seen = []
    for number in itertools.count():
        MemoryFileSystem.store.clear()
        save(place, "old")
        if leftover:
            fill(place.begin("dead"), "dead")
        with monkeypatch.context() as patch:
            crash_at(patch, number)
            try:
                save(place, "new")
            except Crash:
                is_over = False
            else:
                is_over = True
        seen.append(content(place))
        assert seen[-1] in ("old", "new")
        save(place, "newer")
        assert content(place) == "newer"
        if is_over:
            break
    changes = [this for this, last in zip(seen, [None, *seen], strict=False) if this != last]
    assert changes == ["old", "new"]
    assert len(seen) > 10


def test_a_crash_amid_removal_leaves_all_or_nothing(place, monkeypatch):
    seen = []
    for number in itertools.count():
        MemoryFileSystem.store.clear()
        save(place, "old")
        with monkeypatch.context() as patch:
            crash_at(patch, number)
            try:
                place.remove()
            except Crash:
                is_over = False
            else:
                is_over = True
        seen.append(content(place))
        if is_over:
            break
    changes = [this for this, last in zip(seen, ["", *seen], strict=False) if this != last]
    assert changes == ["old", None]
    save(place, "new")
    assert content(place) == "new"


def test_two_leaders_at_once(place, monkeypatch):
    """In any order of their operations, each is committed or told that it is not, and what counts is whole.

    They are committed in the order of their numbers: what was committed last is what is read.
    """
    outcomes = set()
    for seed in range(300):
        MemoryFileSystem.store.clear()
        Folder.committed.clear()
        save(place, "old")
        outcomes.add(_race(place, monkeypatch, random.Random(seed)))
    assert outcomes == {("a",), ("b",), ("a", "b"), ("b", "a")}  # the last one is what is there


def _race(place, monkeypatch, chance):
    """Let two leaders save, one operation at a time; return who was told that it succeeded, the newest last."""
    turn, waiting, tokens, refusals = threading.Condition(), {}, {}, []

    def watch():
        with turn:
            waiting[threading.current_thread().name] = False
            turn.notify_all()
            assert turn.wait_for(lambda: waiting[threading.current_thread().name], 30)

    def lead(name):
        threading.current_thread().name = name
        try:
            tokens[save(place, name).token] = name
        except StorageError as error:
            refusals.append(str(error))
        with turn:
            waiting.pop(name, None)
            running.discard(name)
            turn.notify_all()

    running = {"a", "b"}
    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(Folder, "watch", staticmethod(watch))
        both = [pool.submit(lead, name) for name in "ab"]
        with turn:
            while running:
                # All that run stand before an operation; one may do it, and comes to its next or to its end.
                assert turn.wait_for(lambda: all(waiting.get(name) is False for name in running), 30)
                if running:
                    name = chance.choice(sorted(running))
                    waiting[name] = True
                    turn.notify_all()
        for leader in both:
            leader.result(30)
    assert Folder.committed == sorted(Folder.committed)
    committed = tuple(name for _, name in sorted(tokens.items()))
    assert committed, "none of two"
    assert len(committed) + len(refusals) == 2
    assert all("another attempt" in text for text in refusals)
    assert content(place) == committed[-1]
    return committed


# --- what is left ------------------------------------------------------------------------------------


def test_only_what_is_old_is_dead(place, folder, clock):
    register = Register(WHERE, folder, clock)
    attempt = place.begin("1")
    fill(attempt, "1")

    def collect(min_age_s):
        return register.collect(lambda name: clock.now - register.last_sign_s(name) > min_age_s)

    clock.now += 2 * HOUR_S
    register.renew(attempt.token)
    clock.now += HOUR_S / 2
    assert collect(HOUR_S) == []
    clock.now += HOUR_S
    assert collect(HOUR_S) == [attempt.token]
    assert attempt.folder.names() == []
    with pytest.raises(StorageError, match="took over"):
        attempt.commit(overwrite=True)
    assert content(place) is None


def test_what_comes_late_is_removed_by_the_next(place, folder, clock):
    attempt = place.begin("1")
    save(place, "2")
    fill(attempt, "late")
    assert content(place) == "2"
    save(place, "3")
    assert attempt.folder.names() == []
    fill(attempt, "later")
    place.join(attempt.token).sweep()
    assert attempt.folder.names() == []


def test_a_given_up_attempt_is_forgotten_in_the_end(place, folder, clock):
    attempt = place.begin("1")
    attempt.abandon()
    save(place, "2")
    register = Register(WHERE, folder, clock)
    assert attempt.token in register.attempts()
    clock.now += FORGET_AFTER_S + 1
    save(place, "3")
    assert attempt.token not in register.attempts()
    with pytest.raises(StorageError, match="took over"):
        attempt.commit(overwrite=True)
    assert content(place) == "3"
    assert len((folder / REGISTER).names()) == 2


def test_clocks_may_differ(place, folder, clock):
    """Attempts count on when the clock of the next leader is behind."""
    save(place, "1")
    clock.now -= HOUR_S
    save(place, "2")
    assert content(place) == "2"
    clock.now -= HOUR_S
    newest = place.begin("3")
    clock.now -= HOUR_S
    other = place.begin("4")
    assert other.token > newest.token
    with pytest.raises(StorageError, match="took over"):
        newest.commit(overwrite=True)


def test_a_leader_says_that_it_lives(place, folder, clock, monkeypatch):
    monkeypatch.setattr(attempts, "RENEW_S", 0.001)
    register, attempt = Register(WHERE, folder, clock), place.begin("1")
    renewed = threading.Event()
    renew = Register.renew
    monkeypatch.setattr(Register, "renew", lambda *args: (renew(*args), renewed.set()))
    clock.now += HOUR_S
    with attempt.alive():
        assert renewed.wait(30)
    assert register.last_sign_s(attempt.token) == clock.now


def test_a_commit_counts_whatever_becomes_of_the_old_one(place, monkeypatch, caplog):
    older = save(place, "old")
    with monkeypatch.context() as patch:
        patch.setattr(Folder, "clear", lambda *args: (_ for _ in ()).throw(OSError("no removals here")))
        newer = place.begin("new")
        fill(newer, "new")
        newer.commit(overwrite=True)
    assert "no removals here" in caplog.text
    assert content(place) == "new"
    assert older.folder.names() != []
    save(place, "newer")
    assert older.folder.names() == newer.folder.names() == []
    assert content(place) == "newer"


def test_the_newest_that_was_committed_counts(place, folder, clock):
    """Also while the one before it is still there."""
    register = Register(WHERE, folder, clock)
    for token in ("1", "2"):
        fill(place.join(attempt := register.claim(token)), token)
        assert register.decide(attempt, COMMITTED)
    assert content(place) == "2"


def test_a_commit_whose_answer_was_lost(place, monkeypatch):
    """Storage that is asked again, after it had done it, says that it is done already."""
    attempt = place.begin("1")
    fill(attempt, "1")
    create = Folder.create
    monkeypatch.setattr(Folder, "create", lambda *args: create(*args) and create(*args))
    attempt.commit(overwrite=False)
    assert content(place) == "1"
