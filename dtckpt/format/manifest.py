"""The manifest: the description of a whole checkpoint, and its commit marker.

The file ``dtckpt.manifest`` is a protobuf message (``protos/dtckpt/v1/checkpoint.proto``): an envelope with the format
version and a digest, around the `Manifest` proper::

    Manifest -> arrays: name -> ArrayEntry (path, digests, content) -> ArrayKind (dtype, grid, layout, writers, codec)

The entries of a model share a few kinds, so a manifest of many tensors is read and written quickly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, groupby
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from dtckpt._proto import checkpoint_pb2
from dtckpt.errors import CheckpointCorruptError, CheckpointVersionError, ConfigError, DtckptError, format_nbytes
from dtckpt.format.codecs import CODECS, NO_CODEC
from dtckpt.format.digest import Blocks, bytes_digest
from dtckpt.format.dtypes import validate_dtype
from dtckpt.format.grid import ChunkGrid
from dtckpt.format.hash_work import validate_hashes
from dtckpt.format.names import is_path_of
from dtckpt.layout.layout import Layout
from dtckpt.layout.mesh import Mesh

FORMAT_VERSION = 1
MANIFEST_NAME = "dtckpt.manifest"
MAX_MANIFEST_NBYTES = 512 << 20
"""Bytes of the manifest of a third of a petabyte in chunks of 16 MiB; a longer manifest is neither written nor read."""
# Clients of a restore compare this token, in a barrier's payload, which is bounded, too.
MAX_ATTEMPT_CHARS = 1024
BLOCKS_NAME = "dtckpt.blocks"
"""A file in each client's folder: the digests of blocks (8 bytes each, little endian), in the order of the manifest.

The file covers all chunks of several blocks that the client wrote.
"""
KVSTORES = ("ocdbt", "zarr")
"""The two kinds of key-value store that hold the arrays, in the order of the `KvStore` enum (from 1)."""


@dataclass(frozen=True, slots=True, eq=False)
class ArrayKind:
    """The facts that all tensors share if they differ only in name, path and content.

    Args:
        dtype: The tensor's element type.
        stored_dtype: Element type on storage.
        grid: Shape and chunk grid.
        writers: Per chunk, row-major: the client that wrote it (-1 where missing). Shape ``(num_chunks,)``.
        layout: Layout at the time of the save, if the tensor was on a mesh.
        missing: Row-major numbers of the chunks that were not saved.
        codec: How chunks are compressed; see `dtckpt.format.codecs`.

    Attributes:
        itemsize: Bytes of one stored element.
        blocks: How chunks are cut into blocks.
        has_readable_blocks: Whether a block can be read alone, as a range of bytes of the stored chunk.
    """

    dtype: str
    stored_dtype: str
    grid: ChunkGrid
    writers: npt.NDArray[np.int32]
    layout: Layout | None = None
    missing: frozenset[int] = frozenset()
    codec: str = NO_CODEC
    itemsize: int = field(init=False)
    blocks: Blocks = field(init=False)
    has_readable_blocks: bool = field(init=False)

    def __post_init__(self) -> None:
        # Computed here once for all tensors of the kind: every read of every chunk needs them.
        itemsize = validate_dtype(self.stored_dtype).itemsize
        object.__setattr__(self, "itemsize", itemsize)
        object.__setattr__(self, "blocks", Blocks.of(self.grid, itemsize))
        object.__setattr__(self, "has_readable_blocks", self.codec == NO_CODEC)


@dataclass(frozen=True, slots=True, eq=False)
class ArrayEntry:
    """One tensor of a checkpoint.

    Args:
        name: Tensor name.
        path: Array path below the root of the key-value store.
        kind: The facts that the tensor shares with others; the entry also has each fact as a property.
        digests: Per chunk, row-major; see `dtckpt.format.digest`. Shape ``(num_chunks,)``.
        content: Content digest; None if there is none. See `dtckpt.format.content`.
        identities: Per chunk, row-major; None in checkpoints of earlier versions. See `dtckpt.format.digest`.
        origins: Per chunk, row-major: 0 if this checkpoint's save wrote it; else a position in `Manifest.origins`, from
            1: the checkpoint that first wrote it. None: all are 0.
        shares: Per chunk, row-major: its share in the content. None for one chunk, and where they are not known.
    """

    name: str
    path: str
    kind: ArrayKind
    digests: npt.NDArray[np.uint64]
    content: int | None = None
    identities: npt.NDArray[np.uint64] | None = None
    origins: npt.NDArray[np.int32] | None = None
    shares: npt.NDArray[np.uint64] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return self.kind.grid.shape

    @property
    def dtype(self) -> str:
        """The tensor's element type."""
        return self.kind.dtype

    @property
    def stored_dtype(self) -> str:
        """Element type on storage."""
        return self.kind.stored_dtype

    @property
    def grid(self) -> ChunkGrid:
        """Shape and chunk grid."""
        return self.kind.grid

    @property
    def writers(self) -> npt.NDArray[np.int32]:
        """Per chunk, row-major: the client that wrote it (-1 where missing)."""
        return self.kind.writers

    @property
    def layout(self) -> Layout | None:
        """Layout at the time of the save, if the tensor was on a mesh."""
        return self.kind.layout

    @property
    def missing(self) -> frozenset[int]:
        """Row-major numbers of the chunks that were not saved."""
        return self.kind.missing

    @property
    def codec(self) -> str:
        """How chunks are compressed."""
        return self.kind.codec

    @property
    def itemsize(self) -> int:
        """Bytes of one stored element."""
        return self.kind.itemsize

    @property
    def blocks(self) -> Blocks:
        """How chunks are cut into blocks."""
        return self.kind.blocks

    @property
    def has_readable_blocks(self) -> bool:
        """Whether a block can be read alone, as a range of bytes of the stored chunk."""
        return self.kind.has_readable_blocks

    @property
    def stored_nbytes(self) -> int:
        """Bytes of the elements on storage, before compression."""
        return math.prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class PhaseCost:
    """The cost of one phase of an operation on one client: seconds, and the bytes that it moved."""

    seconds: float = 0.0
    nbytes: int = 0

    def __add__(self, other: PhaseCost) -> PhaseCost:
        return PhaseCost(self.seconds + other.seconds, self.nbytes + other.nbytes)

    def __str__(self) -> str:
        return f"{self.seconds:.3f} s" + (f" for {format_nbytes(self.nbytes)}" if self.nbytes else "")


