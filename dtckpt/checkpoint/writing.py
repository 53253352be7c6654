"""One client's side of writing a planned checkpoint, and the leader's side of finishing it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dtckpt._proto import checkpoint_pb2
from dtckpt.checkpoint.digesting import TensorDigests, digesting
from dtckpt.checkpoint.reader import convert
from dtckpt.errors import CheckpointCorruptError, ReplicaMismatchError, StorageError, capped
from dtckpt.format.content import content_digest
from dtckpt.format.digest import Blocks, as_bytes, bytes_digest, digest_chunk, documents_digest
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.manifest import BLOCKS_NAME, MANIFEST_NAME, ArrayEntry, Manifest
from dtckpt.planning.save_plan import NO_CLIENT, SavePlan, TensorPlan
from dtckpt.region import Region
from dtckpt.storage import directory
from dtckpt.storage.arrays import (
    DATABASE_NAME,
    ArrayWriter,
    array_metadata,
    client_folder,
    documents,
    merge,
    stored_empty,
)
from dtckpt.storage.failures import translated


class Source(Protocol):
    """Where the elements of this client's part of the state come from."""

    def fetch(self, plan: TensorPlan, region: Region) -> np.ndarray[Any, Any]:
        """Return the elements of a region that this client holds, in the tensor's dtype."""
        ...

    def copies(self, plan: TensorPlan, region: Region) -> Sequence[np.ndarray[Any, Any]]:
        """Return all of this client's copies of one of its boxes."""
        ...


CHUNKS_NAME = "chunks.pb"
_DIGEST_NBYTES = 8


