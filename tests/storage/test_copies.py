"""Copies between directories and object stores, in all directions; scrubs and signatures of roots on stores."""

import hashlib
import os

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

import dtckpt
from dtckpt import errors
from dtckpt.cli.main import main
from dtckpt.storage import s3_gcs_folder
from dtckpt.storage.commit import commit_target_of
from dtckpt.storage.commit_by_decision import ObjectStoreAttempt
from dtckpt.storage.failures import MalformedError
from dtckpt.storage.folder import ObjectFolder
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


# --- copies by the store itself ---


@pytest.fixture
def uploads(store_of, monkeypatch):
    """The uploads to S3: name, bytes of the body, and the source of a copy."""
    seen = []
    store = store_of("s3")
    forward = store.protocol.translate_request

    def note(target, headers, body):
        lowered = {name.lower(): value for name, value in headers.items()}
        seen.append((target, len(body), lowered.get("x-amz-copy-source", "")))
        return forward(target, headers, body)

    monkeypatch.setattr(store.protocol, "translate_request", note, raising=False)
    return seen


def bodies(uploads):
    return sum(nbytes for _, nbytes, _ in uploads)


def lora(step):
    frozen = {f"layer{number} %": torch.arange(50_000.0) + number for number in range(4)}
    return {"model": frozen, "adapter": torch.ones(1000) * step, "step": step}


def is_lora(path, step):
    tree = dtckpt.restore(path)
    is_same = all(tree["model"][name].equal(tensor) for name, tensor in lora(step)["model"].items())
    assert dtckpt.open_checkpoint(path).verify().is_sound
    return is_same and tree["step"] == step and tree["adapter"].equal(lora(step)["adapter"])


@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
def test_a_save_with_a_base_uploads_only_what_changed(place, uploads, kvstore):
    root, options = place("s3"), dtckpt.SaveOptions(kvstore=kvstore, chunk_nbytes=100_000)
    dtckpt.save(f"{root}/1", lora(1), options=options)
    assert bodies(uploads) > 800_000
    for step in (2, 3):
        uploads.clear()
        report = dtckpt.save(f"{root}/{step}", lora(step), options=options, base=f"{root}/{step - 1}")
        assert report.nbytes_reused == 800_000
        assert bodies(uploads) < 40_000
        assert any(source for _, _, source in uploads)
        assert is_lora(f"{root}/{step}", step)
    names = folder_at(f"{root}/3").names()
    assert not [name for name in names if "/__base/" in name], names
    folder_at(f"{root}/1").clear()
    folder_at(f"{root}/2").clear()
    assert is_lora(f"{root}/3", 3)


def test_a_run_on_a_store_uploads_only_what_changed(place, uploads):
    root, options = place("s3"), dtckpt.SaveOptions(chunk_nbytes=100_000)
    with dtckpt.CheckpointManager(root, options=options, reuse=True, keep=1) as manager:
        for step in range(3):
            uploads.clear()
            manager.save(step, lora(step)).result()
            assert (bodies(uploads) < 60_000) == (step > 0)
        manager.wait()
        assert manager.all_steps() == [2]
        assert is_lora(manager.path(2), 2)


def refuse(store, monkeypatch, status, body):
    """Have a store answer requests for copies so."""
    real = store.RequestHandlerClass.handle_any

    def handle(self):
        if self.command == "PUT" and self.headers.get("x-amz-copy-source"):
            return self.answer(status, body, {})
        return real(self)

    monkeypatch.setattr(store.RequestHandlerClass, "do_PUT", handle)


REFUSALS = {
    "denied": (403, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"),
    "not implemented": (501, b"<Error><Code>NotImplemented</Code><Message>no</Message></Error>"),
    "an error behind status 200": (200, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"),
    "taken for an upload": (200, b""),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_a_store_that_does_not_copy_costs_no_save_and_no_copy(place, store_of, monkeypatch, caplog, why):
    root, copies = place("s3"), place("s3")
    refuse(store_of("s3"), monkeypatch, *REFUSALS[why])
    dtckpt.save(f"{root}/1", lora(1))
    report = dtckpt.save(f"{root}/2", lora(2), base=f"{root}/1")
    assert report.nbytes_reused == 0
    assert is_lora(f"{root}/2", 2)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "nothing is reused of" in told
    assert "the store did not copy" in told
    assert not [name for name in folder_at(f"{root}/2").names() if "/__base/" in name]
    caplog.clear()
    report = dtckpt.copy(f"{root}/2", f"{copies}/2")
    assert report.checkpoints[0].num_by_store == 0
    assert is_lora(f"{copies}/2", 2)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "are read and written, as the store does not copy" in told


def test_without_a_region_everything_is_written(place, monkeypatch, caplog):
    root = place("s3")
    dtckpt.save(f"{root}/1", lora(1))
    monkeypatch.setattr(s3_gcs_folder.BucketFolder, "share", ObjectFolder.share)
    assert dtckpt.save(f"{root}/2", lora(2), base=f"{root}/1").nbytes_reused == 0
    assert "cannot copy files by itself" in caplog.text
    assert is_lora(f"{root}/2", 2)


def test_a_copy_within_a_store_uploads_nothing(place, uploads, capsys):
    root, copies = save_steps(place("s3"), [1, 2]), place("s3")
    uploads.clear()
    report = dtckpt.copy(root, copies)
    assert all(each.num_by_store == each.num_files - 1 for each in report.checkpoints)
    manifests = report.nbytes
    assert bodies(uploads) < manifests + 20_000  # the manifests, decisions and claims
    assert is_step(copies, 1)
    assert is_step(copies, 2)
    assert main(["copy", f"{root}/step_00000001", f"{copies}/alone"]) == 0
    assert "by the store itself" in capsys.readouterr().out


def test_damage_is_not_copied_within_a_store(place):
    root, copies = save_steps(place("s3"), [1]), place("s3")
    folder = commit_target_of(location_of(f"{root}/step_00000001")).locate()
    name = max(folder.names("client_0/d/"), key=lambda name: len(folder.read(name)))
    data = bytearray(folder.read(name))
    data[1000] ^= 1
    folder.write(name, bytes(data))
    report = dtckpt.copy(root, copies)
    assert "is damaged" in report.failed[0].failure
    with pytest.raises(errors.CheckpointNotFoundError):
        dtckpt.open_checkpoint(f"{copies}/step_00000001")


def test_copies_of_objects(place):
    source, target = folder_at(place("s3")) / "a", folder_at(place("s3")) / "b"
    names = {f"x/{number} %é+": number for number in range(300)}
    source.write_all({name: bytes(number) for name, number in names.items()})
    assert target.share(source, names)
    assert {name: len(data) for name, data in zip(names, target.read_all(names), strict=True)} == names
    with pytest.raises(FileNotFoundError, match="x/none"):
        target.share(source, {"x/none": 0})
    with pytest.raises(MalformedError, match="x/7 %é"):
        target.share(source, {"x/7 %é+": 8})
    assert not target.share(folder_at("gs://other"), {})
    target.remove_tree("x")
    assert target.names() == []
