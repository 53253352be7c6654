"""The bytes of live versions: verified where they arrive, not sent if they are held, sent as changes where few differ.

The numbers are of situations in which other systems served wrong weights.
"""

import contextlib
import itertools
import random

import pytest
import torch
from support.states import tensor_of

from dtckpt import UNSHARDED, RestoreOptions
from dtckpt.checkpoint.live import announcer
from dtckpt.checkpoint.parts import open_part, part_files, peers, server
from dtckpt.checkpoint.parts.open_part import OpenPart
from dtckpt.errors import CheckpointCorruptError, StorageError
from dtckpt.format.digest import as_bytes

from .one_process import Jobs, blank, nbytes_of, on_mesh, use_http, wrong

ROWS, COLUMNS = ("x", UNSHARDED), (UNSHARDED, "x")


@pytest.fixture
def jobs(port, tmp_path):
    made = Jobs(port, tmp_path / "memory")
    yield made
    made.close()


@pytest.fixture(params=["mapped", "http"])
def transport(request, monkeypatch):
    if request.param == "http":
        use_http(monkeypatch)
    return request.param


def weights(seed, num=3, size=48, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return {f"w{number}": torch.randn(size, size, generator=generator).to(dtype) for number in range(num)}


def specs(whole, value):
    return dict.fromkeys(whole, value)


def test_announced_boxes_are_verified_where_they_arrive(jobs, transport):
    """The first version is verified by its source, since the boxes were not known; later versions end to end."""
    whole = weights(0)
    target = on_mesh(blank(whole), {"x": 3}, specs(whole, COLUMNS))
    with jobs.subscriber(target) as subscriber:
        for step in range(3):
            whole = weights(step)
            jobs.publish(on_mesh(whole, {"x": 2}, specs(whole, ROWS)), step)
            report = jobs.update(subscriber)
            assert not wrong(target, whole)
            verified = (report.nbytes_verified, report.nbytes_verified_at_source)
            assert verified == ((0, nbytes_of(target)) if step == 0 else (nbytes_of(target), 0))
            assert (report.nbytes_mapped > 0, bool(report.nbytes_by_host)) == (
                transport == "mapped",
                transport == "http",
            )


@pytest.mark.parametrize("fails", [False, True])
def test_how_often_boxes_are_announced(jobs, monkeypatch, fails):
    """Once, again when they are about to be forgotten, and not time and again to a client that does not take them."""
    monkeypatch.setattr(announcer, "RENEWED_PARTS", 4)
    announced = []

    def announce(self, save, client, boxes):
        announced.append(save.step)
        if fails:
            raise StorageError("gone")
        taken(self, save, client, boxes)

    taken = peers.Peer.announce
    monkeypatch.setattr(peers.Peer, "announce", announce)
    whole = weights(0)
    target = on_mesh(blank(whole), {"x": 3}, specs(whole, COLUMNS))
    with jobs.subscriber(target) as subscriber:
        for step in range(9):
            jobs.publish(on_mesh(weights(step), {"x": 2}, specs(whole, ROWS)), step)
            report = jobs.update(subscriber)
            assert (report.nbytes_verified_at_source == 0) == (step > 0 and not fails)
    assert announced == [0, 4, 8]


@pytest.mark.parametrize("in_place", [False, True])
def test_what_did_not_change_is_not_taken(jobs, transport, in_place):
    """As a frozen base with a small adapter: only the adapter travels, from the first version on that has digests."""
    base, target = weights(0), on_mesh(blank(weights(0)), {"x": 3}, specs(weights(0), COLUMNS))
    with jobs.subscriber(target) as subscriber:
        for step in range(4):
            whole = {**base, "w0": weights(step)["w0"]}
            jobs.publish(on_mesh(whole, {"x": 2}, specs(whole, ROWS)), step)
            report = jobs.update(subscriber, in_place=in_place)
            assert not wrong(target, whole)
            kept = 0 if step == 0 else nbytes_of(target) * 2 // 3
            # In place what was verified by its source only is digested, and taken again if there was no digest.
            assert report.nbytes_unchanged == kept
            assert report.nbytes_received == nbytes_of(target) - kept
            assert report.nbytes_verified + report.nbytes_verified_at_source + report.nbytes_unchanged == nbytes_of(
                target
            )


def test_the_same_version_again(jobs, transport):
    """Situation 22: after `invalidate` all bytes are read again, although the number is equal."""
    whole = weights(0)
    target = on_mesh(blank(whole), {"x": 2}, specs(whole, COLUMNS))
    jobs.publish(on_mesh(whole, {"x": 2}, specs(whole, ROWS)), 0)
    with jobs.subscriber(target) as subscriber:
        jobs.update(subscriber)
        first = subscriber.version
        for in_place in (False, True):
            for component in target["w1"].components:
                component.zero_()
            subscriber.invalidate()
            report = jobs.update(subscriber, in_place=in_place)
            assert report.version == first
            assert (report.nbytes_unchanged, report.nbytes_received) == (0, nbytes_of(target))
            assert not wrong(target, whole)


def test_a_target_that_was_changed_in_secret(jobs, transport):
    """Situation 22: no caller said so, but the digest of the memory itself tells, where it is not private."""
    target = on_mesh(blank(weights(0)), {"x": 2}, specs(weights(0), ROWS))
    with jobs.subscriber(target) as subscriber:
        for step in range(3):
            jobs.publish(on_mesh(weights(0), {"x": 2}, specs(weights(0), ROWS)), step)
            report = jobs.update(subscriber, in_place=True)
            assert not wrong(target, weights(0))
            lost = nbytes_of({"w1": target["w1"]}) // 2
            assert report.nbytes_received == (nbytes_of(target) if step == 0 else lost)
            target["w1"].components[1].view(torch.uint8)[3, 5] ^= 1


def test_what_its_source_verified_is_verified_when_there_is_a_digest(jobs, transport):
    """The first version had no digests of these boxes; its bytes are digested once before they count as unchanged."""
    whole = weights(0)
    target = on_mesh(blank(whole), {"x": 3}, specs(whole, COLUMNS))
    with jobs.subscriber(target) as subscriber:
        for step in range(2):
            jobs.publish(on_mesh(whole, {"x": 2}, specs(whole, ROWS)), step)
            report = jobs.update(subscriber)
            assert not wrong(target, whole)
            memory = next(iter(subscriber._aside._memory.values()))
            memory.view(torch.uint8)[30, 3] ^= 1
        assert 0 < report.nbytes_verified < nbytes_of(target) / 8
        assert report.nbytes_unchanged == nbytes_of(target) - report.nbytes_verified


def sparsely_changed(whole, step, share=0.01):
    """Return tensors of which a share of the elements differs."""
    generator = torch.Generator().manual_seed(1000 + step)
    changed = {}
    for name, tensor in whole.items():
        mask = torch.rand(tensor.shape, generator=generator) < share
        changed[name] = torch.where(mask, torch.randn(tensor.shape, generator=generator).to(tensor.dtype), tensor)
    return changed


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("layout", [ROWS, COLUMNS], ids=str)
def test_few_changed_elements_travel_as_changes(jobs, monkeypatch, layout, in_place):
    use_http(monkeypatch)
    whole = weights(0, size=256)
    target = on_mesh(blank(whole), {"x": 2}, specs(whole, layout))
    with jobs.subscriber(target) as subscriber:
        for step in range(5):
            jobs.publish(on_mesh(whole, {"x": 2}, specs(whole, ROWS)), step)
            report = jobs.update(subscriber, in_place=in_place)
            assert not wrong(target, whole)
            # The box is named by its digest in the base, which a version has once the box was announced.
            if step > (0 if layout == ROWS else 1):
                assert 0 < report.nbytes_received <= 0.05 * nbytes_of(target)
                assert report.nbytes_verified == nbytes_of(target)
            else:
                assert report.nbytes_received == nbytes_of(target)
            whole = sparsely_changed(whole, step)


def test_changes_from_a_version_of_which_nothing_was_sent(jobs, monkeypatch):
    """The reader held all of it already; that it has it is told by digests all the same."""
    use_http(monkeypatch)
    whole = weights(0, size=256)
    target = on_mesh(blank(whole), {"x": 2}, specs(whole, ROWS))
    with jobs.subscriber(target) as subscriber:
        for step in range(4):
            jobs.publish(on_mesh(whole, {"x": 2}, specs(whole, ROWS)), step)
            jobs.update(subscriber)
        whole = sparsely_changed(whole, 0)
        jobs.publish(on_mesh(whole, {"x": 2}, specs(whole, ROWS)), 4)
        assert 0 < jobs.update(subscriber).nbytes_received <= 0.05 * nbytes_of(target)
        assert not wrong(target, whole)


def test_a_reader_of_another_base_takes_boxes_whole(jobs, monkeypatch):
    """The publisher makes changes from no version but the reader's own, and only while it has that one."""
    use_http(monkeypatch)
    whole = weights(0, size=256)
    target = on_mesh(blank(whole), {"x": 2}, specs(whole, ROWS))
    with jobs.subscriber(target) as subscriber:
        jobs.publish(on_mesh(whole, {"x": 2}, specs(whole, ROWS)), 0)
        jobs.update(subscriber)
        for step in range(1, 5):
            whole = sparsely_changed(whole, step)
            jobs.publish(on_mesh(whole, {"x": 2}, specs(whole, ROWS)), step)
        report = jobs.update(subscriber)
        assert report.nbytes_received == nbytes_of(target)
        assert not wrong(target, whole)


@pytest.mark.parametrize("place", ["memory", "changes", "malformed"])
def test_changes_that_do_not_fit(jobs, monkeypatch, place):
    """Situations 20 and 38: what counts is the digest of the result; then the whole box travels."""
    use_http(monkeypatch)
    whole = weights(0, size=256)
    target = on_mesh(blank(whole), {"x": 2}, specs(whole, ROWS))
    with jobs.subscriber(target) as subscriber:
        jobs.publish(on_mesh(whole, {"x": 2}, specs(whole, ROWS)), 0)
        jobs.update(subscriber)
        whole = sparsely_changed(whole, 1)
        jobs.publish(on_mesh(whole, {"x": 2}, specs(whole, ROWS)), 1)
        if place == "memory":
            for memory in subscriber._aside._memory.values():
                memory.view(torch.uint8)[7, 7] ^= 4
        else:
            made = bytes(9) if place == "malformed" else bytes([1]) + bytes(8)
            monkeypatch.setattr(server, "changes_between", lambda *_: made)
        report = jobs.update(subscriber)
        assert not wrong(target, whole)
        assert report.nbytes_verified == nbytes_of(target)
        assert report.nbytes_received >= nbytes_of(target)
        assert not report.passed_over


@pytest.mark.parametrize("announced", [False, True])
def test_memory_that_changed_at_the_publisher(jobs, transport, announced):
    """Situations 17, 38 and 39: a byte that differs from the digest is refused, and the target stays as it was."""
    whole = weights(0)
    target = on_mesh(blank(whole), {"x": 3}, specs(whole, COLUMNS))
    with jobs.subscriber(target) as subscriber:
        jobs.publish(on_mesh(whole, {"x": 2}, specs(whole, ROWS)), 0)
        if announced:
            jobs.update(subscriber)
            jobs.publish(on_mesh(weights(1), {"x": 2}, specs(whole, ROWS)), 1)
        else:
            whole = blank(whole)
        for file in jobs.publisher._folder._filled.values():
            file.view[123] ^= 1
        with pytest.raises(CheckpointCorruptError, match=r"no host holds the part of client 0 .* undamaged"):
            jobs.update(subscriber)
        assert not wrong(target, whole)
        assert (subscriber.version is not None, subscriber.is_mixed) == (announced, False)


def test_nothing_moved(jobs, monkeypatch):
    """Situation 20: a copy that does nothing, and says nothing."""
    whole = weights(0)
    target = on_mesh(blank(whole), {"x": 2}, specs(whole, ROWS))
    jobs.publish(on_mesh(whole, {"x": 2}, specs(whole, ROWS)), 0)
    monkeypatch.setattr(open_part, "convert", lambda *_: None)
    monkeypatch.setattr(peers._Answer, "fill", lambda *_: None)
    with jobs.subscriber(target) as subscriber, pytest.raises(CheckpointCorruptError, match="undamaged"):
        jobs.update(subscriber)
    assert not wrong(target, blank(whole))


@pytest.mark.parametrize("in_place", [False, True])
def test_casts(jobs, transport, in_place):
    """Of converted elements there is no digest: they count as unchanged in private memory only."""
    whole = weights(0)
    target = on_mesh(blank(whole, {"w0": torch.float32, "w1": torch.float16}), {"x": 2}, specs(whole, COLUMNS))
    with jobs.subscriber(target, options=RestoreOptions(cast="any")) as subscriber:
        for step in range(4):
            whole = sparsely_changed(whole, step) if step == 3 else whole
            jobs.publish(on_mesh(whole, {"x": 2}, specs(whole, ROWS)), step)
            report = jobs.update(subscriber, in_place=in_place)
            assert not wrong(target, whole)
            if step in (1, 2):
                assert report.nbytes_unchanged == sum(t.nbytes for t in whole.values()) // (3 if in_place else 1)


def test_a_failure_amid_a_read(jobs, monkeypatch, transport):
    """Overwritten boxes do not count as unchanged; verified boxes need not be taken again."""
    first, second = weights(0), weights(1)
    target = on_mesh(blank(first), {"x": 2}, specs(first, ROWS))
    with jobs.subscriber(target) as subscriber:
        jobs.publish(on_mesh(first, {"x": 2}, specs(first, ROWS)), 0)
        jobs.update(subscriber)
        jobs.publish(on_mesh(second, {"x": 2}, specs(first, ROWS)), 1)
        with monkeypatch.context() as patch:
            patch.setattr(part_files, "REQUEST_NBYTES", 1)
            fail_at(patch, 4)
            with pytest.raises(CheckpointCorruptError, match="cut"):
                jobs.update(subscriber)
        assert not wrong(target, first)
        # The trainer goes back: memory that has parts of both must not be taken for the first one.
        jobs.publish(on_mesh(first, {"x": 2}, specs(first, ROWS)), 2)
        jobs.update(subscriber)
        assert not wrong(target, first)


def test_memory_that_was_read_as_other_boxes_meanwhile(jobs, transport):
    """The known digest of a box ends when its memory is written as boxes of another mesh."""
    target = blank(weights(0))
    with jobs.subscriber(target) as subscriber:
        for step, (seed, devices) in enumerate([(0, 1), (1, 2), (0, 1)]):
            jobs.publish(on_mesh(weights(seed), {"x": devices}, specs(target, ROWS)), step)
            report = jobs.update(subscriber)
            assert not wrong(target, weights(seed))
            assert report.nbytes_received == nbytes_of(target)


def fail_at(patch, count):
    """Let the read of a box fail, both ways, after some that succeed; the box itself is written in part."""
    left = itertools.count(count, -1)

    def failing(work, memory_of):
        def run(*args):
            if next(left) <= 0:
                memory_of(args)[:3] = b"\x01\x02\x03"
                raise CheckpointCorruptError("cut")
            return work(*args)

        return run

    patch.setattr(OpenPart, "copy", failing(OpenPart.copy, lambda args: as_bytes(args[4]).data))
    patch.setattr(peers.Peer, "read", failing(peers.Peer.read, lambda args: as_bytes(args[3][0].target).data))


LAYOUTS = [None, ROWS, COLUMNS]


@pytest.mark.parametrize("seed", range(8))
def test_any_history_gives_what_a_full_read_gives(jobs, monkeypatch, transport, seed):
    """Random trees, layouts, casts, changes, failures, ways to publish and read: values and sums of bytes fit."""
    draw = random.Random(f"{seed} {transport}")
    dtypes = [torch.bfloat16, torch.float32, torch.int8, torch.float64, torch.complex64, torch.complex128]
    whole = {}
    for number in range(draw.randint(1, 5)):
        shape = (draw.randint(1, 40), draw.randint(1, 40))
        whole[f"w{number}"] = tensor_of(f"{seed}{number}", shape, str(draw.choice(dtypes)).removeprefix("torch."))
    whole["norm"], whole["scale"] = torch.randn(5), torch.tensor(3.0)

    def laid_out(tensors):
        size, chosen = draw.randint(1, 4), {}
        for name, tensor in tensors.items():
            fits = tensor.ndim == 2 and min(tensor.shape) >= size
            chosen[name] = draw.choice(LAYOUTS) if fits else None
        return on_mesh(tensors, {"x": size}, chosen)

    casts = {n: torch.float32 for n, t in whole.items() if t.dtype == torch.bfloat16 and draw.random() < 0.5}
    readers = []
    for _ in range(2):
        target = laid_out(blank(whole, casts))
        readers.append((target, jobs.subscriber(target, options=RestoreOptions(cast="any"))))
    versions, fixed = [whole], laid_out
    for step in range(8):
        kind = draw.choice(["same", "sparse", "all", "back", "some"])
        latest = versions[-1]
        if kind == "sparse":
            latest = {n: flipped(draw, t, max(1, t.numel() // 100)) for n, t in latest.items()}
        elif kind == "all":
            latest = {n: flipped(draw, t, t.numel()) for n, t in latest.items()}
        elif kind == "back":
            latest = draw.choice(versions)
        elif kind == "some":
            latest = {n: flipped(draw, t, 3) if draw.random() < 0.3 else t for n, t in latest.items()}
        versions.append(latest)
        tree = laid_out(latest) if draw.random() < 0.3 else on_mesh_of(fixed, draw, latest, step)
        lends = draw.random() < 0.3
        if not lends:
            jobs.publish(tree, step)
        with jobs.lend(tree, step) if lends else contextlib.nullcontext():
            for target, subscriber in readers:
                choice = draw.random()
                if choice < 0.25:
                    continue
                if choice < 0.35:
                    subscriber.invalidate()
                if choice > 0.8:
                    with monkeypatch.context() as patch:
                        patch.setattr(part_files, "REQUEST_NBYTES", 64)
                        fail_at(patch, draw.randint(0, 6))
                        with contextlib.suppress(CheckpointCorruptError):
                            jobs.update(subscriber, in_place=draw.random() < 0.5)
                if subscriber.version is not None and subscriber.version.step == step:
                    continue
                report = jobs.update(subscriber, in_place=draw.random() < 0.5)
                assert not wrong(target, latest)
                stored = nbytes_of({n: t for n, t in target.items() if n not in casts})
                stored += nbytes_of({n: t for n, t in target.items() if n in casts}) // 2
                parts = report.nbytes_verified, report.nbytes_verified_at_source, report.nbytes_unchanged
                assert sum(parts) == stored


def on_mesh_of(laid_out, draw, tensors, seed):
    """Return tensors in the layout of one mesh for all versions, so that there are changes between these."""
    state = draw.getstate()
    draw.seed("the trainer's mesh")
    tree = laid_out(tensors)
    draw.setstate(state)
    return tree


def flipped(draw, tensor, count):
    """Return a tensor of which some elements have other bits."""
    data = tensor.clone().reshape(-1).view(torch.uint8) if tensor.ndim else tensor.clone().reshape(1).view(torch.uint8)
    for _ in range(min(count, 200)):
        data[draw.randrange(data.numel())] ^= draw.randrange(1, 256)
    return data.view(tensor.dtype).reshape(tensor.shape)
