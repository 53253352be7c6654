"""Compare two checkpoints: structure, values, dtypes, shapes, layouts, and elements, by digests where these suffice.

`plan_comparison` finds all differences that need no element, and which elements have to be read to find the others:

    content digests of one dtype                            tell whether the elements differ; nothing is read
    chunk digests of one tensor, cut into the same chunks   tell which chunks differ; only these are read
    neither, or another library's files                     everything is read

`CheckpointComparison.run` reads, and returns the report.
"""

from __future__ import annotations

import fnmatch
import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dtckpt.checkpoint.converting.optimizer_states import with_numbers
from dtckpt.checkpoint.inspecting.elements import ElementDifferences
from dtckpt.checkpoint.inspecting.read_elements import (
    DEFAULT_MAX_MEMORY,
    BatchBudget,
    SelectedPiece,
    cut_pieces,
    read_ahead,
)
from dtckpt.checkpoint.inspecting.selection import Selection
from dtckpt.checkpoint.inspecting.tensor_comparison import (
    Difference,
    DifferenceKind,
    DiffReport,
    Fact,
    PlainValue,
    Reads,
    TensorComparison,
    TensorFacts,
    compare_tensors,
)
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.checkpoint.reading.manifest_files import KIND
from dtckpt.checkpoint.reading.tensor_info import TensorInfo
from dtckpt.checkpoint.restoring.rename_rules import Rename, renamed, validate_rename
from dtckpt.errors import TensorNotFoundError, capped
from dtckpt.format import tree as trees
from dtckpt.format.names import natural_key

NUMBERED = "torch"
"""The format in which optimizers number their parameters; see `dtckpt.checkpoint.converting.targets`."""
NoteCompared = Callable[[str, int], None]
"""Called with a tensor's name, and the bytes of its elements, in both checkpoints, that were compared since the last
call."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointComparison:
    """A comparison whose reads are planned.

    Args:
        a: The first checkpoint.
        b: The second checkpoint.
        differences: The differences that are known without reading elements.
        tensors: The tensors that both have.
        num_values: Plain values that both have.
        ignore: Kinds of differences that do not count.
        start: Start of the work, by `time.monotonic`.
    """

    a: Checkpoint
    b: Checkpoint
    differences: Sequence[Difference]
    tensors: Sequence[TensorComparison]
    num_values: int
    ignore: Collection[DifferenceKind]
    start: float

    @property
    def reads(self) -> list[TensorComparison]:
        """The tensors whose elements `run` reads."""
        return [tensor for tensor in self.tensors if tensor.regions]

    @property
    def nbytes(self) -> int:
        """Bytes of elements that `run` reads, of both checkpoints."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def run(self, *, max_memory: int = DEFAULT_MAX_MEMORY, progress: NoteCompared | None = None) -> DiffReport:
        """Read, and return the report. Blocks: on storage.

        Args:
            max_memory: Bound on the bytes of elements in memory.
            progress: See `NoteCompared`.

        Raises:
            ConfigError: The bound is too small for one of the stored chunks.
            CheckpointCorruptError: Stored bytes are not the bytes that were saved.
            CheckpointConflictError: A save replaced a checkpoint meanwhile.
            StorageError: Storage refused.
        """
        found = [*self.differences, *self._read(max_memory, progress)]
        order = list(DifferenceKind)
        found.sort(key=lambda difference: (natural_key(difference.path), order.index(difference.kind)))
        return DiffReport(
            a=self.a.path,
            b=self.b.path,
            differences=tuple(difference for difference in found if difference.kind not in self.ignore),
            num_tensors=len(self.tensors),
            num_values=self.num_values,
            num_by_digest=sum(tensor.is_by_digest for tensor in self.tensors),
            num_read=len(self.reads),
            nbytes=self.nbytes,
            seconds=time.monotonic() - self.start,
        )

    def _read(self, max_memory: int, progress: NoteCompared | None) -> Iterator[Difference]:
        totals = {tensor.path: ElementDifferences() for tensor in self.tensors if tensor.is_known_different}
        if reads := self.reads:
            totals |= {tensor.path: ElementDifferences() for tensor in reads}
            budget = BatchBudget.of([[tensor.infos[side] for tensor in reads] for side in (0, 1)], max_memory)
            for piece, (a, b) in read_ahead((self.a, self.b), _pieces(reads, budget), budget):
                dtype_a, dtype_b = (info.stored_dtype_name for info in piece.infos)
                totals[piece.path] += ElementDifferences.of(a, b, (dtype_a, dtype_b), piece.region)
                if progress is not None:
                    progress(piece.path, a.nbytes + b.nbytes)
        for path, total in totals.items():
            if total.num_different:
                yield Difference(path, DifferenceKind.ELEMENTS, elements=total)
        for tensor in self.tensors:
            if tensor.is_known_different and not totals[tensor.path].num_different:
                reason = "content digests differ, and no element does; dtckpt verify tells which is wrong"
                yield Difference(tensor.path, DifferenceKind.UNKNOWN, reason=reason)


