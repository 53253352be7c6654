"""Saves that go on in the background: what they save, how they fail, and what they leave."""

import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from support.states import MESH_MAKERS, bits_of, needs_gpu, tensor_of

import dtckpt
from checkpoint import client_cases
from dtckpt import SaveOptions, abstract_mesh, errors
from dtckpt.checkpoint.saving import staging
from dtckpt.checkpoint.saving.plan import plan_save
from dtckpt.checkpoint.saving.state import state_of_tree
from dtckpt.comm.torch_device import device_of
from dtckpt.storage.zarr_tensorstore import TensorStoreWriter

from . import save_async_cases

WAIT_S = 30


def tree_of(generation, mesh=None):
    mesh = mesh or abstract_mesh({"x": 2, "y": 2})
    device = device_of(mesh.local_devices()[0])
    tensors = {
        "sharded": ((10, 6), "float32", ["x", "y"]),
        "nested": ((50257,), "float32", [("x", "y")]),
        "replicated": ((7, 3), "bfloat16", ["unsharded", "x"]),
        "plain": ((5,), "int64", None),
        "scalar": ((), "float64", None),
        "empty": ((0, 4), "float32", None),
        "flags": ((9,), "bool", None),
        "complex": ((4,), "complex64", None),
    }
    tree = client_cases.tree_on(mesh, tensors, generation)
    plain = {name: tree[name].to(device) for name, (*_, specs) in tensors.items() if specs is None}
    return tree | plain | {"step": generation}, tensors


def check(path, generation):
    restored = dtckpt.restore(path)
    assert restored["step"] == generation
    for name, (shape, dtype, _) in tree_of(generation)[1].items():
        assert bits_of(restored[name]) == bits_of(tensor_of(name + generation, shape, dtype)), name


@pytest.mark.parametrize("make_mesh", MESH_MAKERS)
@pytest.mark.parametrize("options", [{}, {"check_replicas": False}, {"kvstore": "zarr"}, {"chunk_nbytes": 64}])
def test_what_changes_afterwards_is_not_saved(tmp_path, options, make_mesh):
    for generation in ("a", "b"):
        tree, _ = tree_of(generation, make_mesh({"x": 2, "y": 2}))
        handle = dtckpt.save_async(tmp_path / generation, tree, options=SaveOptions(**options))
        save_async_cases.spoil(tree)
        assert handle.result(WAIT_S).path == tmp_path / generation
        check(tmp_path / generation, generation)


@pytest.mark.parametrize("save", [dtckpt.save, lambda *args: dtckpt.save_async(*args).result(WAIT_S)])
def test_a_process_that_works_in_another_directory_afterwards(tmp_path, monkeypatch, save):
    class Wanderer:
        def state_dict(self):
            monkeypatch.chdir(tmp_path / "other")
            return {}

        def load_state_dict(self, state): ...

    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    tree = tree_of("a")[0]
    assert save("runs/s", {"tree": tree, "wanderer": Wanderer()}).path == tmp_path / "runs/s"
    assert dtckpt.restore(tmp_path / "runs/s")["tree"]["step"] == "a"
    assert list((tmp_path / "other").iterdir()) == []


def test_freed_tensors_are_freed_and_saved(tmp_path):
    with save_async_cases.Gate() as gate:
        tree = {"w": torch.full((1000,), 3.0)}
        alive = weakref.ref(tree["w"])
        handle = dtckpt.save_async(tmp_path / "s", tree)
        assert gate.reached.wait(WAIT_S)
        del tree
        assert alive() is None
    handle.result(WAIT_S)
    assert dtckpt.restore(tmp_path / "s")["w"].tolist() == [3.0] * 1000


