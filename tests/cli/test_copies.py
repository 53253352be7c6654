"""The commands copy, scrub and sign: their texts, events, exit codes and metrics."""

import pytest
from checkpoint.copying.roots import files_in, flip, save_steps, step_folder
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

import dtckpt
from dtckpt.cli.exit_codes import ExitCode


@pytest.fixture
def root(tmp_path):
    return save_steps(tmp_path / "run", [1, 2])


@pytest.fixture
def keys(tmp_path):
    key = Ed25519PrivateKey.generate()
    (tmp_path / "key.pem").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (tmp_path / "key.pub").write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return tmp_path / "key.pem", tmp_path / "key.pub"


def damage(folder):
    flip(max(files_in(folder), key=lambda file: file.stat().st_size), 1000)


def test_copy(run, root, tmp_path):
    result = run("copy", root, tmp_path / "d", "--max-rate", "1GB")
    assert result.code == ExitCode.OK
    assert result.out.startswith(f"copied 2 checkpoints to {tmp_path / 'd'}: ")
    assert "2 were there already" in run("copy", root, tmp_path / "d").out
    assert run("copy", root, tmp_path / "d", "--quiet").out == ""
    run("copy", root, tmp_path / "e", "--steps", "2,x").fails(ExitCode.USAGE, "--steps '2,x' cannot be used")
    run("copy", root, tmp_path / "e", "--steps", "9").fails(ExitCode.NOT_FOUND, "lacks steps 9")
    run("copy", tmp_path / "none", tmp_path / "e").fails(ExitCode.NOT_FOUND, "neither a checkpoint of dtckpt nor")
    dtckpt.save(tmp_path / "other", {})
    run("copy", step_folder(root, 1), tmp_path / "other").fails(ExitCode.CONFLICT, "pass --overwrite")
    damage(step_folder(root, 1))
    result = run("copy", root, tmp_path / "f")
    assert result.code == ExitCode.FAILED
    assert "not copied: " in result.out
    assert "1 could not be copied" in result.out
    run("copy", step_folder(root, 1), tmp_path / "g").fails(ExitCode.FAILED, "is damaged: its digest does not match")


def test_scrub(run, root, tmp_path):
    dtckpt.copy(root, tmp_path / "copies")
    metrics = tmp_path / "scrub.prom"
    result = run("scrub", root, "--metrics", metrics)
    assert (result.code, result.out.count("\n")) == (ExitCode.OK, 1)
    assert "2 checkpoints" in result.out
    assert "no damage is left; the round has ended" in result.out
    damage(step_folder(root, 2))
    result = run("scrub", root, "--metrics", metrics)
    assert result.code == ExitCode.FAILED
    assert result.out.startswith(f"DAMAGED: {step_folder(root, 2)} ")
    assert f'dtckpt_scrub_damaged_checkpoints{{root="{root}"}} 1.0' in metrics.read_text()
    result = run("scrub", root, "--from", tmp_path / "copies", "--metrics", metrics)
    assert result.code == ExitCode.OK
    assert result.out.startswith(f"mended: {step_folder(root, 2)} ")
    assert f'dtckpt_scrub_last_run_mended{{root="{root}"}} 1.0' in metrics.read_text()
    run("scrub", root, "--bytes-per-day", "0").fails(ExitCode.USAGE, "size cannot be used")
    run("scrub", tmp_path / "none").fails(ExitCode.NOT_FOUND, "there is no folder of checkpoints")
    run("scrub", root, "--from", root).fails(ExitCode.USAGE, "is the root itself")
    assert run("scrub", root, "--bytes-per-day", "1KiB").code == ExitCode.OK


def test_sign(run, root, keys):
    private, public = keys
    step = step_folder(root, 1)
    run("verify", step, "--key", public).fails(ExitCode.FAILED, "is not signed")
    result = run("sign", step, "--key", private)
    assert result.code == ExitCode.OK
    assert " is signed by key " in result.out
    result = run("verify", step, "--key", public)
    assert result.code == ExitCode.OK
    assert "signed by key " in result.out
    (event,) = run("verify", step, "--key", public, "--json").events
    assert len(event["signed_by"]) == 1
    damage(step)
    run("verify", step, "--key", public).fails(ExitCode.FAILED, "changed after it was signed")
    run("sign", step, "--key", private).fails(ExitCode.FAILED, "nothing is signed")
    run("sign", step, "--key", public).fails(ExitCode.USAGE, "holds no private Ed25519 key")