class ClientWriter:
    """What one client writes of one attempt.

    Args:
        plan: The global plan.
        root: The directory under construction.
        client: This client.
        source: Where the elements come from.
        kvstore: Key-value store.
        is_durable: Whether to fsync.
        max_pending_nbytes: Bound on the elements that wait to be written; default none.
    """

    def __init__(
        self,
        plan: SavePlan,
        root: Path,
        client: int,
        source: Source,
        *,
        kvstore: str,
        is_durable: bool,
        max_pending_nbytes: int | None = None,
    ) -> None:
        self._plan = plan
        self._root = root
        self._client = client
        self._source = source
        self._kvstore = kvstore
        self._is_durable = is_durable
        self._max_pending_nbytes = max_pending_nbytes
        self._folder = root / client_folder(client)

    def _open_folder(self) -> None:
        with translated("create the client's folder", self._folder):
            if not self._root.is_dir():
                raise StorageError(
                    f"client {self._client} does not see {self._root}, which the leader made; every client must see "
                    "one shared file system"
                )
            self._folder.mkdir(exist_ok=True)

    def hand_over(self) -> None:
        """Write the pieces of chunks that other clients own, one file per owner, in the plan's order."""
        self._open_folder()
        owners = {int(plan.owners[number]) for plan in self._plan.tensors for number in plan.pieces}
        for owner in sorted(owners - {self._client}):
            pieces = [
                as_bytes(self._stored(self._plan.tensors[position], region)).tobytes()
                for position, _, region in self._plan.moves(self._client, owner)
            ]
            if pieces:
                data = b"".join(pieces)
                digest = bytes_digest(data).to_bytes(_DIGEST_NBYTES, "big")
                directory.write_file(self._folder / _edges_name(owner), data + digest, is_durable=False)

    def write(self, *, check_replicas: bool, content_digest: bool) -> tuple[bytes, int]:
        """Write this client's chunks and its chunk list.

        Args:
            check_replicas: Compare this client's copies, and note digests of those that others have too.
            content_digest: Add up the content of the tensors.

        Returns:
            Digest of the chunk list's file, and the bytes of the chunks.
        """
        self._open_folder()
        received = self._receive()
        writer = ArrayWriter(
            self._kvstore,
            self._root,
            self._client,
            is_durable=self._is_durable,
            max_pending_nbytes=self._max_pending_nbytes,
        )
        nbytes = 0
        try:
            # Where memory is bounded, elements are gone as soon as they are written.
            with digesting(beside=self._max_pending_nbytes is None, with_content=content_digest) as digests:
                for position, plan in enumerate(self._plan.tensors):
                    for number in plan.owned_by(self._client):
                        region = plan.grid.region(plan.grid.index(number))
                        if number in plan.pieces:
                            elements = self._assemble(position, plan, number, region, received)
                        else:
                            elements = self._stored(plan, region)
                        writer.write(plan.path, plan.grid, plan.spec.stored_dtype, region, elements)
                        digests.add(position, plan, number, elements)
                        nbytes += elements.nbytes
                # Copies are compared while storage is waited for, too.
                copies = digests.then(lambda: list(self._copy_digests(digests.results()))) if check_replicas else list
                writer.commit()
                found, compared = digests.results(), copies()
        except BaseException:
            writer.abort()
            raise
        message = checkpoint_pb2.ClientChunks(client=self._client)
        for position, result in found.items():
            numbers, values = list(result.chunks), list(result.chunks.values())
            part = message.tensors.add(tensor=position, chunks=numbers, digests=values)
            if content_digest:
                part.content = result.content
        if any(result.blocks for result in found.values()):
            data = np.array([digest for result in found.values() for digest in result.blocks], "<u8").tobytes()
            directory.write_file(self._folder / BLOCKS_NAME, data, is_durable=self._is_durable)
        message.copies.extend(compared)
        data = message.SerializeToString(deterministic=True)
        directory.write_file(self._folder / CHUNKS_NAME, data, is_durable=False)
        return bytes_digest(data).to_bytes(_DIGEST_NBYTES, "big"), nbytes

    def _copy_digests(self, written: Mapping[int, TensorDigests]) -> Iterator[checkpoint_pb2.CopyDigest]:
        for position, plan in enumerate(self._plan.tensors):
            # A chunk that was written as it lies in memory need not be digested again.
            is_same = plan.spec.stored_dtype == plan.spec.dtype and position in written
            known = written[position].chunks if is_same else {}
            for box, holding in enumerate(plan.spec.holdings):
                if self._client not in holding.clients:
                    continue
                copies = self._source.copies(plan, holding.region)
                if len(copies) == len(holding.clients) == 1:
                    continue
                digests = [
                    _copy_digest(plan, holding.region, copy, {} if number else known)
                    for number, copy in enumerate(copies)
                ]
                if len(set(digests)) > 1:
                    raise ReplicaMismatchError(
                        f"copies of {holding.region} of tensor {plan.spec.name!r} differ between the devices of client "
                        f"{self._client}"
                    )
                if len(holding.clients) > 1:
                    yield checkpoint_pb2.CopyDigest(tensor=position, box=box, digest=digests[0])

    def _stored(self, plan: TensorPlan, region: Region) -> np.ndarray[Any, Any]:
        """Return the elements of a region in the stored dtype."""
        elements = self._source.fetch(plan, region)
        if elements.dtype == DTYPES[plan.spec.stored_dtype]:
            return elements
        stored = stored_empty(plan.spec.stored_dtype, region.shape)
        convert(elements, stored)
        return stored

    def _receive(self) -> dict[tuple[int, int, Region], np.ndarray[Any, Any]]:
        """Read the pieces that other clients handed over: by tensor, chunk and region."""
        received: dict[tuple[int, int, Region], np.ndarray[Any, Any]] = {}
        givers = {piece.client for plan in self._plan.tensors for parts in plan.pieces.values() for piece in parts}
        for giver in sorted(givers - {self._client}):
            moves = list(self._plan.moves(giver, self._client))
            if not moves:
                continue
            file = self._root / client_folder(giver) / _edges_name(self._client)
            with translated("read the pieces of another client", file):
                data = file.read_bytes()
            body = memoryview(data)[:-_DIGEST_NBYTES]
            if bytes_digest(body) != int.from_bytes(data[-_DIGEST_NBYTES:], "big"):
                raise CheckpointCorruptError(f"pieces from client {giver} in {file} are damaged; save again")
            start = 0
            for position, number, region in moves:
                dtype = DTYPES[self._plan.tensors[position].spec.stored_dtype]
                elements = np.frombuffer(body, dtype, region.numel, start).reshape(region.shape)
                received[position, number, region] = elements
                start += elements.nbytes
        return received

    def _assemble(
        self,
        position: int,
        plan: TensorPlan,
        number: int,
        chunk: Region,
        received: Mapping[tuple[int, int, Region], np.ndarray[Any, Any]],
    ) -> np.ndarray[Any, Any]:
        whole = stored_empty(plan.spec.stored_dtype, chunk.shape)
        for piece in plan.pieces[number]:
            is_mine = piece.client == self._client
            source = self._stored(plan, piece.region) if is_mine else received[position, number, piece.region]
            whole[piece.region.relative_to(chunk).slices()] = source
        return whole


def _copy_digest(plan: TensorPlan, box: Region, copy: np.ndarray[Any, Any], known: Mapping[int, int]) -> int:
    """Return the digest of a copy of a box, made of those of its parts of the chunks; some chunks' are known."""
    cut = Blocks.of(plan.grid, copy.itemsize)
    digests: list[int] = []
    for index in plan.grid.meeting(box):
        number, part = plan.grid.number(index), plan.grid.region(index).intersect(box)
        if number in known and number not in plan.pieces:
            digests.append(known[number])
        elif part is not None:
            elements = copy[part.relative_to(box).slices()] if box.ndim else copy
            digests.append(digest_chunk(plan.spec.name, index, elements, cut)[0])
    return bytes_digest(np.array(digests, np.uint64).data)


def _edges_name(owner: int) -> str:
    return f"edges_{owner}"


