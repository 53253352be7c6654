"""Clients that freeze during a save and come back late, and clients that are killed at any instant, again and again."""

import os
import random
import signal
from collections import Counter

import pytest
from support.shares import amount, share

from . import crash_cases
from .crash_faults import HEARTBEAT_TIMEOUT_S, faults_in, record, run_each_in_a_folder
from .forked_clients import Fault

pytestmark = pytest.mark.processes

SAMPLE = 3
"""How many operations a client freezes at, per key-value store."""
SAVES = amount(3, 25)
"""Saves in a row under random kills."""
FROZEN_SAVES = amount(2, 25)
"""Saves in a row of which one client freezes, each followed by one amid which such clients come back."""
ROWS = share(range(20), 2, "rows of saves")
"""Seeds of such rows."""
FEWEST_OPERATIONS = 90
"""File operations that a save has at least."""


@pytest.mark.share(1, of="crashes")
@pytest.mark.parametrize("is_replaced", [False, True], ids=["no other client saved", "a later attempt saved"])
@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
def test_a_frozen_client_comes_back_too_late(nursery, tmp_path, kvstore, is_replaced):
    options = {"kvstore": kvstore, "clients": 2}
    (tmp_path / "recorded").mkdir()
    record(nursery, tmp_path / "recorded" / "s", **options)
    operations = record(nursery, tmp_path / "recorded" / "s", **options)
    faults = list(faults_in(operations, ["stop"]))
    tried = share(faults, SAMPLE, f"{kvstore} {is_replaced}")
    leaders = [operation.call for operation in operations if operation.client == 0]
    (commit,) = (fault for fault in faults if fault.client == 0 and fault.at == leaders.index("renameat2") + 1)
    if commit not in tried:
        tried.append(commit)  # which is what must not come late
    run_each_in_a_folder(
        tmp_path,
        tried,
        lambda folder, fault: frozen_save(nursery, folder, fault, is_replaced=is_replaced, **options),
    )
    print(f"{kvstore}, {is_replaced=}: {len(tried)} of {len(faults)} operations")


def frozen_save(nursery, folder, fault, *, is_replaced, **options):
    """Let a client freeze, the other one give it up and perhaps a later attempt save; then let it go on."""
    path = str(folder / "s")
    nursery.values(crash_cases.save, path, "old", **options)
    job = nursery.start(
        crash_cases.save,
        path,
        "frozen",
        folder=str(folder),
        fault=fault,
        heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
        **options,
    )
    job.wait(lambda job: job.answers)
    if job.struck is None:  # this save was some operations shorter than the recorded one
        assert [answer.error for answer in job.finish()] == ["", ""]
        return
    survivor = job.answers[1 - fault.client]
    where = f"{fault}, struck {job.struck}: {survivor}"
    assert survivor.error == "ClientLostError", where
    assert tuple(survivor.facts["clients"]) == (fault.client,), where
    before = crash_cases.generation_at(path)
    assert before in ("old", "frozen"), where
    if is_replaced:
        before = "later"
        nursery.values(crash_cases.save, path, before, **options)
    job.kill(fault.client, signal.SIGCONT)
    zombie = job.finish()[fault.client]
    where += f"; afterwards {zombie}"
    assert zombie.error in ("ClientLostError", "StorageError"), where
    # If no client saved meanwhile, a leader may still put the new checkpoint in place, whole; nothing else may change.
    allowed = {before} if is_replaced or fault.client != 0 else {before, "frozen"}
    assert crash_cases.generation_at(path) in allowed, where
    nursery.values(crash_cases.save, path, "next", **options)
    assert crash_cases.generation_at(path) == "next", where
    assert os.listdir(folder) == ["s"], where


@pytest.mark.share(1, of="crashes")
def test_frozen_clients_come_back_amid_later_saves(nursery, tmp_path):
    counts = run_each_in_a_folder(tmp_path, ROWS, lambda folder, seed: frozen_saves(nursery, folder, seed))
    print(f"{len(ROWS)} rows of {FROZEN_SAVES} saves: clients frozen, came back amid a later save, errors: {counts}")
    assert sum(frozen for frozen, *_ in counts) > len(ROWS) * FROZEN_SAVES // 2