Costs = Mapping[int, Mapping[str, PhaseCost]]
"""By client, the cost of each of its phases."""


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """The description of a complete checkpoint.

    Args:
        kvstore: Kind of key-value store, one of `KVSTORES`.
        arrays: By tensor name, sorted.
        tree: The state tree, as JSON (`dtckpt.format.tree`).
        job: Name of the job that saved it.
        num_clients: Clients of that job.
        attempt: Token of the attempt that was committed.
        documents: Digest of all ``zarr.json``, which only other readers need.
        costs: Costs of the save, up to the barrier ``save/written``.
        format_version: Version of the format.
        raw_bits: Whether the ``zarr.json`` describe elements of types that Zarr's core specification lacks as unsigned
            integers of the same bits; no matter to dtckpt.
        origins: Names of the checkpoints that first wrote chunks of this checkpoint; see `ArrayEntry`.
    """

    kvstore: str
    arrays: Mapping[str, ArrayEntry]
    tree: bytes = b""
    job: str = ""
    num_clients: int = 1
    attempt: str = ""
    documents: int = 0
    costs: Costs = field(default_factory=dict)
    format_version: int = field(default=FORMAT_VERSION)
    raw_bits: bool = False
    origins: Sequence[str] = ()

    def to_bytes(self) -> bytes:
        """Return the content of the file; equal manifests give equal bytes.

        Raises:
            ConfigError: The file would be longer than `MAX_MANIFEST_NBYTES`.
        """
        # Positions in the order of first use, and tensors by name: equal manifests give equal bytes.
        meshes: dict[Mesh, int] = {}
        message = checkpoint_pb2.Manifest(
            job=self.job,
            num_clients=self.num_clients,
            attempt=self.attempt,
            kvstore=checkpoint_pb2.KvStore.Value(f"KV_STORE_{self.kvstore.upper()}"),
            tree=self.tree,
            documents=self.documents,
            clients=sorted(self.costs),
            phases=phases_to_proto(self.costs),
            raw_bits=self.raw_bits,
            origins=self.origins,
        )
        kinds: dict[ArrayKind, bytes] = {}
        for name in sorted(self.arrays):
            entry = self.arrays[name]
            digests: list[int] = entry.digests.tolist()
            tensor = message.tensors.add(
                name=name,
                path=entry.path,
                digests=digests,
                content=entry.content,
                identities=None if entry.identities is None else entry.identities.tolist(),
                origins=_origin_runs(entry.origins),
                shares=None if entry.shares is None else entry.shares.tolist(),
            )
            kind = kinds.get(entry.kind)
            if kind is None:
                kind = kinds[entry.kind] = _kind_proto(entry.kind, meshes).SerializeToString()
            # Serialized once per kind and merged as bytes: a model has thousands of tensors of few kinds.
            tensor.MergeFromString(kind)
        message.meshes.extend(mesh.portable().as_proto() for mesh in meshes)
        # The digest is of these very bytes, which the envelope holds as they are:
        #     ManifestFile   | format_version | digest | manifest |
        #                                                   |
        #     Manifest                        | job | meshes | tensors | tree | ... |
        payload = message.SerializeToString(deterministic=True)
        envelope = checkpoint_pb2.ManifestFile(
            format_version=self.format_version, digest=bytes_digest(payload), manifest=payload
        )
        data = envelope.SerializeToString(deterministic=True)
        # Refuse it at the save, before the commit: no reader would open it.
        if len(data) > MAX_MANIFEST_NBYTES:
            raise ConfigError(
                f"the manifest would have {len(data)} bytes, expected at most {MAX_MANIFEST_NBYTES}; save fewer "
                "tensors in one checkpoint, or larger chunks (SaveOptions(chunk_nbytes=...))"
            )
        return data

    @classmethod
    def from_bytes(cls, data: bytes, origin: str) -> Manifest:
        """Parse the content of a manifest file.

        Args:
            data: The content.
            origin: The file's path or URL, for messages.

        Raises:
            CheckpointVersionError: A newer version of dtckpt wrote it.
            CheckpointCorruptError: The bytes differ from the written bytes, or contradict themselves.
        """
        try:
            envelope = checkpoint_pb2.ManifestFile.FromString(data)
        except DecodeError as error:
            raise CheckpointCorruptError(f"manifest {origin} cannot be read: {error}; restore another step") from error
        # Before all other checks: a newer version may define all other fields anew.
        if envelope.format_version > FORMAT_VERSION:
            raise CheckpointVersionError(
                f"manifest {origin} is of a newer format; got version {envelope.format_version}, expected at most "
                f"{FORMAT_VERSION}; upgrade dtckpt"
            )
        # Protobuf returns version 0 for a field that is absent, as in an empty file, which parses without error.
        if envelope.format_version == 0 or bytes_digest(envelope.manifest) != envelope.digest:
            raise CheckpointCorruptError(
                f"manifest {origin} is damaged: its digest does not match; restore another step"
            )
        try:
            # A forged manifest can have the right digest, so from here on every number is checked before it is used.
            message = checkpoint_pb2.Manifest.FromString(envelope.manifest)
            # Meshes are large, and each is there for some tensor.
            if len(message.meshes) > len(message.tensors):
                raise ValueError(f"it has {len(message.meshes)} meshes for {len(message.tensors)} tensors")
            meshes = [Mesh.from_proto(mesh) for mesh in message.meshes]
            kinds: dict[bytes, ArrayKind] = {}
            digests = _slices([tensor.digests for tensor in message.tensors])
            identities = _slices([tensor.identities for tensor in message.tensors])
            shares = _slices([tensor.shares for tensor in message.tensors])
            entries = [
                _entry(tensor, numbers, meshes, kinds)
                for tensor, numbers in zip(message.tensors, zip(digests, identities, shares, strict=True), strict=True)
            ]
            if len({entry.name for entry in entries}) != len(entries):
                raise ValueError("a tensor occurs twice")
            if any(entry.origins.max() > len(message.origins) for entry in entries if entry.origins is not None):
                raise ValueError("a chunk comes from a checkpoint that is not named")
            # 0 is a field that is absent.
            if not 1 <= message.kvstore <= len(KVSTORES):
                raise ValueError(f"key-value store {message.kvstore} is unknown")
            kvstore = KVSTORES[message.kvstore - 1]
            if len(message.attempt) > MAX_ATTEMPT_CHARS:
                raise ValueError(f"the token of its attempt has {len(message.attempt)} characters")
            costs = costs_from_proto(message.clients, message.phases)
        # Also errors of layouts, grids and dtypes, if the values above do not fit.
        except (DecodeError, DtckptError, IndexError, OverflowError, ValueError) as error:
            raise CheckpointCorruptError(f"manifest {origin} contradicts itself: {error}") from error
        return cls(
            kvstore=kvstore,
            arrays=MappingProxyType({entry.name: entry for entry in entries}),
            tree=message.tree,
            job=message.job,
            num_clients=message.num_clients,
            attempt=message.attempt,
            documents=message.documents,
            costs=costs,
            format_version=envelope.format_version,
            raw_bits=message.raw_bits,
            origins=tuple(message.origins),
        )

    def with_arrays(self, arrays: Mapping[str, ArrayEntry], documents: int, origins: Sequence[str] = ()) -> Manifest:
        """Return a copy with other arrays, the digest of their ``zarr.json``, and the names of their origins."""
        return replace(self, arrays=arrays, documents=documents, origins=origins)


