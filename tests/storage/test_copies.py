"""Copies between directories and object stores, in all directions; scrubs and signatures of roots on stores."""

import hashlib
import os

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

import dtckpt
from dtckpt import errors
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.commit_by_decision import ObjectStoreAttempt
from dtckpt.storage.location import location_of
from dtckpt.storage.whole_files import list_files

from .conftest import folder_at

PLACES = ("directory", "s3", "gs", "memory", "local")
PAIRS = [
    (source, target, kvstore)
    for source in PLACES
    for target in PLACES
    for kvstore in ("ocdbt", "zarr")
    if (source, target) != ("directory", "directory")
    and (kvstore == "zarr" or not {source, target} & {"memory", "local"})
]


def state(step):
    return {"w": torch.arange(100_000.0) + step, "b": torch.ones(3), "step": step}


def save_steps(root, steps, kvstore="ocdbt"):
    options = dtckpt.SaveOptions(kvstore=kvstore, chunk_nbytes=50_000)
    with dtckpt.CheckpointManager(root, is_async=False, options=options) as manager:
        for step in steps:
            manager.save(step, state(step), force=True)
    return str(root)


@pytest.fixture
def place(new_bucket, tmp_path, request):
    """Gives an empty place of a kind."""
    made = []

    def place(kind):
        made.append(kind)
        name = f"{kind}-{len(made)}"
        if kind in ("s3", "gs"):
            return f"{new_bucket(kind)}/some/run"
        if kind == "memory":
            return f"memory://{request.node.name}/{name}"
        return f"local://{tmp_path}/{name}" if kind == "local" else str(tmp_path / name)

    return place


def is_step(root, step):
    tree = dtckpt.restore(f"{root}/step_{step:08d}")
    return tree["step"] == step and tree["w"].equal(state(step)["w"])


@pytest.mark.share(4)
@pytest.mark.parametrize(("source", "target", "kvstore"), PAIRS)
def test_copies_in_all_directions(place, source, target, kvstore):
    root, copies = save_steps(place(source), [1, 2], kvstore), place(target)
    report = dtckpt.copy(root, copies)
    assert report.failed == ()
    assert is_step(copies, 1)
    assert is_step(copies, 2)
    with dtckpt.CheckpointManager(copies) as manager:
        assert manager.all_steps() == [1, 2]
    assert all(each.was_there for each in dtckpt.copy(root, copies).checkpoints)
    dtckpt.copy(f"{root}/step_00000002", f"{copies}/alone")
    assert dtckpt.open_checkpoint(f"{copies}/alone").verify().is_sound


class Cut(BaseException):
    """The end of a process, as far as its files go."""


@pytest.mark.parametrize("scheme", ["s3"])
def test_a_copy_that_was_cut_goes_on(place, scheme, monkeypatch):
    root, copies = save_steps(place("directory"), [1]), place(scheme)

    def end(*_, **__):
        raise Cut

    with monkeypatch.context() as patches:
        patches.setattr(ObjectStoreAttempt, "commit", end)
        with pytest.raises(Cut):
            dtckpt.copy(root, copies)
    url = f"{copies}/step_00000001"
    with pytest.raises(errors.CheckpointNotFoundError):
        dtckpt.open_checkpoint(url)
    folder = folder_at(url)
    data = sorted(name for name in list_files(folder) if "/d/" in name)
    folder.write(data[0], b"damaged" + folder.read(data[0])[7:])
    report = dtckpt.copy(root, copies)
    assert report.checkpoints[0].num_kept == report.checkpoints[0].num_files - 2
    assert is_step(copies, 1)
    attempts = {name.partition("/")[0] for name in list_files(folder)}
    assert len(attempts) == 1


def test_two_copies_at_once_to_a_store(place):
    root, copies = save_steps(place("directory"), [1]), place("s3")
    others = []

    def progress(*_):
        if not others:
            others.append(dtckpt.copy)
            others.append(dtckpt.copy(root, copies))

    dtckpt.copy(root, copies, progress=progress, threads=1)
    assert len(others) == 2
    assert is_step(copies, 1)


def test_s3_compares_a_digest_of_each_upload(place, store_of):
    """Each upload carries the SHA-256 digest of its bytes, by which S3 refuses other bytes."""
    root, copies = save_steps(place("directory"), [1]), place("s3")
    assert folder_at(copies).confirms_writes
    seen = []
    store = store_of("s3")
    forward = store.protocol.translate_request

    def note(target, headers, body):
        if body:
            seen.append((headers, body))
        return forward(target, headers, body)

    store.protocol.translate_request = note
    try:
        dtckpt.copy(root, copies)
    finally:
        del store.protocol.translate_request
    assert len(seen) > 5
    for headers, body in seen:
        lowered = {name.lower(): value for name, value in headers.items()}
        assert lowered["x-amz-content-sha256"] == hashlib.sha256(body).hexdigest()


@pytest.mark.parametrize("scheme", ["s3"])
def test_scrub_and_signatures_on_a_store(place, scheme):
    root, copies = save_steps(place(scheme), [1, 2], "zarr"), place("directory")
    dtckpt.copy(root, copies)
    assert dtckpt.scrub(root).is_sound
    where = commit_target_of(location_of(f"{root}/step_00000002")).locate()
    name = next(name for name in where.names() if "/c/" in name)
    data = where.read(name)
    for damage in (lambda: where.write(name, b"x" + data[1:]), lambda: where.remove([name])):
        damage()
        assert not dtckpt.scrub(root).is_sound
        assert dtckpt.scrub(root, source=copies).is_sound
        assert where.read(name) == data
    key = Ed25519PrivateKey.generate()
    dtckpt.sign(f"{root}/step_00000002", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    options = dtckpt.RestoreOptions(trusted_keys=[public])
    assert dtckpt.restore(f"{root}/step_00000002", options=options)["step"] == 2
    where.write(name, b"x" + data[1:])
    with pytest.raises(errors.CheckpointUntrustedError):
        dtckpt.restore(f"{root}/step_00000002", options=options)


def test_a_mirror_on_a_store(place):
    root, copies = place("directory"), place("s3")
    with dtckpt.CheckpointManager(root, mirror=copies, keep=1, is_async=False) as manager:
        for step in (1, 2):
            manager.save(step, state(step))
            manager.wait()
        assert manager.restore(1).is_mirrored
    assert os.listdir(root).count("step_00000001") == 0