def frozen_saves(nursery, folder, seed):
    """Let clients freeze, and go on at any instant of later attempts; return the counts.

    Nothing that is committed is harmed, and no later attempt: also not by a leader that froze before it had begun.
    """
    draw, path = random.Random(seed), str(folder / "s")
    frozen, num_frozen, num_amid, found = [], 0, 0, Counter()
    for number in range(FROZEN_SAVES):
        options = {"clients": 2, "folder": str(folder), "kvstore": draw.choice(["ocdbt", "zarr"])}
        fault = Fault(draw.randrange(2), "stop", draw.randint(1, FEWEST_OPERATIONS // 2))
        job = nursery.start(
            crash_cases.save,
            path,
            f"frozen {number}",
            fault=fault,
            is_recorded=True,
            chunk_nbytes=1 << 15,
            heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
            attempt=2 * number,
            **options,
        )
        job.wait(lambda job: job.answers)
        where = f"seed {seed}, save {number}, {fault}, struck {job.struck}"
        if job.struck is None:
            assert [answer.error for answer in job.finish()] == ["", ""], where
        else:
            survivor = job.answers[1 - fault.client]
            assert survivor.error == "ClientLostError", f"{where}: {survivor}"
            assert tuple(survivor.facts["clients"]) == (fault.client,), where
            frozen.append((job, fault.client))
            num_frozen += 1

        until, options["attempt"] = draw.randint(1, FEWEST_OPERATIONS), 2 * number + 1
        later = nursery.start(
            crash_cases.save, path, f"later {number}", chunk_nbytes=1 << 15, is_recorded=True, **options
        )
        later.wait(lambda job, until=until: len(job.operations) >= until or job.answers)
        is_last = number == FROZEN_SAVES - 1
        back = [each for each in frozen if is_last or draw.random() < 0.7]  # the others stay away for longer
        frozen = [each for each in frozen if each not in back]
        num_amid += 0 if later.answers else len(back)
        for zombie, client in back:
            zombie.kill(client, signal.SIGCONT)
        where += f"; back at operation {until} of the later one: {[client for _, client in back]}"
        answers = later.finish()
        assert [answer.error for answer in answers] == ["", ""], f"{where}: {answers}"
        for zombie, client in back:
            answer = zombie.finish()[client]
            assert answer.error in ("ClientLostError", "StorageError"), f"{where}; afterwards {answer}"
            found[answer.error] += 1
        assert crash_cases.generation_at(path) == f"later {number}", where
    nursery.values(crash_cases.save, path, "last", clients=2)
    assert crash_cases.generation_at(path) == "last"
    assert os.listdir(folder) == ["s"]
    return num_frozen, num_amid, dict(found)


@pytest.mark.share(1, of="crashes")
def test_saves_under_random_kills(nursery, tmp_path):
    killed = run_each_in_a_folder(tmp_path, ROWS, lambda folder, seed: killed_saves(nursery, folder, seed))
    print(f"{len(ROWS)} rows of {SAVES} saves lost {killed} clients")
    assert sum(killed) > len(ROWS) * SAVES // 2


def killed_saves(nursery, folder, seed):
    """Save again and again, while clients are killed: nothing is lost, and errors name the killed clients; return how
    many."""
    draw, path, current, num_killed = random.Random(seed), str(folder / "s"), None, 0
    for number in range(SAVES):
        options = {"kvstore": draw.choice(["ocdbt", "zarr"]), "chunk_nbytes": 1 << 15}
        victim, until = draw.randrange(2), draw.randint(1, FEWEST_OPERATIONS)
        job = nursery.start(
            crash_cases.save,
            path,
            f"{number}",
            clients=2,
            folder=str(folder),
            is_recorded=True,
            heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
            **options,
        )
        job.wait(lambda job, until=until: len(job.operations) >= until or job.answers)
        job.kill(victim)  # which goes on meanwhile, so any instant may be its last
        answers = job.finish()
        found, survivor = crash_cases.generation_at(path), answers[1 - victim]
        where = f"seed {seed}, save {number}, victim {victim}, {answers}"
        if answers[victim].has_died:
            num_killed += 1
            assert found in (current, f"{number}"), where
        else:
            assert not answers[victim].error, where
        if survivor.error:
            assert survivor.error == "ClientLostError", where
            assert tuple(survivor.facts["clients"]) == (victim,), where
        else:
            assert found == f"{number}", where
        current = found
    nursery.values(crash_cases.save, path, "last", clients=2)
    assert crash_cases.generation_at(path) == "last"
    assert os.listdir(folder) == ["s"]
    return num_killed
