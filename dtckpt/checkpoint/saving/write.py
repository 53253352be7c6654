"""One client's side of writing a planned checkpoint, and the leader's side of finishing it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

import numpy as np

from dtckpt._proto import checkpoint_pb2
from dtckpt.checkpoint.gc_pause import uncollected
from dtckpt.checkpoint.reading.read_chunks import convert
from dtckpt.checkpoint.saving.digests import Digesting, TensorDigests, digesting
from dtckpt.checkpoint.saving.plan import KEPT_STRUCTURES, NO_CLIENT, SavePlan, TensorPlan
from dtckpt.checkpoint.saving.replica_check import Copy, copy_digests
from dtckpt.errors import CheckpointCorruptError, ReplicaMismatchError, capped
from dtckpt.format.content import content_digest
from dtckpt.format.digest import as_bytes, bytes_digest, documents_digest
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.grid import ChunkGrid
from dtckpt.format.manifest import BLOCKS_NAME, MANIFEST_NAME, ArrayEntry, ArrayKind, Manifest
from dtckpt.layout.layout import Layout
from dtckpt.layout.region import Region
from dtckpt.storage.commit import CommitAttempt
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.folder import Folder
from dtckpt.storage.zarr_files import ChunkFileWriter, open_writer
from dtckpt.storage.zarr_tensorstore import (
    DATABASE_NAME,
    TensorStoreWriter,
    allocate_elements,
    array_metadata,
    client_folder,
    documents,
    key_of,
    merge,
    sync_merged,
)


class Source(Protocol):
    """Where the elements of this client's part of the state come from."""

    def fetch(self, plan: TensorPlan, region: Region) -> np.ndarray[Any, Any]:
        """Return the elements of a region that this client holds, in the tensor's dtype."""
        ...

    def copies(self, plan: TensorPlan, region: Region) -> Sequence[Copy]:
        """Return all of this client's copies of one of its boxes; the first is the one that is fetched."""
        ...


CHUNKS_NAME = "chunks.pb"
PENDING_NBYTES = 192 << 20
"""Elements made for a save (rounded, compressed, put together, copied) that may wait to be written."""
UNCOLLECTED_NBYTES = 64 << 20
UNCOLLECTED_S = 1.0
"""The cycle collector waits until so much is on its way: it would cost as much as the writing of many small chunks."""
_DIGEST_NBYTES = 8
_Pieces = dict[tuple[int, int, Region], np.ndarray[Any, Any]]
"""What other clients handed over: by tensor, chunk and region."""


