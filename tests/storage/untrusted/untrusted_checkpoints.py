"""Helpers for checkpoints that an attacker made: change them as he could, and read them in every way."""

from __future__ import annotations

import math
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorstore as ts
import torch

import dtckpt
from dtckpt import Region, SaveOptions
from dtckpt._proto import checkpoint_pb2
from dtckpt.errors import CheckpointCorruptError
from dtckpt.format.digest import bytes_digest
from dtckpt.format.manifest import MANIFEST_NAME
from dtckpt.storage.tensorstore_setup import open_context

PATIENCE_S = 20
"""Nothing here takes a second: a read that takes as long as this hangs."""
ELEMENTS = torch.arange(2000, dtype=torch.float32)
TB = 1 << 40


def ways_to_read(path: Path) -> dict[str, Callable[[], Any]]:
    """Return every way to read a checkpoint, by name."""

    def opened(work: Callable[[Any], Any]) -> Any:
        with dtckpt.open_checkpoint(path) as checkpoint:
            return work(checkpoint)

    def verified() -> None:
        report = opened(lambda checkpoint: checkpoint.verify())
        if not report.is_sound:
            raise CheckpointCorruptError(report.damages[0].reason)

    return {
        "restore": lambda: dtckpt.restore(path),
        "into a target": lambda: dtckpt.restore(
            path, {"w": torch.zeros(300_000), "small": torch.zeros(2000), "tiny": torch.zeros(3), "step": 0}
        ),
        "read": lambda: opened(lambda checkpoint: [checkpoint.read(name) for name in checkpoint.tensors]),
        "rows": lambda: opened(lambda checkpoint: checkpoint.read("w", Region((100_000,), (10,)))),
        "verify": verified,
        "reshard": lambda: dtckpt.reshard(
            path, path.with_name("other"), mesh=dtckpt.abstract_mesh({"x": 2}), options=SaveOptions(overwrite=True)
        ),
    }


def error_of(work: Callable[[], Any]) -> BaseException | None:
    """Return the error that some work raises, if any; fail if the work does not end."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), "it hangs"
    return errors[0] if errors else None


def assert_damaged(work: Callable[[], Any]) -> None:
    """Assert that a read tells damage: it neither succeeds, nor fails in another way, nor hangs."""
    error = error_of(work)
    assert type(error) is CheckpointCorruptError, repr(error)


@contextmanager
def limit_memory(nbytes: int) -> Iterator[None]:
    """Limit the memory of this process, in a context, to what it has now and ``nbytes`` more."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def change_manifest(path: Path, change: Callable[[Any], Any]) -> None:
    """Change the message of a checkpoint's manifest, and its digest with it."""
    file = path / MANIFEST_NAME
    envelope = checkpoint_pb2.ManifestFile.FromString(file.read_bytes())
    message = checkpoint_pb2.Manifest.FromString(envelope.manifest)
    change(message)
    envelope.manifest = message.SerializeToString()
    envelope.digest = bytes_digest(envelope.manifest)
    file.write_bytes(envelope.SerializeToString())


def entry_of(message: Any, name: str) -> Any:
    """Return the message of one tensor of a manifest."""
    return next(tensor for tensor in message.tensors if tensor.name == name)


def resize_tensor(name: str, shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> Callable[[Any], None]:
    """Return the change that gives a tensor another shape, and digests for all its chunks if those are few."""

    def change(message: Any) -> None:
        tensor = entry_of(message, name)
        count = math.prod(-(-size // max(1, chunk)) for size, chunk in zip(shape, chunk_shape, strict=True))
        tensor.shape[:], tensor.chunk_shape[:] = shape, chunk_shape
        tensor.ClearField("layout")
        if 0 <= count <= 1 << 20:
            tensor.digests[:] = tensor.identities[:] = [1] * count
            del tensor.writers[:]
            tensor.writers.add(client=0, count=count)

    return change


def put_value(path: Path, kvstore: str, key: str, value: bytes) -> None:
    """Write a value to the key-value store of a checkpoint."""
    driver = {"driver": "ocdbt", "base": f"file://{path}/"} if kvstore == "ocdbt" else f"file://{path}/"
    ts.KvStore.open(driver, context=open_context()).result()[key] = value
