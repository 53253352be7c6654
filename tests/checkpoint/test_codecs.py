"""Compressed chunks: their files, reads of parts, and how damage shows."""

import json
from contextlib import suppress

import pytest
import torch
from support.states import bits_of, packed, tensor_of

import dtckpt
from dtckpt import Layout, Region, RestoreOptions, SaveOptions, abstract_mesh
from dtckpt.cli.main import main
from dtckpt.errors import CheckpointCorruptError, CheckpointNotFoundError, ConfigError
from dtckpt.format.codecs import CODECS

SHARE_OF_NOISE = {"bfloat16": 0.69, "float16": 0.86, "float32": 0.85, "float64": 0.96}
"""Size of normal numbers of one magnitude as ``blosc``; shuffled bits take 0.76, 0.91, 0.88 and 0.97."""
MESH = abstract_mesh({"x": 2})
COMPRESSED = [codec for codec in CODECS if codec != "none"]
LARGE = (torch.arange(1024 * 512) % 1000).float().reshape(1024, 512)  # 2 MiB, 8 blocks a chunk
TREE = {"large": LARGE, "small": torch.arange(6), "scalar": torch.tensor(2.5), "none": torch.zeros(0, 3)}


def nbytes_in(path):
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def codecs_of(path):
    with dtckpt.open_checkpoint(path) as checkpoint:
        assert checkpoint.verify().is_sound
        return {info.codec for info in checkpoint.tensors.values()}


@pytest.mark.parametrize("kvstore", ["ocdbt", "zarr"])
@pytest.mark.parametrize("codec", COMPRESSED)
def test_chunks_are_compressed_and_content_is_the_same(tmp_path, kvstore, codec):
    dtckpt.save(tmp_path / "plain", TREE, options=SaveOptions(kvstore=kvstore))
    dtckpt.save(tmp_path / "s", TREE, options=SaveOptions(kvstore=kvstore, codec=codec))
    assert nbytes_in(tmp_path / "s") < 0.2 * nbytes_in(tmp_path / "plain")
    assert (codecs_of(tmp_path / "plain"), codecs_of(tmp_path / "s")) == ({"none"}, {codec})
    with dtckpt.open_checkpoint(tmp_path / "plain") as plain, dtckpt.open_checkpoint(tmp_path / "s") as checkpoint:
        for name, info in checkpoint.tensors.items():
            assert info.content_digest == plain.info(name).content_digest
            assert [chunk.digest for chunk in info.chunks] == [chunk.digest for chunk in plain.info(name).chunks]
    restored = dtckpt.restore(tmp_path / "s")
    assert {name: bits_of(tensor) for name, tensor in restored.items()} == {k: bits_of(v) for k, v in TREE.items()}


@pytest.mark.parametrize("dtype", SHARE_OF_NOISE)
def test_exponents_and_mantissas_have_codes_of_their_own(tmp_path, dtype):
    noise = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))
    dtckpt.save(tmp_path / "s", {"w": noise}, options=SaveOptions(kvstore="zarr", codec="blosc"))
    assert nbytes_in(tmp_path / "s" / "w" / "c") < SHARE_OF_NOISE[dtype] * noise.nbytes
    assert dtckpt.restore(tmp_path / "s")["w"].equal(noise)


@pytest.mark.parametrize("codec", COMPRESSED)
def test_a_part_of_a_chunk_takes_all_of_it(tmp_path, codec, capsys):
    rows = Region((300, 0), (2, 512))
    nbytes = {}
    for each in ("none", codec):
        dtckpt.save(tmp_path / each, TREE, options=SaveOptions(codec=each))
        with dtckpt.open_checkpoint(tmp_path / each) as checkpoint:
            nbytes[each] = checkpoint.info("large").read_nbytes(rows)
            assert checkpoint.read("large", rows).equal(LARGE[300:302])
    assert nbytes == {"none": 256 << 10, codec: LARGE.nbytes}
    assert main(["inspect", "--tensor", "large", str(tmp_path / codec)]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("large ")]
    assert f"float32 ({codec})" in row
    assert " 1024x512 " in row.partition("MiB")[2]  # the unit of reading
    assert main(["inspect", "--json", str(tmp_path / codec)]) == 0
    assert {each["codec"] for each in json.loads(capsys.readouterr().out)["tensors"]} == {codec}


