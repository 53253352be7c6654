"""Write one client's part of a planned save: its chunks, its share of the metadata, and its chunk list.

An owner that does not hold all of a chunk puts the chunk together. Every other holder writes its pieces to a file for
the owner (`ClientWriter.hand_over`), and after a barrier the owner reads them (`ClientWriter.write`). One client's
folder::

    client_3/
        edges_0        pieces of chunks that client 0 owns, in the plan's order, then a digest
        chunks.pb      the chunk list: digests of the chunks, of copies and of contents
        dtckpt.blocks  digests of the blocks of large chunks
        ...            the chunks, in the key-value store
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from itertools import chain
from typing import Any, Protocol

import numpy as np

from dtckpt._proto import checkpoint_pb2
from dtckpt.checkpoint.gc_pause import gc_paused
from dtckpt.checkpoint.options import SaveOptions
from dtckpt.checkpoint.reading.read_chunks import convert
from dtckpt.checkpoint.saving.digests import ChunkDigester, TensorDigests, chunk_digester
from dtckpt.checkpoint.saving.plan import KEPT_STRUCTURES, SavePlan, TensorPlan
from dtckpt.checkpoint.saving.replica_check import Replica, copy_digests
from dtckpt.checkpoint.saving.reuse import NO_REUSE, Reuse
from dtckpt.errors import CheckpointCorruptError
from dtckpt.format.digest import as_bytes, bytes_digest, documents_digest
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.manifest import BLOCKS_NAME
from dtckpt.format.zarr_documents import documents
from dtckpt.layout.region import Region
from dtckpt.storage.commit_target import CommitAttempt
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.zarr_files import ChunkFileWriter, open_writer
from dtckpt.storage.zarr_tensorstore import TensorStoreWriter, allocate_elements, client_folder


class Source(Protocol):
    """The elements of this client's part of the state."""

    @property
    def max_pending_nbytes(self) -> int | None:
        """Bound on the bytes of fetched elements that wait to be written.

        None: fetched elements are views of memory that stays anyway, so only elements that the writer makes itself
        (rounded, compressed, put together) are bounded.
        """
        ...

    def expect(self, regions: Iterator[tuple[TensorPlan, Region]]) -> None:
        """Prepare for the regions that will be fetched, in this order: a source that reads them may read ahead."""
        ...

    def fetch(self, plan: TensorPlan, region: Region) -> np.ndarray[Any, Any]:
        """Return the elements of a region that this client holds, in the region's shape and the tensor's dtype."""
        ...

    def copies(self, plan: TensorPlan, region: Region) -> Sequence[Replica]:
        """Return all of this client's copies of one of its boxes; the first copy is fetched."""
        ...


CHUNKS_NAME = "chunks.pb"
EDGES_PREFIX = "edges_"
PENDING_NBYTES = 192 << 20
"""Bound on elements made for a save (rounded, compressed, put together, copied) that wait to be written."""
GC_PAUSE_NBYTES = 64 << 20
GC_PAUSE_S = 1.0
"""The cycle collector pauses while the first so many bytes are started, for so long at most: with many small chunks it
would cost as much as their writing."""
_DIGEST_NBYTES = 8
_Pieces = dict[tuple[int, int, Region], np.ndarray[Any, Any]]
"""Elements that other clients handed over, by index of the tensor, number of the chunk, and region."""