class ClientWriter:
    """What one client writes of one attempt.

    Args:
        plan: The global plan.
        attempt: What it writes for.
        client: This client.
        clients: All that write, in the same order everywhere.
        source: Where the elements come from.
        kvstore: Key-value store.
        is_durable: Whether to fsync.
        max_pending_nbytes: Bound on the elements that wait to be written; default: on those that are not the source's.
        count: Told the bytes of what was handed to storage.
    """

    def __init__(
        self,
        plan: SavePlan,
        attempt: CommitAttempt,
        client: int,
        clients: Sequence[int],
        source: Source,
        *,
        kvstore: str,
        is_durable: bool,
        max_pending_nbytes: int | None = None,
        count: Callable[[int], object],
    ) -> None:
        self._plan = plan
        self._attempt = attempt
        self._root = attempt.folder
        self._client = client
        self._clients = clients
        self._source = source
        self._kvstore = kvstore
        self._is_durable = is_durable
        self._max_pending_nbytes = max_pending_nbytes
        self._count = count
        self._folder = attempt.folder / client_folder(client)

    def _open_folder(self) -> None:
        with translate_errors("create the client's folder", self._folder):
            self._attempt.validate(self._client)
            self._folder.make()

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
                self._put(_edges_name(owner), data + digest)
                self._count(len(data))

    def _put(self, name: str, data: bytes) -> None:
        with translate_errors(f"write {name}", self._folder):
            self._folder.write(name, data)

    def write(self, *, check_replicas: bool, content_digest: bool) -> int:
        """Write this client's chunks, its share of the metadata, and its chunk list.

        Args:
            check_replicas: Compare this client's copies, and note digests of those that others have too.
            content_digest: Say what the tensors hold.

        Returns:
            Digest of the chunk list's file.
        """
        self._open_folder()
        received = self._receive()
        writer = open_writer(
            self._kvstore,
            self._root,
            self._client,
            is_durable=self._is_durable,
            max_pending_nbytes=self._max_pending_nbytes or PENDING_NBYTES,
        )
        is_bounded = self._max_pending_nbytes is not None
        try:
            # Where memory is bounded, elements are gone as soon as they are written.
            with digesting(beside=not is_bounded, with_content=content_digest) as digests:
                self._start_writes(writer, digests, received)
                # Copies are compared while storage is waited for, too.
                copies = digests.then(lambda: self._copy_digests(digests.results())) if check_replicas else list
                writer.commit()
                found, compared = digests.results(), copies()
        except BaseException:
            writer.abort()
            raise
        message = checkpoint_pb2.ClientChunks(
            client=self._client,
            plan=self._plan.topic,
            copies=compared,
            digests=[digest for result in found.values() for digest in result.chunks.values()],
            contents=[result.content for result in found.values()] if content_digest else [],
        )
        if any(result.blocks for result in found.values()):
            data = np.array([digest for result in found.values() for digest in result.blocks], "<u8").tobytes()
            self._put(BLOCKS_NAME, data)
            if self._is_durable:
                with translate_errors(f"sync {BLOCKS_NAME}", self._folder):
                    self._folder.sync([BLOCKS_NAME])
        data = message.SerializeToString(deterministic=True)
        self._put(CHUNKS_NAME, data)
        return bytes_digest(data)

    def _start_writes(self, writer: TensorStoreWriter | ChunkFileWriter, digests: Digesting, received: _Pieces) -> None:
        is_bounded = self._max_pending_nbytes is not None
        nbytes, start = 0, time.monotonic()
        with ExitStack() as stretch:
            stretch.enter_context(uncollected())
            place, count = self._clients.index(self._client), len(self._clients)
            for key, document in _documents_of(self._plan, place, count):
                writer.write_document(key, document)
            for position, plan, number in self._plan.owned_by(self._client):
                _, region = plan.grid.chunk(number)
                if number in plan.pieces:
                    elements = self._assemble(position, plan, number, region, received)
                else:
                    elements = self._stored(plan, region)
                is_kept = not is_bounded and not elements.flags.owndata
                writer.write(plan, region, elements, is_kept=is_kept)
                digests.add(position, plan, number, elements, is_kept=is_kept)
                self._count(elements.nbytes)
                nbytes += elements.nbytes
                if nbytes > UNCOLLECTED_NBYTES or time.monotonic() - start > UNCOLLECTED_S:
                    stretch.close()

    def _copy_digests(self, written: Mapping[int, TensorDigests]) -> list[checkpoint_pb2.CopyDigest]:
        return list(copy_digests(self._plan, self._client, self._source.copies, written))

    def _stored(self, plan: TensorPlan, region: Region) -> np.ndarray[Any, Any]:
        """Return the elements of a region in the stored dtype."""
        elements = self._source.fetch(plan, region)
        if elements.dtype == DTYPES[plan.spec.stored_dtype]:
            return elements
        stored = allocate_elements(plan.spec.stored_dtype, region.shape)
        convert(elements, stored)
        return stored

    def _receive(self) -> _Pieces:
        """Read the pieces that other clients handed over: by tensor, chunk and region."""
        received: _Pieces = {}
        givers = {piece.client for plan in self._plan.tensors for parts in plan.pieces.values() for piece in parts}
        for giver in sorted(givers - {self._client}):
            moves = list(self._plan.moves(giver, self._client))
            if not moves:
                continue
            folder = self._root / client_folder(giver)
            with translate_errors("read the pieces of another client", folder):
                data = folder.read(_edges_name(self._client))
            body = memoryview(data)[:-_DIGEST_NBYTES]
            if bytes_digest(body) != int.from_bytes(data[-_DIGEST_NBYTES:], "big"):
                raise CheckpointCorruptError(f"pieces from client {giver} in {folder} are damaged; save again")
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
        received: _Pieces,
    ) -> np.ndarray[Any, Any]:
        whole = allocate_elements(plan.spec.stored_dtype, chunk.shape)
        for piece in plan.pieces[number]:
            is_mine = piece.client == self._client
            source = self._stored(plan, piece.region) if is_mine else received[position, number, piece.region]
            whole[piece.region.relative_to(chunk).slices()] = source
        return whole


