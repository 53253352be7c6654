"""Whatever happens at any file operation of a save: exactly the old or the new checkpoint restores, and saving goes on.

The operations are system calls, TensorStore's included, of real client processes. By default a share of them is
struck, another one each day; ``DTCKPT_TESTS=all`` strikes every one in every way, which takes hours of two cores.
"""

import os
from collections import Counter

import pytest
from support.shares import share

from . import crash_cases
from .crash_faults import HEARTBEAT_TIMEOUT_S, faults_in, record, run_each_in_a_folder

pytestmark = pytest.mark.processes

KINDS = ("kill", "EIO", "ENOSPC", "short")
ERRORS = {"kill": "ClientLostError", "EIO": "StorageError", "ENOSPC": "StorageFullError"}
SAMPLE = 12
"""How many faults are tried per key-value store and number of clients."""


@pytest.mark.share(1, of="crashes")
@pytest.mark.parametrize(("clients", "has_own"), [(1, False), (2, True)])
@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
def test_any_operation_may_be_the_last(nursery, tmp_path, kvstore, clients, has_own):
    options = {"kvstore": kvstore, "clients": clients, "has_own": has_own}
    (tmp_path / "recorded").mkdir()
    faults = []
    for has_old in (False, True):  # the second save replaces what the first has left
        operations = record(nursery, tmp_path / "recorded" / "s", **options)
        faults += [(has_old, fault) for fault in faults_in(operations, KINDS)]
    tried = share(faults, SAMPLE, f"{kvstore} {clients} {has_own}")
    outcomes = run_each_in_a_folder(
        tmp_path, tried, lambda folder, case: struck_save(nursery, folder, *case, **options)
    )
    print(f"{kvstore}, {clients} clients, own tensors {has_own}: {len(tried)} of {len(faults)} faults")
    for outcome, count in sorted(Counter(outcomes).items()):
        print(f"{count:6}", *outcome, sep=", ")


def struck_save(nursery, folder, has_old, fault, **options):
    """Let a fault strike one save and check the files after it; return the outcome, for counting."""
    path, old = str(folder / "s"), "old" if has_old else None
    if has_old:
        nursery.values(crash_cases.save, path, old, **options)
    timeout_s = HEARTBEAT_TIMEOUT_S if fault.kind == "kill" else 30.0
    job = nursery.start(
        crash_cases.save, path, "new", folder=str(folder), fault=fault, heartbeat_timeout_s=timeout_s, **options
    )
    answers = job.finish()
    where = f"{fault} of {options}, old {old}, struck {job.struck}: {answers}"
    found = crash_cases.generation_at(path)
    assert found in (old, "new"), where
    error = error_of_all(answers, fault, job.struck, where)
    assert found == "new" or error, where

    nursery.values(crash_cases.save, path, "next", **options)
    assert crash_cases.generation_at(path) == "next", where
    assert os.listdir(folder) == ["s"], where
    return fault.kind, error or "no error", found or "nothing"


@pytest.mark.share(1, of="crashes")
@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
def test_any_operation_of_a_save_with_a_base_may_be_the_last(nursery, tmp_path, kvstore, clients):
    options = {"kvstore": kvstore, "clients": clients}
    (tmp_path / "recorded").mkdir()
    base, path = str(tmp_path / "recorded" / "b"), str(tmp_path / "recorded" / "s")
    nursery.values(crash_cases.save, base, "old", **options)
    arguments = {"folder": str(tmp_path / "recorded"), "is_recorded": True, **options}
    job = nursery.start(crash_cases.save_on_base, path, base, "recorded", **arguments)
    assert not any(answer.error for answer in job.finish())
    assert any(each.call == "linkat" for each in job.operations)
    faults = list(faults_in(job.operations, KINDS))
    tried = share(faults, SAMPLE, f"base {kvstore} {clients}")
    outcomes = run_each_in_a_folder(
        tmp_path, tried, lambda folder, fault: struck_on_base(nursery, folder, fault, **options)
    )
    print(f"{kvstore}, {clients} clients, with a base: {len(tried)} of {len(faults)} faults")
    for outcome, count in sorted(Counter(outcomes).items()):
        print(f"{count:6}", *outcome, sep=", ")


def struck_on_base(nursery, folder, fault, **options):
    """Let a fault strike one save that has a base, and check the files of both; return the outcome."""
    base, path = str(folder / "b"), str(folder / "s")
    nursery.values(crash_cases.save, base, "old", **options)
    nursery.values(crash_cases.save_on_base, path, base, "first", **options)
    timeout_s = HEARTBEAT_TIMEOUT_S if fault.kind == "kill" else 30.0
    arguments = {"folder": str(folder), "fault": fault, "heartbeat_timeout_s": timeout_s, **options}
    job = nursery.start(crash_cases.save_on_base, path, base, "second", **arguments)
    answers = job.finish()
    where = f"{fault} of {options}, struck {job.struck}: {answers}"
    found = crash_cases.generation_on_base_at(path)
    assert found in ("first", "second"), where
    assert found == "second" or any(answer.error or answer.has_died for answer in answers), where
    assert crash_cases.generation_at(base) == "old", where
    nursery.values(crash_cases.save_on_base, path, base, "next", **options)
    assert crash_cases.generation_on_base_at(path) == "next", where
    assert sorted(os.listdir(folder)) == ["b", "s"], where
    crash_cases.remove(base)
    assert crash_cases.generation_on_base_at(path) == "next", where
    return fault.kind, found


def error_of_all(answers, fault, struck, where):
    """Return the error that all who live report, after a look at whether it is clear."""
    is_deadly = fault.kind == "kill" and struck is not None
    assert [answer.has_died for answer in answers] == [is_deadly and fault.client == at for at in range(len(answers))]
    living = [answer for answer in answers if not answer.has_died]
    assert len({(answer.error, answer.text) for answer in living}) <= 1, where
    error = living[0].error if living else "no client is left"
    if struck is None or fault.kind == "short":
        # Threads that come in another order may make a save some operations shorter than the recorded one.
        assert not error, where
    elif is_deadly:
        assert all(answer.error == ERRORS["kill"] for answer in living), where
        assert all(tuple(answer.facts["clients"]) == (fault.client,) for answer in living), where
    elif error:
        assert error == ERRORS[fault.kind], where
        assert len(answers) == 1 or f"client {fault.client}: " in living[0].text, where
    else:
        # Only what is not needed may fail unseen: taking old files away, making a folder that is there.
        assert struck.call == "mkdir" or ".dtckpt-trash-" in struck.paths[-1], where
    return error
