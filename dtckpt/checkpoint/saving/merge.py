"""Merge the chunks that the clients wrote into one checkpoint with a manifest; done by the leader of a save.

The leader trusts no client: it compares each chunk list with the digest that its client announced, its length with the
plan, and the digests of copies with each other. Any difference fails the save before the manifest exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import groupby, pairwise
from operator import itemgetter
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from dtckpt._proto import checkpoint_pb2
from dtckpt.checkpoint.gc_pause import gc_paused
from dtckpt.checkpoint.saving.digests import is_gathered
from dtckpt.checkpoint.saving.plan import NO_CLIENT, CopyRule, SavePlan, TensorPlan
from dtckpt.checkpoint.saving.replica_check import log_differing, mismatch_error
from dtckpt.checkpoint.saving.reuse import Base
from dtckpt.checkpoint.saving.union import PARTS_CURE
from dtckpt.checkpoint.saving.write import CHUNKS_NAME, EDGES_PREFIX, documents_of_share, plan_documents
from dtckpt.comm.background_threads import begin
from dtckpt.errors import CheckpointCorruptError, capped
from dtckpt.format.content import content_digest
from dtckpt.format.digest import bytes_digest
from dtckpt.format.dtypes import DTYPES
from dtckpt.format.manifest import MANIFEST_NAME, ArrayEntry, ArrayKind, Manifest
from dtckpt.storage.failures import translate_errors
from dtckpt.storage.folder import Folder
from dtckpt.storage.local_folder import LocalFolder
from dtckpt.storage.reused_chunks import validate_reused
from dtckpt.storage.zarr_tensorstore import (
    DATABASE_NAME,
    KeyRange,
    chunk_range,
    client_folder,
    key_of,
    merge,
    sync_merged,
)

VALUES_CURE = (
    "wrap what differs by client in dtckpt.PerClient; SaveOptions(check_replicas={pattern: False}) saves the lowest "
    "client's"
)
"""Advice in errors where clients pass different tensors that are no parameters."""


def merge_clients(
    plan: SavePlan,
    root: Folder,
    announced: Mapping[int, int],
    manifest: Manifest,
    *,
    is_durable: bool,
    contents: Mapping[str, int] = MappingProxyType({}),
    document_writers: Sequence[int] | None = None,
    base: Base | None = None,
) -> Manifest:
    """Merge the clients' stores and chunk lists, and write the manifest. Called by the leader.

    Args:
        plan: The plan of the save.
        root: The folder under construction.
        announced: Digest of every client's chunk list, by client.
        manifest: The manifest without its arrays.
        is_durable: Whether to fsync.
        contents: Content digests, by name, that the stored tensors must have, besides the digests in the plan.
        document_writers: The clients that shared the writing of the documents; default: all.
        base: The checkpoint that has the chunks that the clients did not write.

    Returns:
        The complete manifest, as written.

    Raises:
        CheckpointCorruptError: A client did not write as planned, or a tensor's content digest is not as expected.
        ReplicaMismatchError: Copies of one value differ between clients.
        StorageError: Storage refused.
    """
    clients = sorted(announced)
    writers = clients if document_writers is None else document_writers
    keys = _last_keys(plan, clients, writers, raw_bits=manifest.raw_bits)
    lists = _ChunkLists(plan, root, announced)
    reused = partial(_reused_keys, plan, lists) if base is not None else tuple
    work = partial(merge, manifest.kvstore, root, keys, reused)
    with _beside(work, is_slow=not isinstance(root, LocalFolder)) as wait_for_merge:
        with gc_paused():
            origins = _Origins(plan, lists, base)
            entries = {entry.name: entry for entry in _entries(plan, lists, contents, origins)}
            documents = plan_documents(plan, raw_bits=manifest.raw_bits)[1]
            complete = manifest.with_arrays(entries, documents, tuple(origins.names))
        if base is not None:
            # The manifest promises that no chunk is missing. So check first that the reused chunks are there.
            wait_for_merge()
            chunks = ((item, item.grid.index(number)) for item, number in _chunks_at(plan, lists.reused))
            validate_reused(manifest.kvstore, root, base.folder, chunks)
        with translate_errors("write the manifest", root):
            root.write(MANIFEST_NAME, complete.to_bytes())
    if is_durable:
        sync_merged(manifest.kvstore, root)
    return complete


@contextmanager
def _beside(work: Callable[[], object], *, is_slow: bool) -> Iterator[Callable[[], object]]:
    """Do work beside the context if storage takes long to answer, else before it; raise its error.

    The context gets a function that waits until the work has ended, and raises its error. After a failure in the
    context the work has ended, too: it could go on writing to folders that are removed.
    """
    if not is_slow:
        work()
        yield lambda: None
        return
    done = begin(work, "dtckpt-merge")
    try:
        yield done.result
    finally:
        done.exception()
    done.result()


class _ChunkLists:
    """The chunk lists of all clients, read when they are first asked for.

    Args:
        plan: The plan of the save.
        root: The folder under construction.
        announced: Digest of every client's chunk list, by client.
    """

    def __init__(self, plan: SavePlan, root: Folder, announced: Mapping[int, int]) -> None:
        self._plan, self._root, self._announced = plan, root, announced

    @cached_property
    def by_client(self) -> Mapping[int, checkpoint_pb2.ClientChunks]:
        """The lists. Raises: CheckpointCorruptError: A client did not write as planned."""
        plan, announced = self._plan, sorted(self._announced.items())
        owners = set(np.unique(plan.owners).tolist())
        if absent := sorted(owners - {NO_CLIENT} - set(self._announced)):
            raise CheckpointCorruptError(f"clients {capped(absent)} wrote nothing; nothing was committed, save again")
        lists = self._root.read_all(f"{client_folder(client)}/{CHUNKS_NAME}" for client, _ in announced)
        found = {}
        for client, expected in announced:
            found[client] = each = _chunk_list(lists, self._root / client_folder(client), client, expected)
            count = plan.chunks_of(client).size
            # A worker of an earlier version, whose part is taken up again, left no identities and no shares.
            lengths = {len(each.identities), len(each.shares)}
            if each.plan != plan.topic or len(each.digests) != count or not lengths <= {0, count}:
                raise CheckpointCorruptError(
                    f"client {client} did not write as planned; nothing was committed, save again"
                )
        return found

    @cached_property
    def reused(self) -> npt.NDArray[np.bool_]:
        """For each chunk of all tensors, whether its client left it to the base. Raises: As `by_client`."""
        reused = np.zeros(self._plan.owners.size, bool)
        for client, each in self.by_client.items():
            if each.reused:
                chunks = self._plan.chunks_of(client)
                reused[chunks] = np.unpackbits(np.frombuffer(each.reused, np.uint8), count=chunks.size).astype(bool)
        return reused


def _chunks_at(plan: SavePlan, mask: npt.NDArray[np.bool_]) -> Iterator[tuple[TensorPlan, int]]:
    """Yield the chunks of a plan that a mask over all of them has: the tensor, and the number of its chunk."""
    chunks = np.flatnonzero(mask)
    tensors = plan.tensors_at(chunks)
    for index, number in zip(tensors.tolist(), (chunks - plan.starts[tensors]).tolist(), strict=True):
        yield plan.tensors[index], number


def _reused_keys(plan: SavePlan, lists: _ChunkLists) -> Iterator[KeyRange]:
    """Yield the ranges of the keys of the chunks that the base has: one range where it has all chunks of a tensor."""
    for item, numbers in groupby(_chunks_at(plan, lists.reused), key=itemgetter(0)):
        found = [number for _, number in numbers]
        if len(found) == item.grid.num_chunks:
            yield chunk_range(item, None)
        else:
            yield from (chunk_range(item, item.grid.index(number)) for number in found)


class _Origins:
    """The checkpoints that first wrote the chunks of a save.

    Args:
        plan: The plan of the save.
        lists: The chunk lists.
        base: The save's base.

    Attributes:
        names: Their names, in the order of first use.
    """

    def __init__(self, plan: SavePlan, lists: _ChunkLists, base: Base | None) -> None:
        self._plan, self._lists, self._base = plan, lists, base
        self.names: dict[str, int] = {}

    def of(self, item: TensorPlan, bounds: tuple[int, int]) -> npt.NDArray[np.int32] | None:
        """Return the origins of a tensor's chunks, for its entry in the manifest.

        Args:
            item: The tensor.
            bounds: The numbers of its chunks among all: the first, and the one behind the last.
        """
        reused = self._lists.reused[slice(*bounds)]
        if not reused.any():
            return None
        entry = None if self._base is None else self._base.manifest.arrays.get(item.name)
        if self._base is None or entry is None or entry.grid != item.grid:
            raise CheckpointCorruptError(
                f"chunks of tensor {item.name!r} were left to a base that lacks them; nothing was committed, save again"
            )
        origins = np.zeros(reused.size, np.int32)
        for number in np.flatnonzero(reused).tolist():
            origins[number] = self.names.setdefault(self._base.origin(entry, number), len(self.names) + 1)
        return origins


def _last_keys(
    plan: SavePlan, clients: Sequence[int], document_writers: Sequence[int], *, raw_bits: bool
) -> dict[int, str]:
    """Return, by client, the key that it writes last; clients that write nothing are left out."""
    keys: dict[int, str] = {}
    for client in clients:
        for key, _ in documents_of_share(plan, client, document_writers, raw_bits=raw_bits)[-1:]:
            keys[client] = key
        last = plan.chunks_of(client)[-1:]
        for index in plan.tensors_at(last).tolist():
            tensor = plan.tensors[index]
            keys[client] = key_of(tensor.path, tensor.grid.index(int(last[0] - plan.starts[index])))
    return keys


def _entries(
    plan: SavePlan, lists: _ChunkLists, expected_contents: Mapping[str, int], origins: _Origins
) -> Iterator[ArrayEntry]:
    """Yield the manifest's entry of every tensor, from the plan and the clients' chunk lists."""
    digests = np.zeros(plan.owners.size, np.uint64)
    identities, shares = np.zeros((2, plan.owners.size), np.uint64)
    contents = np.zeros(len(plan.tensors), np.uint64)
    has_content = has_identities = has_shares = True
    copies: dict[tuple[int, int], dict[int, list[int]]] = {}
    for client, chunk_list in lists.by_client.items():
        chunks = plan.chunks_of(client)
        tensors = np.unique(plan.tensors_at(chunks))
        digests[chunks] = np.array(chunk_list.digests, np.uint64)
        if len(chunk_list.identities) == chunks.size:
            identities[chunks] = np.array(chunk_list.identities, np.uint64)
        else:
            has_identities = False
        if len(chunk_list.shares) == chunks.size:
            shares[chunks] = np.array(chunk_list.shares, np.uint64)
        else:
            has_shares = False
        if len(chunk_list.contents) == tensors.size:
            # A tensor's content is the exclusive or of the shares of its chunks; their writers do not matter.
            contents[tensors] ^= np.array(chunk_list.contents, np.uint64)
        else:
            has_content = False
        for copy in chunk_list.copies:
            copies.setdefault((copy.tensor, copy.box), {}).setdefault(copy.digest, []).append(client)
    _validate_copies(plan, copies)
    kinds: dict[tuple[Any, ...], ArrayKind] = {}
    has_missing = bool((plan.owners == NO_CLIENT).any())
    for item, bounds, joined in zip(plan.tensors, pairwise(plan.starts.tolist()), contents.tolist(), strict=True):
        itemsize = DTYPES[item.spec.stored_dtype].itemsize
        content = content_digest(joined, item.grid.shape, itemsize) if has_content else None
        must = item.spec.content if item.spec.content is not None else expected_contents.get(item.spec.name)
        if content is not None and must not in (None, content):
            raise CheckpointCorruptError(
                f"tensor {item.spec.name!r} would get other elements; got content {content:016x}, expected "
                f"{must:016x}; nothing was committed"
            )
        missing = frozenset(item.missing if has_missing else ())
        spec = item.spec
        facts = spec.dtype, spec.stored_dtype, item.grid, item.owners.tobytes(), spec.layout, missing, spec.codec
        # Most tensors of a model are like others; the manifest describes each kind once.
        kind = kinds.get(facts)
        if kind is None:
            kind = kinds[facts] = ArrayKind(*facts[:3], item.owners, *facts[4:])
        own = slice(*bounds)
        identity = identities[own] if has_identities else None
        is_cut = has_shares and item.grid.num_chunks > 1 and not is_gathered(item)
        yield ArrayEntry(
            spec.name,
            item.path,
            kind,
            digests[own],
            content,
            identity,
            origins.of(item, bounds),
            shares[own] if is_cut and content is not None else None,
        )


def _validate_copies(plan: SavePlan, copies: Mapping[tuple[int, int], Mapping[int, Sequence[int]]]) -> None:
    """Refuse copies that differ and must not; log the names of the others that differ."""
    noted: list[str] = []
    for (position, box), by_digest in sorted(copies.items()):
        if len(by_digest) > 1:
            spec = plan.tensors[position].spec
            if spec.copies is not CopyRule.EQUAL:
                noted.append(spec.name)
                continue
            cure = f"{PARTS_CURE}; else training has diverged" if spec.is_parameter else VALUES_CURE
            raise mismatch_error(spec.name, spec.holdings[box].region, list(by_digest.values()), cure)
    log_differing(noted)


def _chunk_list(lists: Iterator[bytes], folder: Folder, client: int, expected: int) -> checkpoint_pb2.ClientChunks:
    with translate_errors(f"read the chunk list of client {client}", folder):
        data = next(lists)
    if bytes_digest(data) != expected:
        raise CheckpointCorruptError(
            f"the chunk list of client {client} differs from its announcement; nothing was committed, save again"
        )
    return checkpoint_pb2.ClientChunks.FromString(data)


def remove_working_files(root: Folder, clients: Sequence[int], *, has_moves: bool, names: Sequence[str] = ()) -> None:
    """Remove the files that clients left for each other, once they are merged; no reader needs them.

    Args:
        root: The folder under construction.
        clients: The clients that wrote.
        has_moves: Whether some of them wrote pieces of chunks for others.
        names: Further files in the clients' folders; they need not be there.
    """
    # The merged database refers to the clients' data files, not to the clients' own databases.
    always = [CHUNKS_NAME, DATABASE_NAME, *names]
    with translate_errors("remove working files", root):
        root.remove_below(
            {
                folder: [*always, *((root / folder).names(EDGES_PREFIX) if has_moves else ())]
                for folder in map(client_folder, clients)
            }
        )