def phases_to_proto(costs: Costs) -> list[checkpoint_pb2.PhaseCosts]:
    """Return the costs as messages, one per phase, in the order of first occurrence over the ascending clients."""
    none = PhaseCost()
    rows = [phases for _, phases in sorted(costs.items())]
    names = dict.fromkeys(name for phases in rows for name in phases)
    # One list per phase and not one message per client: some 8 bytes a client, for thousands of them.
    columns = {name: [phases.get(name, none) for phases in rows] for name in names}
    return [
        checkpoint_pb2.PhaseCosts(
            phase=phase,
            microseconds=[round(cost.seconds * 1e6) for cost in column],
            nbytes=[cost.nbytes for cost in column],
        )
        for phase, column in columns.items()
    ]


def costs_from_proto(clients: Sequence[int], phases: Iterable[checkpoint_pb2.PhaseCosts]) -> Costs:
    """Return the costs of the messages that `phases_to_proto` made.

    Args:
        clients: The clients, ascending.
        phases: The messages.

    Raises:
        ValueError: The lists of a message differ in length from ``clients``, or the clients' numbers would take too
            long.
    """
    validate_hashes(clients)
    costs: dict[int, dict[str, PhaseCost]] = {client: {} for client in clients}
    for column in phases:
        for client, microseconds, nbytes in zip(clients, column.microseconds, column.nbytes, strict=True):
            if microseconds or nbytes:
                costs[client][column.phase] = PhaseCost(microseconds / 1e6, nbytes)
    return costs


