"""Signed checkpoints: a restore with trusted keys takes the signed bytes, or fills nothing."""

import shutil

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

import dtckpt
from dtckpt import RestoreOptions, errors
from dtckpt.checkpoint.signing import sign as sign_module
from dtckpt.checkpoint.signing import signed_folder, statement
from dtckpt.checkpoint.signing.signed_folder import SignedFolder
from dtckpt.checkpoint.signing.statement import (
    SIGNATURE_NAME,
    BlockHasher,
    Envelope,
    SignedFiles,
    block_digest,
    block_nbytes_of,
)

from ..copying.roots import OPTIONS, files_in, flip, is_step, save_steps, state, step_folder
from . import sign_cases

ALGORITHMS = ["sha256", "blake3"]


def pem_pair(folder, name):
    """Write the two files of a new key; return their paths."""
    key = Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture
def keys(tmp_path):
    return pem_pair(tmp_path, "ours")


@pytest.fixture
def strangers(tmp_path):
    return pem_pair(tmp_path, "theirs")


def refused(path, public, match=None):
    """Check that a restore is refused, and that it fills nothing."""
    assert filled(path, public, match) == 0


def filled(path, public, match=None):
    """Check that a restore is refused; return how many elements it filled. All of them must be signed ones."""
    target = {name: torch.full_like(each, -1) for name, each in state(1).items() if name != "step"} | {"step": 0}
    # Without a manifest there is no checkpoint.
    with pytest.raises((errors.CheckpointUntrustedError, errors.CheckpointIncompleteError), match=match):
        dtckpt.restore(path, target, options=RestoreOptions(trusted_keys=[public]))
    assert target.pop("step") == 0
    is_filled = {name: each != -1 for name, each in target.items()}
    assert all(target[name][mask].equal(state(1)[name][mask]) for name, mask in is_filled.items())
    return sum(int(mask.sum()) for mask in is_filled.values())


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_signed_checkpoint_is_restored(tmp_path, keys, kind):
    path = tmp_path / "s"
    dtckpt.save(path, state(1), options=OPTIONS[kind])
    report = dtckpt.sign(path, keys[0])
    tree = dtckpt.restore(path, options=RestoreOptions(trusted_keys=[keys[1]]))
    assert all(tree[name].equal(state(1)[name]) for name in ("w", "half", "tiny"))
    assert report.num_files == len(files_in(path)) - 1
    assert report.nbytes == sum(file.stat().st_size for file in files_in(path) if file.name != SIGNATURE_NAME)
    with dtckpt.open_checkpoint(path, trusted_keys=[keys[1].read_bytes()]) as checkpoint:
        assert checkpoint.verify().is_sound
        assert checkpoint.signed.signers == (report.key,)
    assert is_step(path, 1)


def test_a_copy_is_signed_too(tmp_path, keys):
    dtckpt.save(tmp_path / "s", state(1))
    dtckpt.sign(tmp_path / "s", keys[0])
    dtckpt.copy(tmp_path / "s", tmp_path / "d")
    dtckpt.restore(tmp_path / "d", options=RestoreOptions(trusted_keys=[keys[1]]))


def test_signatures_of_several_keys(tmp_path, keys, strangers):
    path = tmp_path / "s"
    dtckpt.save(path, state(1))
    refused(path, keys[1], "is not signed")
    dtckpt.sign(path, strangers[0])
    refused(path, keys[1], "no trusted key has signed")
    assert dtckpt.sign(path, keys[0]).num_signatures == 2
    for public in (keys[1], strangers[1]):
        dtckpt.restore(path, options=RestoreOptions(trusted_keys=[public]))
    dtckpt.save(path, state(2), options=dtckpt.SaveOptions(overwrite=True))
    refused(path, keys[1], "is not signed")