def merge_clients(
    plan: SavePlan,
    root: Path,
    payloads: Mapping[int, bytes],
    manifest: Manifest,
    *,
    is_durable: bool,
) -> Manifest:
    """Make what the clients wrote one checkpoint, up to and with its manifest. Called by the leader.

    Args:
        plan: The global plan.
        root: The directory under construction.
        payloads: Digest of every client's chunk list.
        manifest: The manifest without its arrays.
        is_durable: Whether to fsync.

    Returns:
        The complete manifest, as written.
    """
    digests = [np.zeros(item.grid.num_chunks, np.uint64) for item in plan.tensors]
    writers = [np.full(item.grid.num_chunks, NO_CLIENT, np.int32) for item in plan.tensors]
    has_content = True
    contents = [0] * len(plan.tensors)
    copies: dict[tuple[int, int], dict[int, list[int]]] = {}
    for client, expected in sorted(payloads.items()):
        chunk_list = _chunk_list(root / client_folder(client), client, expected)
        for part in chunk_list.tensors:
            digests[part.tensor][list(part.chunks)] = np.array(part.digests, np.uint64)
            writers[part.tensor][list(part.chunks)] = client
            has_content &= part.HasField("content")
            contents[part.tensor] = (contents[part.tensor] + part.content) % 2**64
        for copy in chunk_list.copies:
            copies.setdefault((copy.tensor, copy.box), {}).setdefault(copy.digest, []).append(client)
    _validate_copies(plan, copies)
    entries: dict[str, ArrayEntry] = {}
    for item, item_digests, item_writers, total in zip(plan.tensors, digests, writers, contents, strict=True):
        if not np.array_equal(item_writers, item.owners):
            raise CheckpointCorruptError(
                f"chunks of tensor {item.spec.name!r} were not written as planned; nothing was committed, save again"
            )
        content = content_digest(total, item.grid.shape, item.spec.stored_dtype) if has_content else None
        if content is not None and item.spec.content not in (None, content):
            raise CheckpointCorruptError(
                f"tensor {item.spec.name!r} would not hold what it held before; got content {content:016x}, expected "
                f"{item.spec.content:016x}; nothing was committed"
            )
        entries[item.spec.name] = ArrayEntry(
            name=item.spec.name,
            path=item.path,
            dtype=item.spec.dtype,
            stored_dtype=item.spec.stored_dtype,
            grid=item.grid,
            digests=item_digests,
            writers=item_writers,
            layout=item.spec.layout,
            missing=frozenset(item.missing),
            content=content,
        )
    clients = sorted({client for item in plan.tensors for client in np.unique(item.owners).tolist()} - {NO_CLIENT})
    metadata = documents(
        {entry.path: array_metadata(entry.grid, entry.stored_dtype, _attributes(entry)) for entry in entries.values()}
    )
    complete = manifest.with_arrays(entries, documents_digest(metadata))
    merge(manifest.kvstore, root, clients, metadata, is_durable=is_durable)
    _clean(root, sorted(payloads))
    directory.write_file(root / MANIFEST_NAME, complete.to_bytes(), is_durable=is_durable)
    return complete


def _validate_copies(plan: SavePlan, copies: Mapping[tuple[int, int], Mapping[int, Sequence[int]]]) -> None:
    for (position, box), by_digest in sorted(copies.items()):
        if len(by_digest) > 1:
            spec = plan.tensors[position].spec
            sides = " differs from ".join(f"that of clients {capped(clients)}" for clients in by_digest.values())
            raise ReplicaMismatchError(
                f"copies of {spec.holdings[box].region} of tensor {spec.name!r} must be equal: {sides}; "
                "nothing was committed"
            )


def _chunk_list(folder: Path, client: int, expected: bytes) -> checkpoint_pb2.ClientChunks:
    with translated(f"read the chunk list of client {client}", folder):
        data = (folder / CHUNKS_NAME).read_bytes()
    if bytes_digest(data).to_bytes(_DIGEST_NBYTES, "big") != expected:
        raise CheckpointCorruptError(
            f"the chunk list of client {client} is not the one that it announced; nothing was committed, save again"
        )
    return checkpoint_pb2.ClientChunks.FromString(data)


def _clean(root: Path, clients: Sequence[int]) -> None:
    """Remove what clients left for each other; it is no part of the checkpoint."""
    with translated("remove working files", root):
        for client in clients:
            folder = root / client_folder(client)
            (folder / CHUNKS_NAME).unlink()
            # The merged database refers to the client's data, not to the way to it.
            (folder / DATABASE_NAME).unlink(missing_ok=True)
            for file in folder.glob("edges_*"):
                file.unlink()
            if not any(folder.iterdir()):
                folder.rmdir()


def _attributes(entry: ArrayEntry) -> dict[str, Any]:
    """Return what an array's ``zarr.json`` says beyond Zarr: the name, the dtype, the layout."""
    facts: dict[str, Any] = {"name": entry.name, "dtype": entry.dtype}
    if entry.layout is not None:
        facts["mesh"] = {"name": entry.layout.mesh.name, "axes": dict(entry.layout.mesh.axis_sizes)}
        facts["sharding_specs"] = [
            list(spec) if isinstance(spec, tuple) else spec for spec in entry.layout.sharding_specs
        ]
    return {"dtckpt": facts}