def _pieces(reads: Sequence[TensorComparison], budget: BatchBudget) -> Iterator[SelectedPiece]:
    for tensor in reads:
        for region in tensor.regions:
            yield from cut_pieces(tensor.path, tensor.infos, Selection.of(region), budget)


def plan_comparison(
    a: Checkpoint,
    b: Checkpoint,
    *,
    select: Sequence[str] = (),
    rename: Rename | None = None,
    reads: Reads = Reads.NEEDED,
    ignore: Collection[DifferenceKind] = (),
) -> CheckpointComparison:
    """Compare everything but elements, and plan which elements are read.

    Args:
        a: The first checkpoint.
        b: The second checkpoint.
        select: Globs over names of tensors and paths of values: only these are compared. Default: everything.
        rename: New names of the first checkpoint's tensors and values, as for `dtckpt.convert`. Then ``select`` chooses
            among its names before, and the second checkpoint is compared as a whole.
        reads: Which elements are read. With `Reads.NONE` also the content digests count that another library's files
            note.
        ignore: Kinds of differences that do not count. If they include the elements, no elements are read.

    Raises:
        TensorNotFoundError: A glob or a rule matches nothing.
        TensorNameError: A rule gives two tensors one name.
    """
    start = time.monotonic()
    validate_rename({} if rename is None else rename)
    # In a file of torch.save optimizers number their parameters, and elsewhere they may have names.
    numbers = a.format != b.format and NUMBERED in (a.format, b.format)
    first = _Side.of(a, select, is_numbered=numbers)
    second = _Side.of(b, select if rename is None else (), is_numbered=numbers)
    _validate_all_used(select, *([first, second] if rename is None else [first]))
    if rename is not None:
        first = first.renamed(rename)
    has_elements = DifferenceKind.ELEMENTS not in ignore
    reads = reads if has_elements else Reads.NONE
    is_trusted = reads is Reads.NONE or a.format == b.format == KIND
    differences = [*_path_differences(first, second)]
    if not select:
        differences += (Difference(name, DifferenceKind.FILE, a="not read") for name in a.unread)
        differences += (Difference(name, DifferenceKind.FILE, b="not read") for name in b.unread)
    tensors = []
    for path in first.names:
        if path in second.names:
            tensor = compare_tensors(path, first.info(path), second.info(path), reads, has_trusted_contents=is_trusted)
            tensors.append(tensor)
            # A tensor's difference is unknown only in its elements, so it goes if elements do not count.
            differences += (
                each for each in tensor.differences if has_elements or each.kind is not DifferenceKind.UNKNOWN
            )
    num_values = sum(leaf.type == VALUE and path in second.leaves for path, leaf in first.leaves.items())
    return CheckpointComparison(a, b, differences, tensors, num_values, ignore, start)


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """The compared part of one checkpoint, by path.

    Args:
        checkpoint: The checkpoint.
        leaves: Tensors, values, and containers.
        names: By path of a tensor, its name in the checkpoint.
        refused: Why a tensor or value cannot be read, by its path.
    """

    checkpoint: Checkpoint
    leaves: Mapping[str, TreeItem]
    names: Mapping[str, str]
    refused: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Checkpoint, select: Sequence[str], *, is_numbered: bool) -> _Side:
        # One expression for all globs: there may be many tensors.
        is_wanted = re.compile("|".join(map(fnmatch.translate, select or ["*"]))).match
        structure, moved = with_numbers(checkpoint.structure) if is_numbered else (checkpoint.structure, {})
        old = {new: name for name, new in moved.items()}
        leaves = {
            path: leaf for path, leaf in tree_items(structure) if is_wanted(path) or is_wanted(old.get(path, path))
        }
        names = {path: old.get(path, path) for path, leaf in leaves.items() if leaf.is_tensor}
        refused = {path: error.message for path, error in checkpoint.refused.items() if is_wanted(path)}
        return cls(checkpoint, leaves, names, refused)

    def renamed(self, rules: Rename) -> _Side:
        """Return this with new paths, and without containers, of which new paths tell nothing."""
        kept = {path: leaf for path, leaf in self.leaves.items() if not leaf.is_container}
        new = renamed(rules, [*kept, *self.refused])
        return _Side(
            self.checkpoint,
            {new.get(path, path): leaf for path, leaf in kept.items()},
            {new.get(path, path): name for path, name in self.names.items()},
            {new.get(path, path): reason for path, reason in self.refused.items()},
        )

    def info(self, path: str) -> TensorInfo:
        """Return the tensor at a path."""
        return self.checkpoint.info(self.names[path])

    def fact(self, path: str) -> Fact:
        """Return the fact that a report gives about a tensor or value that the other side lacks."""
        leaf = self.leaves[path]
        if leaf.is_tensor:
            info = self.info(path)
            return TensorFacts(info.shape, info.dtype_name, info.nbytes)
        return PlainValue(leaf.node) if leaf.type == VALUE else f"empty {leaf.type}"