def _origin_runs(origins: npt.NDArray[np.int32] | None) -> list[checkpoint_pb2.OriginRun]:
    if origins is None:
        return []
    return [checkpoint_pb2.OriginRun(origin=origin, count=len(list(run))) for origin, run in groupby(origins.tolist())]


def _kind_proto(kind: ArrayKind, meshes: dict[Mesh, int]) -> checkpoint_pb2.TensorEntry:
    """Return the part of a tensor's message that all tensors of a kind share.

    Args:
        kind: The kind.
        meshes: The positions of the meshes in the manifest; a new mesh is added.
    """
    message = checkpoint_pb2.TensorEntry(
        shape=kind.grid.shape,
        dtype=kind.dtype,
        stored_dtype="" if kind.stored_dtype == kind.dtype else kind.stored_dtype,
        chunk_shape=kind.grid.chunk_shape,
        # Neighbouring chunks often belong to one shard and one writer: a run replaces thousands of numbers. A missing
        # chunk has writer 0 there, because the field has no sign; ``missing`` marks such chunks.
        writers=[
            checkpoint_pb2.WriterRun(client=client, count=len(list(run)))
            for client, run in groupby(max(0, writer) for writer in kind.writers.tolist())
        ],
        missing=sorted(kind.missing),
        codec=checkpoint_pb2.Codec.Value(f"CODEC_{kind.codec.upper()}"),
    )
    if kind.layout is not None:
        position = meshes.setdefault(kind.layout.mesh, len(meshes))
        message.layout.mesh = position
        message.layout.sharding_specs.extend(kind.layout.as_proto().sharding_specs)
    return message


def _slices(lists: Sequence[Sequence[int]]) -> Iterator[npt.NDArray[np.uint64]]:
    """Yield lists as slices of one array: to make one for each would take as long as all the rest."""
    numbers = np.fromiter(chain.from_iterable(lists), np.uint64)
    ends = accumulate(map(len, lists))
    return (numbers[end - len(each) : end] for each, end in zip(lists, ends, strict=True))