def _edges_name(owner: int) -> str:
    return f"edges_{owner}"


def merge_clients(
    plan: SavePlan,
    root: Folder,
    announced: Mapping[int, int],
    manifest: Manifest,
    *,
    is_durable: bool,
) -> Manifest:
    """Make what the clients wrote one checkpoint, up to and with its manifest. Called by the leader.

    Args:
        plan: The global plan.
        root: The folder under construction.
        announced: Digest of every client's chunk list.
        manifest: The manifest without its arrays.
        is_durable: Whether to fsync.

    Returns:
        The complete manifest, as written.
    """
    with uncollected():
        entries = {entry.name: entry for entry in _entries(plan, root, announced)}
        complete = manifest.with_arrays(entries, _documents(plan)[1])
    merge(manifest.kvstore, root, _last_written(plan, sorted(announced)))
    with translate_errors("write the manifest", root):
        root.write(MANIFEST_NAME, complete.to_bytes())
    if is_durable:
        sync_merged(manifest.kvstore, root)
    return complete


def _last_written(plan: SavePlan, clients: Sequence[int]) -> dict[int, str]:
    """Return the key of what each client that writes anything writes last."""
    found: dict[int, str] = {}
    for number, client in enumerate(clients):
        for key, _ in _documents_of(plan, number, len(clients))[-1:]:
            found[client] = key
        place = plan.places_of(client)[-1:]
        for position in plan.tensors_at(place).tolist():
            tensor = plan.tensors[position]
            found[client] = key_of(tensor.path, tensor.grid.index(int(place[0] - plan.starts[position])))
    return found


def _entries(plan: SavePlan, root: Folder, announced: Mapping[int, int]) -> Iterator[ArrayEntry]:
    """Yield the manifest's entry of every tensor, from the plan and the clients' chunk lists."""
    owners = set(np.unique(plan.owners).tolist())
    if absent := sorted(owners - {NO_CLIENT} - set(announced)):
        raise CheckpointCorruptError(f"clients {capped(absent)} wrote nothing; nothing was committed, save again")
    digests = np.zeros(plan.owners.size, np.uint64)
    contents = np.zeros(len(plan.tensors), np.uint64)
    has_content = True
    copies: dict[tuple[int, int], dict[int, list[int]]] = {}
    for client, expected in sorted(announced.items()):
        chunk_list = _chunk_list(root / client_folder(client), client, expected)
        places = plan.places_of(client)
        tensors = np.unique(plan.tensors_at(places))
        if chunk_list.plan != plan.topic or len(chunk_list.digests) != places.size:
            raise CheckpointCorruptError(f"client {client} did not write as planned; nothing was committed, save again")
        digests[places] = np.array(chunk_list.digests, np.uint64)
        if len(chunk_list.contents) == tensors.size:
            contents[tensors] ^= np.array(chunk_list.contents, np.uint64)
        else:
            has_content = False
        for copy in chunk_list.copies:
            copies.setdefault((copy.tensor, copy.box), {}).setdefault(copy.digest, []).append(client)
    _validate_copies(plan, copies)
    kinds: dict[tuple[Any, ...], ArrayKind] = {}
    for item, chunks, share in zip(plan.tensors, pairwise(plan.starts.tolist()), contents.tolist(), strict=True):
        itemsize = DTYPES[item.spec.stored_dtype].itemsize
        content = content_digest(share, item.grid.shape, itemsize) if has_content else None
        if content is not None and item.spec.content not in (None, content):
            raise CheckpointCorruptError(
                f"tensor {item.spec.name!r} would not hold what it held before; got content {content:016x}, expected "
                f"{item.spec.content:016x}; nothing was committed"
            )
        missing = frozenset(item.missing if NO_CLIENT in owners else ())
        spec = item.spec
        facts = spec.dtype, spec.stored_dtype, item.grid, item.owners.tobytes(), spec.layout, missing, spec.codec
        kind = kinds.get(facts)
        if kind is None:
            kind = kinds[facts] = ArrayKind(*facts[:3], item.owners, *facts[4:])
        yield ArrayEntry(spec.name, item.path, kind, digests[slice(*chunks)], content)


