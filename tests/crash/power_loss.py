"""A model of a file system under a power loss: synced changes survive, of the later ones any first part may.

A file's data is sure to be there after an fsync of the file, and a name after an fsync of its folder. Of what came
after the last fsync, any first part may be there: of each folder's changes, and of each file's writes, independently.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from .forked_clients import Operation

_EXCHANGE, _NO_REPLACE = 2, 1  # of renameat2
Choose = Callable[[int], int]
"""Says how many of so many unsynced changes of a file or folder survive."""


@dataclass(eq=False)
class File:
    """Data, as it is and as it was at the last fsync; what came since, as (offset, data), None for a truncation."""

    data: bytes = b""
    synced: bytes = b""
    pending: list[tuple[int, bytes] | None] = field(default_factory=list)

    def change(self, change: tuple[int, bytes] | None) -> None:
        self.data = _changed(self.data, change)
        self.pending.append(change)

    def sync(self) -> None:
        self.synced, self.pending = self.data, []

    def survivor(self, choose: Choose) -> bytes:
        survivors = self.synced
        for change in self.pending[: choose(len(self.pending))]:
            survivors = _changed(survivors, change)
        return survivors


def _changed(data: bytes, change: tuple[int, bytes] | None) -> bytes:
    if change is None:
        return b""
    offset, more = change
    return data[:offset].ljust(offset, b"\0") + more + data[offset + len(more) :]


@dataclass(eq=False)
class Folder:
    """Names, as they are and as they were at the last fsync; what came since, each change whole."""

    names: dict[str, Node] = field(default_factory=dict)
    synced: dict[str, Node] = field(default_factory=dict)
    pending: list[Mapping[str, Node | None]] = field(default_factory=list)

    def change(self, change: Mapping[str, Node | None]) -> None:
        self.names = _renamed(self.names, change)
        self.pending.append(change)

    def sync(self) -> None:
        self.synced, self.pending = self.names, []

    def survivors(self, choose: Choose) -> dict[str, Node]:
        survivors = self.synced
        for change in self.pending[: choose(len(self.pending))]:
            survivors = _renamed(survivors, change)
        return survivors


Node = File | Folder


def _renamed(names: Mapping[str, Node], change: Mapping[str, Node | None]) -> dict[str, Node]:
    return {name: node for name, node in {**names, **change}.items() if node is not None}


class Disk:
    """The model of a folder: first as the real one is, all of it synced, then as operations change it.

    Args:
        folder: The real folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = PurePosixPath(folder)
        self._root = _read(folder)

    def apply(self, operation: Operation) -> None:
        """Apply a system call; a call that cannot succeed changes nothing."""
        parents = [self._parent_of(path) for path in operation.paths]
        if None in parents:
            return  # the file was removed, or its folder is not there
        (folder, name), *others = (parent for parent in parents if parent is not None)
        node = folder.names.get(name) if name else folder
        match operation.call:
            case "openat":
                flags = operation.arguments[2]
                if node is None and flags & os.O_CREAT:
                    folder.change({name: File()})
                elif isinstance(node, File) and flags & os.O_TRUNC:
                    node.change(None)
            case "mkdir" | "mkdirat":
                if node is None:
                    folder.change({name: Folder()})
            case "write" | "writev" | "pwrite64":
                if isinstance(node, File):
                    node.change((operation.offset, operation.data))
            case "fsync" | "fdatasync":
                if node is not None:
                    node.sync()
            case "link" | "linkat":
                if isinstance(node, File) and others[0][1] not in others[0][0].names:
                    others[0][0].change({others[0][1]: node})
            case "unlink" | "unlinkat" | "rmdir":
                if isinstance(node, File) or (isinstance(node, Folder) and not node.names):
                    folder.change({name: None})
            case "rename" | "renameat" | "renameat2":
                flags = operation.arguments[4] if operation.call == "renameat2" else 0
                if node is not None:
                    _rename(folder, name, node, *others[0], flags)
            case call:
                raise AssertionError(f"a save made a system call that the model of a disk does not know: {call}")

    def _parent_of(self, path: str) -> tuple[Folder, str] | None:
        """Return the folder that a path's last part is in, and that part."""
        folder: Node | None = self._root
        *parts, name = PurePosixPath(path).relative_to(self._folder).parts or ("",)
        for part in parts:
            folder = folder.names.get(part) if isinstance(folder, Folder) else None
        return (folder, name) if isinstance(folder, Folder) else None

    def survivors(self, choose: Choose) -> dict[str, bytes | None]:
        """Return a tree that a power loss may leave: by path, the data of a file, or None for a folder."""
        return dict(_walk("", self._root, choose))


def _rename(source: Folder, name: str, node: Node, target: Folder, new_name: str, flags: int) -> None:
    replaced = target.names.get(new_name)
    if (flags == _EXCHANGE and replaced is None) or (flags == _NO_REPLACE and replaced is not None):
        return
    left = replaced if flags == _EXCHANGE else None
    if source is target:
        source.change({name: left, new_name: node})
    else:
        target.change({new_name: node})
        source.change({name: left})


def _read(folder: Path) -> Folder:
    names: dict[str, Node] = {}
    for entry in sorted(folder.iterdir()):
        data = b"" if entry.is_dir() else entry.read_bytes()
        names[entry.name] = _read(entry) if entry.is_dir() else File(data, data)
    return Folder(names, names)


def _walk(prefix: str, folder: Folder, choose: Choose) -> Sequence[tuple[str, bytes | None]]:
    entries: list[tuple[str, bytes | None]] = []
    for name, node in sorted(folder.survivors(choose).items()):
        if isinstance(node, File):
            entries.append((prefix + name, node.survivor(choose)))
        else:
            entries += [(prefix + name, None), *_walk(f"{prefix}{name}/", node, choose)]
    return entries


def write_tree(tree: Mapping[str, bytes | None], folder: Path) -> None:
    """Write a tree that `Disk.survivors` returned to an empty folder."""
    for path, data in tree.items():
        if data is None:
            (folder / path).mkdir()
        else:
            (folder / path).write_bytes(data)