@pytest.mark.share(1)
@pytest.mark.parametrize("codec", COMPRESSED)
def test_damage_is_noticed_and_named(tmp_path, codec):
    whole = tensor_of("w", (40, 30), "int16")
    tree = {"a/w": packed(whole, Layout(["x", "unsharded"], MESH))}
    dtckpt.save(tmp_path / "s", tree, options=SaveOptions(kvstore="zarr", codec=codec))
    file = tmp_path / "s" / "a" / "w" / "c" / "1" / "0"
    data = file.read_bytes()
    damages = [data[: len(data) // 2], b"", *(flipped(data, bit) for bit in range(0, 8 * len(data), 97))]
    unnoticed = 0
    for damaged in damages:
        file.write_bytes(damaged)
        with suppress(CheckpointCorruptError), dtckpt.open_checkpoint(tmp_path / "s") as checkpoint:
            # Some bits of a compressed chunk say nothing of its elements.
            assert bits_of(checkpoint.read("a/w")) == bits_of(whole)
            unnoticed += 1
            continue
        with dtckpt.open_checkpoint(tmp_path / "s") as checkpoint:
            (damage,) = checkpoint.verify().damages
        assert (damage.tensor, damage.region) == ("a/w", Region((20, 0), (20, 30)))
        with pytest.raises(CheckpointCorruptError, match=r"\[20:40, 0:30\] of .*'a/w'"):
            dtckpt.restore(tmp_path / "s")
    assert unnoticed < len(damages) / 20
    file.unlink()
    with pytest.raises(CheckpointCorruptError, match=r"\[20:40, 0:30\]"):
        dtckpt.restore(tmp_path / "s")


def flipped(data, bit):
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def test_reshard_keeps_the_codec_or_changes_it(tmp_path):
    dtckpt.save(tmp_path / "s", TREE, options=SaveOptions(codec="zstd"))
    assert main(["reshard", str(tmp_path / "s"), str(tmp_path / "kept"), "--mesh", "x=2"]) == 0
    assert main(["reshard", str(tmp_path / "s"), str(tmp_path / "other"), "--mesh", "x=2", "--codec", "blosc"]) == 0
    dtckpt.reshard(tmp_path / "s", tmp_path / "plain", mesh=MESH, options=SaveOptions(codec="none"))
    assert [codecs_of(tmp_path / name) for name in ("kept", "other", "plain")] == [{"zstd"}, {"blosc"}, {"none"}]
    for name in ("kept", "other", "plain"):
        assert bits_of(dtckpt.restore(tmp_path / name)["large"]) == bits_of(LARGE)


def test_slices_are_compressed_too(tmp_path):
    halves = [LARGE[:, :256].clone(), LARGE[:, 256:].clone()]
    dtckpt.sharded_save(
        MESH,
        tmp_path / "s",
        ["w", "w"],
        ["1024 512 0,1024:0,256", "1024 512 0,1024:256,256"],
        [packed(half, Layout.replicated(MESH, 2)) for half in halves],
        options=SaveOptions(codec="zstd"),
    )
    assert codecs_of(tmp_path / "s") == {"zstd"}
    assert dtckpt.restore(tmp_path / "s", options=RestoreOptions())["w"].equal(LARGE)


def test_where_only_plain_chunks_can_be_written(tmp_path):
    dtckpt.save(tmp_path / "s", TREE, options=SaveOptions(kvstore="zarr", codec="zstd"))
    for name, call in {
        "saved": lambda url: dtckpt.save(url, TREE, options=SaveOptions(kvstore="zarr", codec="zstd")),
        "laid-out": lambda url: dtckpt.reshard(tmp_path / "s", url, mesh=MESH, options=SaveOptions(kvstore="zarr")),
    }.items():
        url = f"memory://codecs/{name}"
        with pytest.raises(ConfigError, match="cannot hold compressed chunks"):
            call(url)
        with pytest.raises(CheckpointNotFoundError):
            dtckpt.open_checkpoint(url)