def test_views_of_any_kind(tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    tree = {
        "transposed": base.t(),
        "every second": base[::2, 1::3],
        "expanded": base[:1].expand(3, 6),
        "conjugated": torch.complex(base, -base).conj(),
        "negated": torch.complex(base, base).conj().imag,
        "leaf": torch.nn.Parameter(base),
    }
    expected = {name: bits_of(tensor.detach().resolve_conj().resolve_neg()) for name, tensor in tree.items()}
    dtckpt.save_async(tmp_path / "s", tree).result(WAIT_S)
    assert {name: bits_of(tensor) for name, tensor in dtckpt.restore(tmp_path / "s").items()} == expected


def large_tensors():
    """Return tensors of more bytes than a thread copies at a time, of which some have elements with gaps."""
    base = torch.arange(5_000_001, dtype=torch.float32)
    return {
        "plain": base,
        "bfloat16": base.bfloat16(),
        "bool": base % 3 == 0,
        "transposed": base[:-1].view(1000, 5000).t(),
        "negated": torch.complex(base, base).conj().imag,
        "small": base[:7],
    }


@pytest.mark.parametrize("num_threads", [1, 3])
def test_large_tensors_are_copied_whole_in_any_number_of_threads(num_threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    tree = large_tensors()
    targets = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tree.values()]
    staging._copy(targets, list(tree.values()))
    assert all(torch.equal(target, tensor) for target, tensor in zip(targets, tree.values(), strict=True))


def test_pytorch_copies_no_large_tensor_in_threads_of_its_own(monkeypatch):
    """Its threads wait for each other in loops after every tensor."""
    by_pytorch = []
    monkeypatch.setattr(staging.torch_private, "foreach_copy", lambda _, sources: by_pytorch.extend(sources))
    tree = large_tensors()
    staging._copy([torch.empty_like(tensor) for tensor in tree.values()], list(tree.values()))
    assert {tuple(tensor.shape) for tensor in by_pytorch} == {(5000, 1000), (5_000_001,), (7,)}
    assert len(by_pytorch) == 3


def test_memory_is_kept_between_saves_of_one_structure(tmp_path):
    memory = staging.StagingMemory()
    plan = plan_save
    blocks, staged = [], []
    for size in (1000, 1000, 1500, 100):
        state = state_of_tree({"w": torch.ones(size)}, SaveOptions(), 0, [0])
        memory.stage(state, plan(state.specs, 1 << 20), 0, with_copies=False, count=staged.append)
        blocks.append((memory._block.data_ptr(), memory._block.numel()))
    assert staged == [4000, 4000, 6000, 400]
    assert blocks[0] == blocks[1]
    assert [nbytes for _, nbytes in blocks] == [4032, 4032, 6016, 448]


def test_tied_tensors_are_copied_once():
    """Tied: the same elements of the same memory. Other views of that memory are copied for themselves."""
    weight = torch.arange(64.0)
    tree = {
        "first": weight,
        "tied": weight.detach(),
        "square": weight.view(8, 8),
        "transposed": weight.view(8, 8).t(),
        "half": weight[:32],
        "bits": weight.view(torch.int32),
        "equal": weight.clone(),
        "nothing": weight[:0],
        "also nothing": weight[:0],
    }
    state = state_of_tree(tree, SaveOptions(), 0, [0])
    plan = plan_save(state.specs, 1 << 20)
    counted = []
    staged = staging.StagingMemory().stage(state, plan, 0, with_copies=False, count=counted.append)
    assert counted == [6 * 256 - 128]
    assert staging.tied_nbytes(state, plan, 0) == 256
    copies = {name: staged.source.parts(name)[0][1][0] for name in tree if tree[name].numel()}
    assert all(copy.equal(tree[name]) and copy.dtype == tree[name].dtype for name, copy in copies.items())
    assert len({copy.data_ptr() for copy in copies.values()}) == 6
    assert copies["first"].data_ptr() == copies["tied"].data_ptr()


def test_a_tied_tensor_that_is_converted_is_copied_for_itself():
    weight = torch.arange(64.0)
    state = state_of_tree({"a": weight, "b": weight}, SaveOptions(), 0, [0])
    plan, dtypes = plan_save(state.specs, 1 << 20), {"b": torch.bfloat16}
    memory = staging.StagingMemory()
    staged = memory.stage(state, plan, 0, with_copies=False, count=lambda _: None, dtypes=dtypes)
    assert [staged.source.parts(name)[0][1][0].dtype for name in "ab"] == [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("gpu", [pytest.param("cuda", marks=needs_gpu)])
def test_memory_for_what_lies_on_a_gpu_is_page_locked_and_kept(gpu):
    memory = staging.StagingMemory()
    blocks = []
    for generation in range(3):
        values = torch.arange(1 << 20, device=gpu) * generation
        state = state_of_tree({"w": values}, SaveOptions(), 0, [0])
        plan = plan_save(state.specs, 1 << 20)
        staged = memory.stage(state, plan, 0, with_copies=False, count=lambda _: None)
        ((_, (copy,)),) = staged.source.parts("w")
        assert torch.equal(copy, (torch.arange(1 << 20) * generation))
        assert copy.is_pinned()
        blocks.append(memory._block.data_ptr())
    assert len(set(blocks)) == 1


@pytest.mark.parametrize("check_replicas", [False, True])
def test_only_what_a_client_writes_is_staged(pool, tmp_path, check_replicas):
    tensors = {"c": ((1 << 16, 8), "float32", ["unsharded", "unsharded"]), "p": ((1 << 18,), "float32", None)}
    found = pool.values(
        save_async_cases.save_and_spoil,
        f"{tmp_path}/s",
        {"x": 2},
        tensors,
        1,
        chunk_nbytes=1 << 16,
        check_replicas=check_replicas,
        clients=2,
    )
    assert [each["stats"].phases["stage"].nbytes for each in found] == [3 << 19, 3 << 19]


def test_progress_and_stats(tmp_path):
    with save_async_cases.Gate(open_for=1) as gate:
        handle = dtckpt.save_async(tmp_path / "s", {"w": torch.ones(1000), "v": torch.ones(10)})
        assert gate.reached.wait(WAIT_S)
        assert (handle.done(), handle.progress.phase, handle.progress.nbytes_total) == (False, "written", 4040)
        assert 0 < handle.progress.nbytes_done < 4040
        with pytest.raises(errors.SaveTimeoutError, match=r"did not end in 0\.01 s and goes on") as caught:
            handle.result(0.01)
        assert isinstance(caught.value, TimeoutError)
        assert "written" in repr(handle)
    report = handle.result(WAIT_S)
    assert (handle.done(), handle.progress.phase, handle.progress.nbytes_done) == (True, "done", 4040)
    phases = handle.stats.phases
    assert list(phases) == ["plan", "stage", "write", "merge"]
    assert 0 < phases["plan"].seconds + phases["stage"].seconds <= handle.stats.blocking_s
    assert report.nbytes == phases["stage"].nbytes == phases["write"].nbytes == 4040
    assert report.phases == phases


@pytest.mark.parametrize("second", ["save", "save_async"])
def test_one_save_is_in_flight_at_a_time(tmp_path, second):
    with save_async_cases.Gate() as gate:
        first = dtckpt.save_async(tmp_path / "a", {"w": torch.zeros(3)})
        assert gate.reached.wait(WAIT_S)
        with pytest.raises(errors.CoordinationError, match=r"did not end in 0\.01 s"):
            getattr(dtckpt, second)(tmp_path / "b", {"w": torch.ones(3)}, options=SaveOptions(timeout_s=0.01))
        opener = threading.Timer(0.05, gate.opened.set)
        opener.start()
        latest = getattr(dtckpt, second)(tmp_path / "b", {"w": torch.ones(3)})
        assert first.done()
    if second == "save_async":
        latest.result(WAIT_S)
    assert [dtckpt.restore(tmp_path / name)["w"][0] for name in "ab"] == [0, 1]


BAD = {
    "TreeError": {"v": object()},
    "TensorNameError": {"a\0v": torch.ones(2)},
    "DTypeError": {"v": torch.ones(2).to_sparse()},
    "CheckpointExistsError": {"w": torch.ones(2)},
}


@pytest.mark.parametrize("error", BAD)
def test_what_cannot_be_saved_is_refused_at_the_call(tmp_path, error):
    dtckpt.save(tmp_path / "s", {"w": torch.ones(2)})
    with pytest.raises(getattr(errors, error)):
        dtckpt.save_async(tmp_path / "s", BAD[error], options=SaveOptions(overwrite=error != "CheckpointExistsError"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["s"]
    dtckpt.save_async(tmp_path / "t", {"w": torch.ones(2)}).result(WAIT_S)


def test_a_failure_is_raised_once_by_whoever_asks_next(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("no ink")

    with monkeypatch.context() as patch:
        patch.setattr(TensorStoreWriter, "commit", fail)
        handle = dtckpt.save_async(tmp_path / "s", {"w": torch.ones(2)})
        handle.wait(WAIT_S)
    assert handle.done()
    assert handle.progress.phase == "failed"
    with pytest.raises(ZeroDivisionError, match="no ink") as caught:
        dtckpt.save(tmp_path / "t", {"w": torch.ones(2)})
    assert str(tmp_path / "s") in caught.value.__notes__[0]
    with pytest.raises(ZeroDivisionError):
        handle.result()
    assert list(tmp_path.iterdir()) == []
    dtckpt.save(tmp_path / "t", {"w": torch.ones(2)})


def test_a_failure_that_was_looked_at_is_not_raised_again(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(TensorStoreWriter, "commit", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dtckpt.save_async(tmp_path / "s", {"w": torch.ones(2)}).result(WAIT_S)
    dtckpt.save_async(tmp_path / "s", {"w": torch.ones(2)}).result(WAIT_S)


# --- several clients ---


def test_clients_save_what_they_held_at_the_call(pool, tmp_path, meeting):
    path, axes = f"{tmp_path}/s", {"x": 2, "y": 2}
    bounded = {"staging_nbytes": 8192, "chunk_nbytes": 4096}
    for options in ({}, {"check_replicas": False, "chunk_nbytes": 4096}, bounded):
        found = pool.values(
            save_async_cases.save_and_spoil, path, axes, save_async_cases.STATE, 2, clients=2, **options, **meeting
        )
        assert all(each["progress"].phase == "done" for each in found)
        assert all("edges" in each["stats"].phases for each in found)
        assert (
            client_cases.restore(
                path,
                {"z": 1},
                {
                    name: (shape, dtype, specs and ["unsharded"] * len(shape))
                    for name, (shape, dtype, specs) in save_async_cases.STATE.items()
                },
                generation="second",
            )
            == []
        )


@pytest.mark.parametrize("kind", ["names", "path", "shape", "unsavable", "error of the state", "values"])
def test_clients_that_disagree_all_raise_at_the_call(pool, tmp_path, kind):
    answers = pool.run(save_async_cases.save_differently_in_background, f"{tmp_path}/s", 3, kind, clients=3)
    assert len({(answer.error, answer.text) for answer in answers}) == 1, answers
    assert answers[0].error
    assert max(answer.seconds for answer in answers) < 5
    assert list(tmp_path.iterdir()) == []


def test_a_failure_in_the_background_reaches_all_clients_once(pool, tmp_path, meeting):
    found = pool.values(save_async_cases.fail_in_background, f"{tmp_path}", 1, clients=3, **meeting)
    for at_result_or_save, at_the_other, afterwards, phase in found:
        for text in (at_result_or_save, at_the_other):
            # The client that tells the error first is named before it.
            assert re.fullmatch(r"ClientFailedError: (client [12]: )?client 1: ZeroDivisionError: no ink", text), text
        assert (afterwards, phase) == ("ok", "failed")
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_a_client_without_memory_for_the_copy(pool, tmp_path):
    answers = pool.run(save_async_cases.fail_to_stage, f"{tmp_path}/s", 1, clients=3)
    assert {answer.error for answer in answers} == {"ClientFailedError"}, answers
    assert all("no room" in answer.text for answer in answers)
    assert max(answer.seconds for answer in answers) < 5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.share(2)
@pytest.mark.parametrize(("victim", "where"), [(0, "writing"), (0, "committing"), (1, "writing")])
def test_a_client_that_is_killed_in_the_background(pool, tmp_path, meeting, victim, where):
    path, axes = f"{tmp_path}/s", {"x": 2}
    pool.values(client_cases.save, path, axes, save_async_cases.SMALL, generation="old", clients=2, **meeting)
    answers = pool.run(
        save_async_cases.die_in_background, path, victim, where, clients=2, heartbeat_timeout_s=2.0, **meeting
    )
    survivor = answers[1 - victim]
    assert answers[victim].has_died
    assert (survivor.error, tuple(survivor.facts["clients"])) == ("ClientLostError", (victim,)), survivor
    assert (
        client_cases.restore(
            path, {"z": 1}, save_async_cases.SMALL | {"w": ((64, 8), "float32", None)}, generation="old"
        )
        == []
    )


# --- the end of a process ---


def run(call):
    script = f"from checkpoint.saving import save_async_cases; save_async_cases.{call}"
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.mark.share(3, of="processes that start PyTorch")
@pytest.mark.parametrize(("how", "code"), [("return", 0), ("SystemExit", 3), ("error", 1)])
def test_a_process_that_exits_commits_its_save(tmp_path, how, code):
    ended = run(f"exit_amid_a_save({str(tmp_path / 's')!r}, {how!r})")
    assert ended.returncode == code, ended.stderr
    restored = dtckpt.restore(tmp_path / "s")
    assert (restored["step"], restored["w"].sum()) == (3, 1 << 22)


@pytest.mark.share(3, of="processes that start PyTorch")
def test_a_failure_that_nobody_looked_at_is_logged_at_exit(tmp_path):
    ended = run(f"exit_after_a_failure({str(tmp_path / 's')!r})")
    assert "its result was never read: no ink" in ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.share(3, of="processes that start PyTorch")
def test_a_forked_process_leaves_the_save_to_its_parent(tmp_path):
    ended = run(f"fork_amid_a_save({str(tmp_path / 's')!r})")
    assert ended.returncode == 0, ended.stderr
    assert dtckpt.restore(tmp_path / "s")["w"].tolist() == [1, 1, 1]