class ClientWriter:
    """Writes one client's part of a save.

    Args:
        plan: The plan of the save.
        attempt: The attempt that it writes to.
        client: This client.
        clients: The clients that share the writing of the documents, in the same order everywhere.
        source: The elements of this client.
        options: Of these, ``kvstore``, ``raw_bits``, ``fsync``, ``check_replicas`` and ``content_digest`` count.
        count: Called with the bytes of each chunk that is handed to storage.
        reuse: The chunks that are in the attempt's folder already, as its base has them.
    """

    def __init__(
        self,
        plan: SavePlan,
        attempt: CommitAttempt,
        *,
        client: int,
        clients: Sequence[int],
        source: Source,
        options: SaveOptions,
        count: Callable[[int], object],
        reuse: Reuse = NO_REUSE,
    ) -> None:
        self._plan = plan
        self._attempt = attempt
        self._client = client
        self._clients = clients
        self._source = source
        self._options = options
        self._count = count
        self._reuse = reuse
        self._folder = attempt.folder / client_folder(client)

    def _open_folder(self) -> None:
        with translate_errors("create the client's folder", self._folder):
            self._attempt.validate(self._client)
            self._folder.make()

    def hand_over(self) -> None:
        """Write this client's pieces of chunks that other clients own: one file per owner, in the plan's order."""
        self._open_folder()
        owners = {int(tensor.owners[number]) for tensor in self._plan.tensors for number in tensor.pieces}
        for owner in sorted(owners - {self._client}):
            pieces = [
                as_bytes(self._stored(self._plan.tensors[index], region)).tobytes()
                for index, _, region in self._plan.moves(self._client, owner)
            ]
            # The owner plans the same, so it expects no file where there are no pieces.
            if pieces:
                data = b"".join(pieces)
                # The owner digests a chunk only when it is put together; until then nothing else protects the pieces.
                digest = bytes_digest(data).to_bytes(_DIGEST_NBYTES, "big")
                self._put({_edges_name(owner): data + digest})
                self._count(len(data))

    def write(self) -> int:
        """Write this client's chunks, its share of the metadata, and its chunk list.

        With ``check_replicas``, also compare this client's copies of a value with each other, and note the digests of
        values that other clients have too; the leader compares these.

        Returns:
            Digest of the chunk list's file.

        Raises:
            CheckpointCorruptError: Pieces that another client handed over are damaged.
            ReplicaMismatchError: Two copies on this client differ.
            StorageError: Storage refused.
        """
        self._open_folder()
        received = self._read_pieces()
        options, max_pending_nbytes = self._options, self._source.max_pending_nbytes
        # Elements that are made for the save stay in memory until they are written: unbounded, the whole state could.
        writer = open_writer(
            options.kvstore,
            self._attempt.folder,
            self._client,
            is_durable=options.fsync,
            is_cached=max_pending_nbytes is None,
            max_pending_nbytes=max_pending_nbytes or PENDING_NBYTES,
        )
        # Where memory is bounded, chunks are digested at once and not in threads: their elements are freed as soon as
        # they are written.
        has_threads = max_pending_nbytes is None
        try:
            with chunk_digester(has_threads=has_threads, with_content=options.content_digest) as digests:
                self._start_writes(writer, digests, received)
                # Copies are compared in the digests' threads, while this thread waits for storage.
                copies = digests.then(lambda: self._copy_digests(digests.results())) if options.check_replicas else list
                writer.commit()
                by_tensor, compared = digests.results(), copies()
        except BaseException:
            # Writes that go on would make the attempt's folder again, after its leader has removed it.
            writer.abort()
            raise
        blocks = [digest for result in by_tensor.values() for digest in result.blocks]
        chunk_list = checkpoint_pb2.ClientChunks(
            client=self._client,
            plan=self._plan.topic,
            copies=compared,
            digests=[digest for result in by_tensor.values() for digest in result.chunks.values()],
            identities=[identity for result in by_tensor.values() for identity in result.identities.values()],
            reused=self._reused_bits(),
            contents=[result.content for result in by_tensor.values()] if options.content_digest else [],
            shares=[share for result in by_tensor.values() for share in result.shares.values()]
            if options.content_digest
            else [],
        )
        # The digest travels with the vote: so the leader notices a list that it sees in an older state, or damaged.
        data = chunk_list.SerializeToString(deterministic=True)
        files = {BLOCKS_NAME: np.array(blocks, "<u8").tobytes()} if blocks else {}
        self._put({**files, CHUNKS_NAME: data})
        if self._options.fsync:
            # Unlike the chunk list, the digests of the blocks stay in the checkpoint.
            with translate_errors(f"sync {BLOCKS_NAME}", self._folder):
                self._folder.sync(files)
            with translate_errors("sync files of the base", self._attempt.folder):
                # The base may have been saved without fsync, or copied here.
                self._attempt.folder.sync(self._reuse.files)
        return bytes_digest(data)

    def _reused_bits(self) -> bytes:
        """Return one bit for each chunk of this client, in the plan's order: whether it was not written."""
        shared = self._reuse.shared
        bits = [(index, number) in shared for index, _, number in self._plan.owned_by(self._client)] if shared else []
        return np.packbits(np.array(bits, bool)).tobytes()

    def _put(self, files: Mapping[str, bytes]) -> None:
        # Not synced: pieces and chunk list are read once, and removed before the commit.
        with translate_errors("write {}", self._folder, ", ".join(files)):
            self._folder.write_all(files)

    def _start_writes(
        self, writer: TensorStoreWriter | ChunkFileWriter, digests: ChunkDigester, received: _Pieces
    ) -> None:
        """Hand all of this client's documents and chunks to storage, in the plan's order, and digest the chunks."""
        is_bounded = self._source.max_pending_nbytes is not None
        nbytes, start = 0, time.monotonic()
        self._source.expect(self._own_regions())
        with ExitStack() as pause:
            pause.enter_context(gc_paused())
            raw_bits = bool(self._options.raw_bits)
            for key, document in documents_of_share(self._plan, self._client, self._clients, raw_bits=raw_bits):
                writer.write_document(key, document)
            for _, tensor, number in self._steady():
                elements = self._stored(tensor, tensor.grid.chunk(number)[1])
                writer.write(tensor, tensor.grid.chunk(number)[1], elements)
                self._count(elements.nbytes)
            if self._reuse.steady:
                writer.begin_files()
            for index, tensor, number in self._plan.owned_by(self._client):
                _, region = tensor.grid.chunk(number)
                known = self._reuse.digests.get((index, number))
                if known is not None:
                    digests.put(index, number, known)
                if self._reuse.is_done(index, number):
                    continue
                if number in tensor.pieces:
                    elements = self._assemble(index, number, region, received)
                else:
                    elements = self._stored(tensor, region)
                # A view is memory of the source, which stays in any case; a new array counts until it is written.
                is_kept = not is_bounded and not elements.flags.owndata
                writer.write(tensor, region, elements, is_kept=is_kept)
                if known is None:
                    digests.add(index, tensor, number, elements, is_kept=is_kept)
                self._count(elements.nbytes)
                nbytes += elements.nbytes
                if nbytes > GC_PAUSE_NBYTES or time.monotonic() - start > GC_PAUSE_S:
                    pause.close()

    def _own_regions(self) -> Iterator[tuple[TensorPlan, Region]]:
        """Yield the regions for `_start_writes`, in its order: whole chunks, and this client's pieces of split ones."""
        changed = (each for each in self._plan.owned_by(self._client) if not self._reuse.is_done(each[0], each[2]))
        for _, tensor, number in chain(self._steady(), changed):
            if number in tensor.pieces:
                pieces = tensor.pieces[number]
                yield from ((tensor, piece.region) for piece in pieces if piece.client == self._client)
            else:
                yield tensor, tensor.grid.chunk(number)[1]

    def _steady(self) -> Iterator[tuple[int, TensorPlan, int]]:
        """Yield the chunks that are written first, apart from the others; see `dtckpt.checkpoint.saving.reuse`."""
        return ((index, self._plan.tensors[index], number) for index, number in sorted(self._reuse.steady))

    def _copy_digests(self, written: Mapping[int, TensorDigests]) -> list[checkpoint_pb2.CopyDigest]:
        return list(copy_digests(self._plan, self._client, self._source.copies, written))

    def _stored(self, plan: TensorPlan, region: Region) -> np.ndarray[Any, Any]:
        return stored_elements(self._source, plan, region)

    def _read_pieces(self) -> _Pieces:
        """Read the pieces that other clients handed over to this one.

        Sender and owner derive the order of the pieces from the plan, so the files hold nothing but elements.
        """
        received: _Pieces = {}
        senders = {piece.client for tensor in self._plan.tensors for parts in tensor.pieces.values() for piece in parts}
        for sender in sorted(senders - {self._client}):
            moves = list(self._plan.moves(sender, self._client))
            if not moves:
                continue
            folder = self._attempt.folder / client_folder(sender)
            with translate_errors("read the pieces of another client", folder):
                data = folder.read(_edges_name(self._client))
            body = memoryview(data)[:-_DIGEST_NBYTES]
            if bytes_digest(body) != int.from_bytes(data[-_DIGEST_NBYTES:], "big"):
                raise CheckpointCorruptError(f"pieces from client {sender} in {folder} are damaged; save again")
            start = 0
            for index, number, region in moves:
                dtype = DTYPES[self._plan.tensors[index].spec.stored_dtype]
                # A view: the file's bytes stay in memory until the chunks are put together.
                elements = np.frombuffer(body, dtype, region.numel, start).reshape(region.shape)
                received[index, number, region] = elements
                start += elements.nbytes
        return received

    def _assemble(self, index: int, number: int, chunk: Region, received: _Pieces) -> np.ndarray[Any, Any]:
        """Put a chunk together from this client's pieces and the other clients' pieces."""
        tensor = self._plan.tensors[index]
        elements = allocate_elements(tensor.spec.stored_dtype, chunk.shape)
        for piece in tensor.pieces[number]:
            is_mine = piece.client == self._client
            part = self._stored(tensor, piece.region) if is_mine else received[index, number, piece.region]
            elements[piece.region.relative_to(chunk).slices()] = part
        return elements


