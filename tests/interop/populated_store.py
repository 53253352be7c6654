"""`PopulatedStore`: a checkpoint's store that tests fill with any keys and values, as zarr-python's store tests do.

A checkpoint decides its own keys. So each value is saved as a tensor of bytes in a real checkpoint, in one chunk, and
the key that the test chose stands for the key of that chunk::

    "foo/c/0.0": b"\\1\\2"   ->   tensor "666f6f2f632f302e30" of two bytes   ->   "666f6f2f632f302e30/c/0"
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from zarr.core.buffer import Buffer

import dtckpt
from dtckpt import SaveOptions
from dtckpt.format.zarr_documents import ArrayChunk, ZarrHierarchy
from dtckpt.interop import CheckpointStore


class PopulatedStore(CheckpointStore):
    """A store whose writes save its checkpoint anew; reads are as in every store."""

    def __init__(self, path: Any, *, read_only: bool = True) -> None:
        super().__init__(path, read_only=read_only)
        self._hierarchy: Any = _RenamedKeys(self._hierarchy)

    def put(self, values: Mapping[str, bytes]) -> None:
        """Add values to the checkpoint, by key."""
        path, kvstore = self.checkpoint.path, self.checkpoint.manifest.kvstore
        tree = dtckpt.restore(path)
        tree |= {
            _name_of(key): torch.from_numpy(np.frombuffer(value, np.uint8).copy()) for key, value in values.items()
        }
        dtckpt.save(path, tree, options=SaveOptions(kvstore=kvstore, overwrite=True, fsync=False))
        self.__init__(path)  # type: ignore[misc]  # opens the new checkpoint

    async def set(self, key: str, value: Buffer) -> None:  # type: ignore[override]
        self.put({key: value.to_bytes()})

    async def _set_many(self, values: Iterable[tuple[str, Buffer]]) -> None:
        self.put({key: value.to_bytes() for key, value in values})


class _RenamedKeys:
    def __init__(self, hierarchy: ZarrHierarchy) -> None:
        self._hierarchy = hierarchy

    def find(self, key: str) -> bytes | ArrayChunk | None:
        name = _name_of(key)
        if (chunk := self._hierarchy.find(f"{name}/c/0")) is not None:
            return chunk
        # An empty tensor has no chunk.
        return None if self._hierarchy.find(f"{name}/zarr.json") is None else b""

    def list_keys(self, prefix: str = "") -> Iterator[str]:
        for name in self._hierarchy.list_names(""):
            if name != "zarr.json" and (key := bytes.fromhex(name).decode()).startswith(prefix):
                yield key

    def list_names(self, folder: str) -> Iterable[str]:
        below = f"{folder.rstrip('/')}/" if folder else ""
        return dict.fromkeys(key[len(below) :].partition("/")[0] for key in self.list_keys(below))


def _name_of(key: str) -> str:
    return key.encode().hex()