@pytest.mark.parametrize("kind", ["ocdbt", "zarr"])
def test_any_changed_file_is_refused(tmp_path, keys, kind):
    path = tmp_path / "s"
    dtckpt.save(path, state(1), options=OPTIONS[kind])
    dtckpt.sign(path, keys[0])
    used = set()
    for file in files_in(path):
        data = file.read_bytes()
        for cut in (data[:-1], None):
            if cut is None:
                file.unlink()
            else:
                file.write_bytes(cut)
            refused(path, keys[1])
        for position in (0, len(data) // 2, len(data) - 1):
            file.write_bytes(data)
            flip(file, position)
            try:
                # A file that no restore reads may hold anything.
                assert is_step(path, 1)
                tree = dtckpt.restore(path, options=RestoreOptions(trusted_keys=[keys[1]]))
                assert all(tree[name].equal(state(1)[name]) for name in ("w", "half", "tiny"))
            except errors.CheckpointError:
                used.add(file)
                filled(path, keys[1])
            with pytest.raises((errors.CheckpointUntrustedError, errors.CheckpointIncompleteError)):
                validate_all(path, keys[1])
        file.write_bytes(data)
    assert len(used) >= (5 if kind == "zarr" else 4)
    (path / "extra").write_text("no reader looks at it")
    dtckpt.restore(path, options=RestoreOptions(trusted_keys=[keys[1]]))
    validate_all(path, keys[1])


def validate_all(path, public):
    with dtckpt.open_checkpoint(path, trusted_keys=[public]) as checkpoint:
        checkpoint.signed.validate_files()


@pytest.mark.parametrize("kind", ["ocdbt", "zarr"])
def test_each_byte_is_digested_once(tmp_path, keys, monkeypatch, kind):
    path, counted = tmp_path / "s", []
    options = dtckpt.SaveOptions(kvstore=kind, chunk_nbytes=4 << 20)
    tree = {"w": torch.rand(4096, 1024), **{f"b{number}": torch.rand(1000) for number in range(100)}}
    dtckpt.save(path, tree, options=options)
    nbytes = dtckpt.sign(path, keys[0]).nbytes

    def count(data, algorithm):
        counted.append(data.nbytes)
        return block_digest(data, algorithm)

    monkeypatch.setattr(signed_folder, "block_digest", count)
    target = {name: torch.zeros_like(each) for name, each in tree.items()}
    dtckpt.restore(path, target, options=RestoreOptions(trusted_keys=[keys[1]]))
    assert all(target[name].equal(tree[name]) for name in tree)
    # Chunks that share a block may be read by two threads.
    assert 0.9 * nbytes < sum(counted) < 1.3 * nbytes


@pytest.mark.parametrize("kind", ["ocdbt", "zarr"])
def test_no_byte_that_was_not_signed_gets_to_a_tensor(tmp_path, keys, kind):
    path = tmp_path / "s"
    dtckpt.save(path, {"w": torch.ones(2048, 1024)}, options=dtckpt.SaveOptions(kvstore=kind))
    dtckpt.sign(path, keys[0])
    flip(max(files_in(path), key=lambda file: file.stat().st_size), 5 << 20, mask=0x7F)
    target = {"w": torch.zeros(2048, 1024)}
    with pytest.raises(errors.CheckpointUntrustedError, match=r"bytes 5242880 to 6291456 are not the signed ones"):
        dtckpt.restore(path, target, options=RestoreOptions(trusted_keys=[keys[1]]))
    assert ((target["w"] == 0) | (target["w"] == 1)).all()
    with pytest.raises(errors.CheckpointCorruptError):
        dtckpt.restore(path, target)
    assert not ((target["w"] == 0) | (target["w"] == 1)).all()  # an accident leaves the target undefined


def test_other_values_under_all_digests_of_the_format_are_refused(tmp_path, keys):
    """Forge a checkpoint: another save, which is right by all its digests."""
    for name, step in (("s", 1), ("forged", 2)):
        dtckpt.save(tmp_path / name, state(step))
    dtckpt.sign(tmp_path / "s", keys[0])
    shutil.copy(tmp_path / "s" / SIGNATURE_NAME, tmp_path / "forged")
    assert dtckpt.open_checkpoint(tmp_path / "forged").verify().is_sound
    refused(tmp_path / "forged", keys[1])


@pytest.mark.parametrize("kind", OPTIONS)
def test_bytes_that_change_after_the_checkpoint_was_opened_are_not_used(tmp_path, keys, monkeypatch, kind):
    path = tmp_path / "s"
    dtckpt.save(path, state(1), options=OPTIONS[kind])
    dtckpt.sign(path, keys[0])
    validate = SignedFolder.validate_sizes

    def validate_and_exchange(self, *args):
        validate(self, *args)
        files = [file for file in files_in(path) if file.stat().st_size > 1000]
        for file in files:
            if file.name != "dtckpt.manifest":
                flip(file, 500)

    monkeypatch.setattr(SignedFolder, "validate_sizes", validate_and_exchange)
    filled(path, keys[1], "changed after it was signed")


def test_a_damaged_checkpoint_is_not_signed(tmp_path, keys):
    dtckpt.save(tmp_path / "s", state(1))
    flip(max(files_in(tmp_path / "s"), key=lambda file: file.stat().st_size), 1000)
    with pytest.raises(errors.CheckpointCorruptError, match="nothing is signed"):
        dtckpt.sign(tmp_path / "s", keys[0])
    assert not (tmp_path / "s" / SIGNATURE_NAME).exists()


def test_keys_that_cannot_be_used(tmp_path, keys):
    dtckpt.save(tmp_path / "s", state(1))
    curve = generate_private_key(SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for key in (tmp_path / "none", keys[1], b"no key", curve):
        with pytest.raises(errors.ConfigError):
            dtckpt.sign(tmp_path / "s", key)
    dtckpt.sign(tmp_path / "s", keys[0])
    for key in (tmp_path / "none", keys[0], b"no key"):
        with pytest.raises(errors.ConfigError):
            dtckpt.restore(tmp_path / "s", options=RestoreOptions(trusted_keys=[key]))
    for keys_ in ("key.pub", [1], 3):
        with pytest.raises(errors.ConfigError, match="trusted_keys"):
            RestoreOptions(trusted_keys=keys_)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"\xff", b"[" * 100_000, b'{"payloadType": "x", "signatures": []}']
)
def test_a_prepared_signature_is_refused(tmp_path, keys, data):
    dtckpt.save(tmp_path / "s", state(1))
    (tmp_path / "s" / SIGNATURE_NAME).write_bytes(data)
    refused(tmp_path / "s", keys[1], "cannot be read|no trusted key")