def stored_elements(source: Source, plan: TensorPlan, region: Region) -> np.ndarray[Any, Any]:
    """Return the elements of a region that a source has, in the stored dtype."""
    elements = source.fetch(plan, region)
    if elements.dtype == DTYPES[plan.spec.stored_dtype]:
        return elements
    stored = allocate_elements(plan.spec.stored_dtype, region.shape)
    convert(elements, stored)
    return stored


def _edges_name(owner: int) -> str:
    return f"{EDGES_PREFIX}{owner}"


# --- the zarr.json documents of arrays and groups, the same on all clients --------------------------------------------


@lru_cache(maxsize=KEPT_STRUCTURES)
def plan_documents(plan: SavePlan, *, raw_bits: bool) -> tuple[Sequence[tuple[str, bytes]], int]:
    """Return every ``zarr.json`` by its key, and the digest of all; they do not depend on the tensors' elements.

    Args:
        plan: The plan of the save.
        raw_bits: See `dtckpt.checkpoint.options.SaveOptions`.
    """
    by_key = documents(plan.tensors, raw_bits=raw_bits)
    return list(by_key.items()), documents_digest(by_key.items())


def documents_of_share(
    plan: SavePlan, client: int, clients: Sequence[int], *, raw_bits: bool
) -> Sequence[tuple[str, bytes]]:
    """Return the documents that one client writes; none, if it is not among the clients that share them."""
    if client not in clients:
        return ()
    listed, _ = plan_documents(plan, raw_bits=raw_bits)
    return listed[clients.index(client) :: len(clients)]