def _entry(
    message: checkpoint_pb2.TensorEntry,
    numbers: tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint64]],
    meshes: Sequence[Mesh],
    kinds: dict[bytes, ArrayKind],
) -> ArrayEntry:
    """Parse the message of one tensor.

    Args:
        message: The message; what tensors of a kind do not share is cleared.
        numbers: Of its chunks, the digests; the identities and the shares in the content, if there are any.
        meshes: The meshes of the manifest.
        kinds: The kinds parsed so far, by the rest of their message; a new kind is added.

    Raises:
        ValueError: The message contradicts itself.
        IndexError: The message names a mesh that the manifest does not have.
    """
    name, path = message.name, message.path
    digests, identities, shares = numbers
    # A forged path could lead a reader to another tensor's chunks.
    if not is_path_of(path, name):
        raise ValueError(f"array {path!r} does not belong to tensor {name!r}")
    content = message.content if message.HasField("content") else None
    runs = [(run.origin, run.count) for run in message.origins]
    # The other fields are equal for all tensors of a kind, byte by byte, so one parse is enough.
    for field_name in ("name", "path", "digests", "content", "identities", "origins", "shares"):
        message.ClearField(field_name)
    key = message.SerializeToString()
    kind = kinds.get(key)
    if kind is None:
        kind = kinds[key] = _kind(message, name, digests.size, meshes)
    if digests.size != kind.grid.num_chunks:
        raise ValueError(
            f"tensor {name!r} has {digests.size} digests, expected one for each of {kind.grid.num_chunks} chunks"
        )
    for what, some in (("identities", identities), ("shares", shares)):
        if some.size not in (0, digests.size):
            raise ValueError(f"tensor {name!r} has {some.size} {what} for {digests.size} chunks")
    # The sum first: a count may be any number.
    if runs and sum(count for _, count in runs) != digests.size:
        raise ValueError(f"tensor {name!r} has origins for {sum(count for _, count in runs)} of its chunks")
    origins = None
    if runs and digests.size:
        origins = np.repeat(np.array([origin for origin, _ in runs], np.int32), [count for _, count in runs])
    return ArrayEntry(
        name,
        path,
        kind,
        digests,
        content,
        identities if identities.size else None,
        origins,
        shares if shares.size else None,
    )


def _kind(message: checkpoint_pb2.TensorEntry, name: str, num_digests: int, meshes: Sequence[Mesh]) -> ArrayKind:
    """Parse the part of a tensor's message that all tensors of a kind share. Raises: as `_entry`."""
    grid = ChunkGrid(tuple(message.shape), tuple(message.chunk_shape))
    validate_hashes(message.missing)
    missing = frozenset(message.missing)
    # A chunk larger than its tensor would make a reader take memory for elements that do not exist.
    if any(chunk > max(1, size) for chunk, size in zip(grid.chunk_shape, grid.shape, strict=True)):
        raise ValueError(f"chunks {grid.chunk_shape} of tensor {name!r} are larger than it, {grid.shape}")
    # Checked before memory of that size is taken: a manifest may be hostile.
    if not num_digests == sum(run.count for run in message.writers) == grid.num_chunks:
        raise ValueError(
            f"tensor {name!r} has {num_digests} digests and {len(message.writers)} runs of writers, "
            f"expected them for {grid.num_chunks} chunks"
        )
    if any(number >= grid.num_chunks for number in missing):
        raise ValueError(f"tensor {name!r} lacks chunks that it does not have")
    writers = np.repeat(
        np.array([run.client for run in message.writers], np.int32), [run.count for run in message.writers]
    )
    writers[sorted(missing)] = -1
    validate_dtype(message.dtype)
    validate_dtype(message.stored_dtype or message.dtype)
    if not 0 <= message.codec < len(CODECS):
        raise ValueError(f"codec {message.codec} of tensor {name!r} is unknown")
    layout = None
    if message.HasField("layout"):
        specs = [tuple(spec.axes) or spec.sharding_spec for spec in message.layout.sharding_specs]
        layout = Layout(specs, meshes[message.layout.mesh])
        if layout.rank != len(grid.shape):
            raise ValueError(f"layout of tensor {name!r} has rank {layout.rank}, expected {len(grid.shape)}")
    return ArrayKind(
        dtype=message.dtype,
        stored_dtype=message.stored_dtype or message.dtype,
        grid=grid,
        writers=writers,
        layout=layout,
        missing=missing,
        codec=CODECS[message.codec],
    )