def test_checkpoints_that_no_key_can_sign(tmp_path, keys):
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    with pytest.raises(errors.CheckpointUntrustedError):
        dtckpt.open_checkpoint(tmp_path / "model.pt", trusted_keys=[keys[1]])


def test_a_manager_passes_over_steps_that_are_not_signed(tmp_path, keys):
    save_steps(tmp_path / "run", [1, 2, 3])
    dtckpt.sign(step_folder(tmp_path / "run", 2), keys[0])
    with dtckpt.CheckpointManager(tmp_path / "run", trusted_keys=[keys[1]]) as manager:
        restored = manager.restore()
        assert restored.step == 2
        assert "is not signed" in restored.skipped[3]
        with pytest.raises(errors.CheckpointUntrustedError):
            manager.restore(1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_signature_without_the_faster_digests(tmp_path, keys, strangers, monkeypatch, algorithm):
    """Sign on a machine that has one algorithm, restore on a machine that has the other one, or both."""
    dtckpt.save(tmp_path / "s", state(1))
    with monkeypatch.context() as patch:
        patch.setattr(sign_module, "best_algorithm", lambda: algorithm)
        dtckpt.sign(tmp_path / "s", keys[0])
    # A second signature is over the same digests, so the first one stays.
    assert dtckpt.sign(tmp_path / "s", strangers[0]).num_signatures == 2
    dtckpt.restore(tmp_path / "s", options=RestoreOptions(trusted_keys=[keys[1]]))
    validate_all(tmp_path / "s", keys[1])
    statement._hasher_of.cache_clear()
    monkeypatch.setattr(statement, "best_algorithm", lambda: "sha256")
    if algorithm == "sha256":
        dtckpt.restore(tmp_path / "s", options=RestoreOptions(trusted_keys=[keys[1]]))
    else:
        with pytest.raises(errors.ConfigError, match="need blake3"):
            dtckpt.restore(tmp_path / "s", options=RestoreOptions(trusted_keys=[keys[1]]))
        with pytest.raises(errors.ConfigError, match="need blake3"):
            dtckpt.sign(tmp_path / "s", keys[0])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_statements_keep_what_they_are_given(algorithm):
    pieces = [b"a" * (1 << 20), b"b", b"", b"c" * (3 << 20)]
    hasher = BlockHasher(1 << 20, algorithm)
    for piece in pieces:
        hasher.add(memoryview(piece))
    files = {"f": hasher.file(), "empty": BlockHasher(1 << 20, algorithm).file()}
    signed = SignedFiles(1 << 20, algorithm, files)
    assert signed.files["f"].digest(1) == block_digest(memoryview(b"b" + b"c" * ((1 << 20) - 1)), algorithm)
    assert signed.files["f"].nbytes == (4 << 20) + 1
    assert len(signed.files["f"].digests) == 5 * 32
    assert SignedFiles.from_bytes(signed.to_bytes()) == signed
    with pytest.raises(ValueError, match="upgrade dtckpt"):
        SignedFiles.from_bytes(signed.to_bytes().replace(algorithm.encode(), b"md5"))
    envelope = Envelope(signed.to_bytes(), {"k": b"sig"})
    assert Envelope.from_bytes(envelope.to_bytes()) == envelope
    assert [block_nbytes_of(nbytes) >> 20 for nbytes in (0, 1 << 40, (1 << 40) + 1, 1 << 50)] == [1, 1, 2, 1024]


@pytest.mark.processes
@pytest.mark.parametrize("read_once", [None, False])
def test_all_clients_are_refused_alike(pool, tmp_path, keys, strangers, read_once):
    path = tmp_path / "s"
    pool.values(sign_cases.save, f"{path}", clients=2)
    dtckpt.sign(path, keys[0])
    assert pool.values(sign_cases.restore, f"{path}", f"{keys[1]}", read_once, clients=2) == [True, True]
    answers = pool.run(sign_cases.restore, f"{path}", f"{strangers[1]}", read_once, clients=2)
    assert {answer.error for answer in answers} == {"CheckpointUntrustedError"}
    answers = pool.run(sign_cases.restore_by_own_keys, f"{path}", f"{keys[1]}", clients=2)
    assert {answer.error for answer in answers} == {"CheckpointUntrustedError"}
    flip(max(files_in(path), key=lambda file: file.stat().st_size), 1000)
    answers = pool.run(sign_cases.restore, f"{path}", f"{keys[1]}", read_once, clients=2)
    assert {answer.error for answer in answers} == {"CheckpointUntrustedError"}
    assert len({answer.text for answer in answers}) == 1


@pytest.mark.parametrize("kind", ["ocdbt", "zarr"])
def test_a_save_does_not_take_over_the_signature_of_its_base(tmp_path, keys, kind):
    """It shares the files that the signature covers; each checkpoint is signed for itself."""
    private, public = keys
    first, second = tmp_path / "a", tmp_path / "b"
    dtckpt.save(first, state(1), options=OPTIONS[kind])
    dtckpt.sign(first, private)
    report = dtckpt.save(second, {**state(2), "w": state(1)["w"]}, options=OPTIONS[kind], base=first)
    assert report.nbytes_reused >= state(1)["w"].nbytes
    refused(second, public)
    assert is_step(first, 1)
    dtckpt.restore(first, options=RestoreOptions(trusted_keys=[public]))
    dtckpt.sign(second, private)
    assert dtckpt.restore(second, options=RestoreOptions(trusted_keys=[public]))["step"] == 2
    # One write changes both, and both tell it.
    shared = max((file for file in files_in(second) if file.stat().st_nlink > 1), key=lambda file: file.stat().st_size)
    flip(shared, shared.stat().st_size // 2)
    for each in (first, second):
        with pytest.raises(errors.CheckpointUntrustedError):
            dtckpt.restore(each, options=RestoreOptions(trusted_keys=[public]))