def _validate_all_used(select: Sequence[str], *sides: _Side) -> None:
    paths = [path for side in sides for path in (*side.leaves, *side.refused)]
    for pattern in select:
        if not fnmatch.filter(paths, pattern):
            where = " nor ".join(str(side.checkpoint.path) for side in sides)
            names = dict.fromkeys(name for side in sides for name in side.checkpoint.tensors)
            raise TensorNotFoundError(f"nothing in {where} matches {pattern!r}; tensors are {capped(map(repr, names))}")


def _path_differences(a: _Side, b: _Side) -> Iterator[Difference]:
    """Yield the differences of everything but tensors that both sides have."""
    refused = dict(b.refused) | dict(a.refused)
    for path, reason in refused.items():
        yield Difference(path, DifferenceKind.UNKNOWN, reason=reason)
    for path, leaf in a.leaves.items():
        other = b.leaves.get(path)
        if path in refused:
            continue
        # A container is there as long as something is in it.
        if other is None:
            if not leaf.is_container:
                yield Difference(path, DifferenceKind.MISSING, a=a.fact(path))
        elif leaf.type != other.type:
            yield Difference(path, DifferenceKind.TYPE, leaf.type, other.type)
        elif leaf.node != other.node:
            yield Difference(path, DifferenceKind.VALUE, PlainValue(leaf.node), PlainValue(other.node))
    for path, leaf in b.leaves.items():
        if path not in a.leaves and path not in refused and not leaf.is_container:
            yield Difference(path, DifferenceKind.EXTRA, b=b.fact(path))


VALUE = "value"
_TENSOR = "tensor"


@dataclass(frozen=True, slots=True)
class TreeItem:
    """A leaf of a tree, or a container.

    Args:
        type: ``tensor``, ``ndarray``, ``value``, or the type of a container.
        node: The node of a plain value, as JSON; else empty.
        is_container: Whether there are others below it.
    """

    type: str
    node: str = ""
    is_container: bool = False

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor, or an array that is stored as one."""
        return self.type in (_TENSOR, "ndarray")


def tree_items(node: trees.Node, path: tuple[str, ...] = ()) -> Iterator[tuple[str, TreeItem]]:
    """Yield ``(path, leaf)`` of all nodes at and below a node. The path of a tensor is its name."""
    opened = trees.items_of(node)
    if opened is None:
        name = trees.name_of_tensor(node)
        if name is not None:
            yield name, TreeItem(next(iter(node)))
        else:
            yield "/".join(path), TreeItem(VALUE, json.dumps(node, sort_keys=True))
        return
    base, items = opened
    yield "/".join(path), TreeItem(_container_type(node, base, items), is_container=bool(items))
    for key, child in items:
        if "tensor" in child:  # spares a call for each of many tensors
            yield child["tensor"], TreeItem(_TENSOR)
        else:
            yield from tree_items(child, (*path, str(key)))


def _container_type(node: trees.Node, base: str, items: list[tuple[object, trees.Node]]) -> str:
    """Return the name of a container's type, with its argument, and with types of keys that paths do not show."""
    if "type" in node:
        name, argument, _ = node["type"]
        return name if argument is None else f"{name} {json.dumps(argument, sort_keys=True)}"
    # The keys 1 and "1" have one path.
    keys = sorted({type(key).__name__ for key, _ in items if base == "dict" and type(key) is not str})
    return f"{base} with keys of type {', '.join(keys)}" if keys else base