def _validate_copies(plan: SavePlan, copies: Mapping[tuple[int, int], Mapping[int, Sequence[int]]]) -> None:
    for (position, box), by_digest in sorted(copies.items()):
        if len(by_digest) > 1:
            spec = plan.tensors[position].spec
            sides = " differs from ".join(f"that of clients {capped(clients)}" for clients in by_digest.values())
            raise ReplicaMismatchError(
                f"copies of {spec.holdings[box].region} of tensor {spec.name!r} must be equal: {sides}; "
                "nothing was committed"
            )


def _chunk_list(folder: Folder, client: int, expected: int) -> checkpoint_pb2.ClientChunks:
    with translate_errors(f"read the chunk list of client {client}", folder):
        data = folder.read(CHUNKS_NAME)
    if bytes_digest(data) != expected:
        raise CheckpointCorruptError(
            f"the chunk list of client {client} is not the one that it announced; nothing was committed, save again"
        )
    return checkpoint_pb2.ClientChunks.FromString(data)


def remove_working_files(root: Folder, clients: Sequence[int], *, has_moves: bool) -> None:
    """Remove what clients left for each other, when it is merged: it is no part of the checkpoint."""
    with translate_errors("remove working files", root):
        for client in clients:
            folder = root / client_folder(client)
            # The merged database refers to the client's data, not to the way to it.
            folder.remove([CHUNKS_NAME, DATABASE_NAME, *(folder.names("edges_") if has_moves else ())])


@lru_cache(maxsize=KEPT_STRUCTURES)
def _documents(plan: SavePlan) -> tuple[Sequence[tuple[str, bytes]], int]:
    """Return every ``zarr.json`` by its key, and their digest; they are the same whatever the tensors hold."""
    arrays: dict[str, bytes] = {}
    for item in plan.tensors:
        spec = item.spec
        before, after = _document_around_name(item.grid, spec.dtype, spec.stored_dtype, spec.codec, spec.layout)
        arrays[item.path] = before + json.dumps(spec.name).encode() + after
    found = documents(arrays)
    return list(found.items()), documents_digest(found.items())


def _documents_of(plan: SavePlan, number: int, count: int) -> Sequence[tuple[str, bytes]]:
    """Return the share of the documents that one of so many clients writes."""
    found, _ = _documents(plan)
    return found[number::count]


_NO_NAME = "\0"
"""Stands for a tensor's name, and can be none."""


@lru_cache(maxsize=4096)
def _document_around_name(
    grid: ChunkGrid, dtype: str, stored_dtype: str, codec: str, layout: Layout | None
) -> tuple[bytes, bytes]:
    """Return what stands in the ``zarr.json`` of all tensors of a kind before the name and after it.

    Its attributes say what Zarr does not: the name, the dtype, the layout.
    """
    facts: dict[str, Any] = {"name": _NO_NAME, "dtype": dtype}
    if layout is not None:
        facts["mesh"] = {"name": layout.mesh.name, "axes": dict(layout.mesh.axis_sizes)}
        facts["sharding_specs"] = [list(spec) if isinstance(spec, tuple) else spec for spec in layout.sharding_specs]
    text = json.dumps(array_metadata(grid, stored_dtype, codec, {"dtckpt": facts})).encode()
    before, _, after = text.partition(json.dumps(_NO_NAME).encode())
    return before, after
