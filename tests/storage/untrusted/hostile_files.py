"""Files that strangers may have prepared, in all formats: bombs, which ask for far more than they have, and mutations.

Each is written below a root, as a checkpoint ``step_00000001`` or as a file. `hostile_runs` reads them.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numcodecs
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from checkpoint.foreign.sample_files import SAMPLES

import dtckpt
from dtckpt import SaveOptions
from dtckpt._proto import checkpoint_pb2
from dtckpt.checkpoint.foreign.sstable import read_table, table_bytes
from dtckpt.checkpoint.foreign.tensor_bundle import BundleEntry
from dtckpt.checkpoint.managing.lineage import LINEAGE_NAME
from dtckpt.checkpoint.managing.run_history import RUNS_FOLDER
from dtckpt.checkpoint.managing.step_folders import METRICS_NAME
from dtckpt.checkpoint.tiers.status import STATUS_NAME
from dtckpt.format.digest import bytes_digest
from dtckpt.format.manifest import MANIFEST_NAME

from .hash_attacks import colliding_numbers
from .hostile_pickles import MODULUS, TREES, dcp_bomb, zip_of
from .untrusted_checkpoints import change_manifest, entry_of, put_value, resize_tensor

STEP = "step_00000001"
TREE = {
    "w": torch.arange(4096.0).reshape(64, 64),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "betas": (0.9, 0.95),
    "seen": {1, 2, 3},
    "by number": {0: "a", 1: None},
}
FILES = {"torch": "file.pt", "safetensors": "model.safetensors", "tensorflow": "ckpt"}
"""Names of checkpoints that are files, or have a prefix."""
PEERS = {
    "megatron": "megatron_versions/v0.13.1/iter_0000007",
    "common state": "megatron_versions/v0.19.0/iter_0000007",
    "zero 2": "deepspeed/z2_bf16_2/global_step3",
    "zero 3": "deepspeed/z3_bf16_2/global_step3",
    "universal": "deepspeed/z2_bf16_2_universal/global_step3_universal",
    "fsdp": "fsdp/fsdp1_flat_2",
    "orbax": "orbax/v1_state",
    "orbax zarr": "orbax/v0_plain_zarr2_mesh2x2",
    "trainer": "huggingface/trainer",
    "accelerate": "huggingface/accelerate",
}
"""By kind, a checkpoint that another library wrote, in `SAMPLES`."""
KINDS = (
    *("ocdbt", "zarr", "blosc", "torch", "safetensors", "sharded", "dcp", "root", "tensorflow"),
    *("megatron zarr", "slices"),
    *PEERS,
)


def write_honest(root: Path, kind: str) -> Path:
    """Write a sound checkpoint of a format below a root; return its path."""
    root.mkdir(parents=True, exist_ok=True)
    path = root / FILES.get(kind, STEP)
    tensors = {name: value for name, value in TREE.items() if torch.is_tensor(value)}
    if kind == "torch":
        torch.save(TREE, path)
    elif kind == "safetensors":
        safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    elif kind == "sharded":
        path.mkdir()
        for number, (name, tensor) in enumerate(tensors.items()):
            safetensors.torch.save_file({name: tensor}, path / f"model-0000{number + 1}-of-00002.safetensors")
        weight_map = {name: f"model-0000{number + 1}-of-00002.safetensors" for number, name in enumerate(tensors)}
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    elif kind == "dcp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({**tensors, "step": 3, "betas": [0.9, 0.95]}, checkpoint_id=path)
    elif kind == "megatron zarr":
        _write_zarr(path, tensors["w"])
    elif kind == "slices":
        _write_slices(path)
    elif kind in PEERS:
        shutil.copytree(SAMPLES / PEERS[kind], path)
    elif kind == "tensorflow":
        for file in (SAMPLES / "tensorflow" / "object").iterdir():
            shutil.copyfile(file, root / file.name.replace("ckpt-1", "ckpt"))
    elif kind == "root":
        with dtckpt.CheckpointManager(root, is_async=False) as manager:
            for step in (1, 2):
                manager.save(step, {"w": torch.ones(3)}, metrics={"loss": 1.0}, force=True)
    else:
        kvstore, codec = ("zarr", "blosc") if kind == "blosc" else (kind, None)
        dtckpt.save(path, TREE, options=SaveOptions(kvstore=kvstore, codec=codec, fsync=False))
    return path


def _write_zarr(path: Path, elements: torch.Tensor) -> None:
    """Write a checkpoint of Megatron's zarr: an array of two chunks, a sharded object, and the common state."""
    (path / "w").mkdir(parents=True)
    rows, columns = elements.shape
    document = {
        "zarr_format": 2,
        "shape": [rows, columns],
        "chunks": [rows // 2, columns],
        "dtype": "<f4",
        "order": "C",
    }
    (path / "w" / ".zarray").write_text(json.dumps(document | {"compressor": None, "fill_value": None}))
    for number, half in enumerate(elements.chunk(2)):
        (path / "w" / f"{number}.0").write_bytes(half.numpy().tobytes())
    torch.save([{"seed": 1, "state": torch.ones(3)}], path / "w" / "shard_0_1.pt")
    torch.save({"iteration": 7}, path / "common.pt")
    (path / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')


def _write_slices(path: Path) -> None:
    """Write a checkpoint of DeepSpeed of two slices, with one expert, and the patterns that tell how to join them."""
    path.mkdir()
    info = {"universal_checkpoint_version": 0.2, "tp_replicated_parameter_patterns": [r"\d+.norm"]}
    for rank in range(2):
        module = {"0.w": torch.ones(2, 3) * rank, "0.norm": torch.ones(3)}
        content = {"module": module, "buffer_names": [], "mp_world_size": 2, "universal_checkpoint_info": info}
        torch.save(content, path / f"mp_rank_0{rank}_model_states.pt")
        torch.save({"0.expert.w": torch.ones(2, 3)}, path / f"layer_0_expert_0_mp_rank_0{rank}_model_states.pt")


# --- mutations --------------------------------------------------------------------------------------------------------


def write_mutation(root: Path, honest: Path, draw: random.Random, kinds: Sequence[str] = KINDS) -> Path:
    """Write a sound checkpoint with one change; return its path.

    Args:
        root: Where to.
        honest: The folder of the sound checkpoints, by kind.
        draw: Chooses the checkpoint and the change.
        kinds: The kinds of checkpoints to choose from.
    """
    kind = draw.choice(kinds)
    shutil.copytree(honest / kind, root)
    files = sorted(file for file in root.rglob("*") if file.is_file())
    # Changes matter most in files that describe others; elements have digests.
    described = (".metadata", MANIFEST_NAME, "_METADATA", ".zarray", "ckpt.index")
    chosen = [file for file in files if file.name in described] or files
    file = draw.choice(chosen if draw.random() < 0.5 else files)
    data = file.read_bytes()
    if file.name == MANIFEST_NAME and draw.random() < 0.8:
        data = _signed(data, draw)
    elif file.suffix == ".pt" and draw.random() < 0.8:
        data = _rezipped(data, draw)
    elif file.suffix == ".index" and draw.random() < 0.8:
        table = dict(read_table(data, file.name))
        key = draw.choice(sorted(table))
        data = table_bytes(sorted((table | {key: mutated(table[key], draw)}).items()))
    elif file.name == LINEAGE_NAME and draw.random() < 0.8:
        text = mutated(data.split(b"\n")[0], draw)
        data = b"%s\n%016x\n" % (text, bytes_digest(text))
    else:
        data = mutated(data, draw)
    file.write_bytes(data)
    return root / FILES.get(kind, STEP)


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Return bytes with a change: of bits, of a number, of the length, or of the order."""
    changed = bytearray(data or b"\0")
    at = draw.randrange(len(changed))
    kind = draw.randrange(6)
    if kind == 0:
        changed[at] ^= 1 << draw.randrange(8)
    elif kind == 1:
        width = draw.choice((1, 2, 4, 8))
        value = draw.choice((0, 1, 0x7F, 0xFF, (1 << 8 * width) - 1, 1 << (8 * width - 1), draw.getrandbits(8 * width)))
        changed[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
    elif kind == 2:
        del changed[at:]
    elif kind == 3:
        del changed[at : at + draw.randrange(1, 40)]
    elif kind == 4:
        source = draw.randrange(len(changed))
        changed[at:at] = changed[source : source + draw.randrange(1, 200)]
    else:
        digits = [position for position, byte in enumerate(changed) if 48 <= byte < 58]
        at = draw.choice(digits or [at])
        changed[at : at + 1] = draw.choice((b"9" * 18, b"-1", b"0", b"1e9", b'"a"', b"null", b"[]"))
    return bytes(changed)


def _signed(data: bytes, draw: random.Random) -> bytes:
    """Return a manifest whose message is changed, with the digest of that."""
    envelope = checkpoint_pb2.ManifestFile.FromString(data)
    if draw.random() < 0.5:
        message = checkpoint_pb2.Manifest.FromString(envelope.manifest)
        message.tree = mutated(message.tree, draw)
        envelope.manifest = message.SerializeToString()
    else:
        envelope.manifest = mutated(envelope.manifest, draw)
    envelope.digest = bytes_digest(envelope.manifest)
    return envelope.SerializeToString()


def _rezipped(data: bytes, draw: random.Random) -> bytes:
    """Return a file of ``torch.save`` whose pickle is changed, with checksums that match."""
    start = data.index(b"\x80\2")
    stop = data.index(b"PK", start)
    program = mutated(data[start:stop], draw)[: stop - start].ljust(stop - start, b".")
    before, after = (struct.pack("<I", zlib.crc32(each.rstrip(b"\0"))) for each in (data[start:stop], program))
    return (data[:start] + program + data[stop:]).replace(before, after)


# --- bombs ------------------------------------------------------------------------------------------------------------


def write_bomb(root: Path, honest: Path, draw: random.Random) -> Path:
    """Write a bomb; return the path of the checkpoint. Args: as for `write_mutation`."""
    return draw.choice(BOMBS)(root, honest, draw)


def _torch(root: Path, honest: Path, draw: random.Random) -> Path:
    root.mkdir()
    (root / "file.pt").write_bytes(zip_of(draw.choice(TREES)(draw), {"0": bytes(4)}))
    return root / "file.pt"


def _dcp(root: Path, honest: Path, draw: random.Random) -> Path:
    root.mkdir()
    dcp_bomb(root / STEP, draw)
    return root / STEP


def _deepspeed(root: Path, honest: Path, draw: random.Random) -> Path:
    count = draw.choice((2, 1 << 16, 1 << 17, 1 << 40))
    shape = draw.choice(((1 << 20,) * 3, (1,) * 60, (1 << 40, 0), (2,), (1 << 61,)))
    num_names = draw.choice((1, 1000, 50_000))
    shapes = {f"w{each}": torch.Size(shape) for each in range(num_names)}
    model = {
        "module": {"w0": torch.zeros(2)},
        "param_shapes": draw.choice(([shapes], [shapes] * 1000, [{}] * 100_000)),
        "frozen_param_shapes": draw.choice((None, shapes)),
        "shared_params": draw.choice(({}, dict.fromkeys(shapes, "w0"), {"w0": "w0"})),
        "dp_world_size": count,
        "mp_world_size": draw.choice((1, 1, 1, 1 << 16, 1 << 40)),
    }
    vectors = [torch.zeros(2)] * draw.choice((1, 2000))
    optimizer = draw.choice(
        (
            {"fp32_flat_groups": vectors, "partition_count": count},
            {"single_partition_of_fp32_groups": vectors, "partition_count": [count] * len(vectors)},
        )
    )
    folder = root / STEP
    folder.mkdir(parents=True)
    for rank in range(2):
        torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        torch.save({"optimizer_state_dict": optimizer}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def _template(root: Path, honest: Path, draw: random.Random) -> Path:
    shutil.copytree(honest / "fsdp", root)
    sizes = {"_flat_param": [1 << 61] * 8, "w": [1] * 1000} | {f"w{each}": [1] for each in range(20_000)}
    bomb = draw.choice((_json_bomb(draw), json.dumps(sizes).encode()))
    (root / STEP / "template.json").write_bytes(bomb)
    return root / STEP


def _trainer(root: Path, honest: Path, draw: random.Random) -> Path:
    shutil.copytree(honest / "trainer", root)
    folder = root / STEP
    change = draw.randrange(4)
    if change == 0:
        (folder / "trainer_state.json").write_bytes(_json_bomb(draw))
    elif change == 1:
        (folder / "template.json").write_bytes(draw.choice((_json_bomb(draw), json.dumps({"w": [1 << 61]}).encode())))
    elif change == 2:
        file = draw.choice(("optimizer.pt", "scheduler.pt", "rng_state.pth"))
        (folder / file).write_bytes(zip_of(draw.choice(TREES)(draw), {"0": bytes(4)}))
    else:
        groups = [{"params": list(range(100_000)), "param_names": ["w" * 1000] * 100_000}]
        torch.save({"state": {}, "param_groups": groups * draw.choice((1, 1000))}, folder / "optimizer.pt")
        (folder / f"rng_state_{draw.choice((3, 99_999, 999_999))}.pth").write_bytes(b"")
    return folder


def _json_bomb(draw: random.Random) -> bytes:
    """Return a JSON document that asks for much."""
    count = draw.choice((1000, 1 << 18, 1 << 20))
    numbers = [1 + each * MODULUS for each in range(20_000)]
    return draw.choice(
        (
            b"[" * count,
            b"[" + b"[]," * count + b"0]",
            b'{"a":' * count,
            b"[" + b"{}," * count + b"0]",
            b"9" * min(count, 1 << 18),
            b"{" + b",".join(b'"k%d":1' % each for each in range(count // 8)) + b"}",
            json.dumps({"number": 1, "aside": numbers}).encode(),
            json.dumps({"number": 1, "aside": colliding_numbers(20_000)}).encode(),
        )
    )


def _safetensors(root: Path, honest: Path, draw: random.Random) -> Path:
    root.mkdir()
    entry: dict[str, Any] = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    count = draw.choice((100, 5000, 20_000))
    header = draw.choice(
        (
            lambda: _json_bomb(draw),
            lambda: json.dumps({"w": entry | {"shape": [1 << 61] * count}}).encode(),
            lambda: json.dumps({"w": entry | {"shape": [1 << 61, 0, 1 << 61], "data_offsets": [0, 0]}}).encode(),
            lambda: json.dumps({"__metadata__": {f"a{each}": "w" for each in range(count)}, "w": entry}).encode(),
            lambda: json.dumps({f"w{each}": entry for each in range(count)}).encode(),
            lambda: json.dumps({"a/" * 500 + str(each): entry for each in range(count // 100)}).encode(),
        )
    )()
    claimed = draw.choice((len(header), len(header), 1 << 62, 99_000_000))
    (root / "model.safetensors").write_bytes(struct.pack("<Q", claimed) + header + bytes(4))
    return root / "model.safetensors"


def _index(root: Path, honest: Path, draw: random.Random) -> Path:
    shutil.copytree(honest / "sharded", root)
    count = draw.choice((100, 10_000, 100_000))
    file = root / STEP / "model.safetensors.index.json"
    shard = "model-00001-of-00002.safetensors"
    weight_map = draw.choice(
        ({f"w{each}": shard for each in range(count)}, {f"w{each}": f"{each}.safetensors" for each in range(count)})
    )
    file.write_bytes(draw.choice((_json_bomb(draw), json.dumps({"weight_map": weight_map}).encode())))
    return root / STEP


def _manifest(root: Path, honest: Path, draw: random.Random) -> Path:
    shutil.copytree(honest / "zarr", root)
    change_manifest(root / STEP, draw.choice(CHANGES)(draw))
    return root / STEP


def _tree_bomb(draw: random.Random) -> Callable[[Any], None]:
    numbers = draw.choice(([1 + each * MODULUS for each in range(20_000)], colliding_numbers(20_000)))
    value: dict[str, Any] = {"value": 0}
    trees: tuple[Callable[[], Any], ...] = (
        lambda: {"list": [{"list": []}] * draw.choice((1000, 200_000))},
        lambda: {"dict": [[each, value] for each in numbers]},
        lambda: {"set": [{"value": each} for each in numbers]},
        lambda: {"set": [{"complex": [str(each), str(each)]} for each in range(20_000)]},
        lambda: {"list": [{"type": ["namedtuple", f"N{each}", {"dict": [["f", value]]}]} for each in range(5000)]},
        lambda: {"type": ["namedtuple", "N", {"dict": [[f"f{each}", value] for each in range(50_000)]}]},
        lambda: {"bytes": "AAAA" * 100_000},
        lambda: {"range": [0, 1 << 60, 1]},
        lambda: {"BytesIO": ["AAAA", 1 << 60]},
        lambda: {"type": ["PerClient", 1 << 40, {"dict": [[0, value]]}]},
        lambda: {"type": ["deque", 1 << 40, {"list": [value]}]},
        lambda: {"torch.Size": [1] * 100_000},
    )
    texts = ("[" * 100_000, '{"list":[' * 5000 + '{"value":0}' + "]}" * 5000, '{"value":' + "9" * 100_000 + "}")
    tree = draw.choice((*texts, *(json.dumps(made()) for made in draw.sample(trees, 3)))).encode()
    return lambda message: setattr(message, "tree", tree)


def _claims(draw: random.Random) -> Callable[[Any], None]:
    shape = draw.choice(((1 << 40,), (1 << 20,) * 3, (1 << 57,), (1 << 62, 0, 1 << 62)))
    return resize_tensor("w", shape, tuple(max(1, min(each, draw.choice((1, 1 << 20)))) for each in shape))


def _lists(draw: random.Random) -> Callable[[Any], None]:
    def change(message: Any) -> None:
        numbers = [each % (1 << 32) for each in colliding_numbers(40_000)]
        if kind == "missing":
            count = 1 << 18
            resize_tensor("w", (count,), (1,))(message)
            entry_of(message, "w").missing[:] = [each % count for each in numbers]
        elif kind == "clients":
            message.clients[:] = numbers
            message.phases.add(phase="write", microseconds=[1] * len(numbers), nbytes=[1] * len(numbers))
        else:
            for _ in range(len(message.tensors)):
                message.meshes.add().mesh_dimensions.add(name="x", size=1 << draw.choice((20, 31, 62)))

    kind = draw.choice(("missing", "clients", "meshes"))
    return change


CHANGES = (_tree_bomb, _tree_bomb, _claims, _lists)


def _documents(root: Path, honest: Path, draw: random.Random) -> Path:
    shutil.copytree(honest / "zarr", root)
    (root / STEP / "w" / "zarr.json").write_bytes(_json_bomb(draw))
    return root / STEP


def _compressed(root: Path, honest: Path, draw: random.Random) -> Path:
    shutil.copytree(honest / "blosc", root)
    packed = numcodecs.blosc.compress(bytes(512 << 20), b"zstd", 9, 2)
    packed = draw.choice((packed, packed[:4] + struct.pack("<I", 0x7FF00000) + packed[8:]))
    put_value(root / STEP, "zarr", "w/c/0/0", packed)
    return root / STEP


def _database(root: Path, honest: Path, draw: random.Random) -> Path:
    shutil.copytree(honest / "ocdbt", root)
    packed = bytes(numcodecs.zstd.compress(bytes(512 << 20), 3))
    body = b"\x0c\xdb\x3a\x2a" + struct.pack("<Q", 14 + len(packed) + 4) + b"\0\1" + packed
    file = draw.choice(
        sorted(each for each in (root / STEP).rglob("*") if each.is_file() and each.name != MANIFEST_NAME)
    )
    file.write_bytes(body + bytes(4))
    return root / STEP


def _orbax(root: Path, honest: Path, draw: random.Random) -> Path:
    shutil.copytree(honest / "orbax zarr", root)
    folder = root / STEP
    metadata = json.loads((folder / "_METADATA").read_text())
    document = json.loads((folder / "np" / ".zarray").read_text())
    leaf = metadata["tree_metadata"]["('np',)"]
    count = draw.choice((100, 5000, 50_000))
    keys = [{"key": "a", "key_type": draw.choice((1, 2))}] * count
    packed = bytes(numcodecs.zstd.compress(bytes(512 << 20), 3))
    change = draw.randrange(6)
    if change == 0:
        (folder / draw.choice(("_METADATA", "_sharding", "_strings.json", "np/.zarray"))).write_bytes(_json_bomb(draw))
    elif change == 1:
        metadata["tree_metadata"] |= {str(each): leaf for each in range(count)}
    elif change == 2:
        metadata["tree_metadata"]["x"] = leaf | {
            "key_metadata": draw.choice((keys, [{"key": "9" * 18, "key_type": 1}]))
        }
    elif change == 3:
        document |= {"shape": [1 << 40, 1 << 10], "chunks": [1 << draw.choice((0, 24, 40)), 1 << 10]}
        metadata["store_array_data_equal_to_fill_value"] = draw.random() < 0.5
    elif change == 4:
        (folder / "np" / "0.0").write_bytes(packed)
    else:
        document |= {"shape": [1 << 24], "chunks": [1 << 24]}
        (folder / "np" / "0").write_bytes(packed)
    if change:
        (folder / "_METADATA").write_text(json.dumps(metadata))
        (folder / "np" / ".zarray").write_text(json.dumps(document))
    return folder


def _bundle(root: Path, honest: Path, draw: random.Random) -> Path:
    shutil.copytree(honest / "tensorflow", root)
    file = root / "ckpt.index"
    table = dict(read_table(file.read_bytes(), file.name))
    name = b"model/w/.ATTRIBUTES/VARIABLE_VALUE"
    entry = BundleEntry.parse(table[name])
    count = draw.choice((100, 5000, 50_000))
    sizes = {"shape": draw.choice(((1 << 62,), (1 << 20, 1 << 20), (1,) * count, (1 << 62, 0, 1 << 62)))}
    sizes["nbytes"] = draw.choice((0, 96, 1 << 42, 1 << 62))
    change = draw.randrange(4)
    if change == 0:
        table[name] = replace(entry, **sizes).to_bytes()
    elif change == 1:
        table |= {b"%06d" % each: table[name] for each in range(count)}
    elif change == 2:
        table |= {b"a" * 4000 + b"%06d" % each: b"" for each in range(min(count, 5000))}
    else:
        table[name] = replace(entry, dtype=7, **sizes).to_bytes()
    file.write_bytes(table_bytes(sorted(table.items())))
    return root / "ckpt"


def _root(root: Path, honest: Path, draw: random.Random) -> Path:
    shutil.copytree(honest / "root", root)
    data = _json_bomb(draw)
    name = draw.choice((f"{STEP}/{LINEAGE_NAME}", f"{STEP}/{METRICS_NAME}", STATUS_NAME, f"{RUNS_FOLDER}/1"))
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_bytes(b"%s\n%016x\n" % (data, bytes_digest(data)) if LINEAGE_NAME in name else data)
    return root / STEP


Bomb = Callable[[Path, Path, random.Random], Path]
BOMBS: tuple[Bomb, ...] = (
    *(_torch, _torch, _torch, _dcp, _dcp, _dcp, _safetensors, _safetensors, _index, _manifest, _manifest, _manifest),
    *(_deepspeed, _deepspeed, _deepspeed, _template, _trainer, _trainer),
    *(_documents, _compressed, _database, _root, _root, _orbax, _orbax, _bundle),
)
