"""The tree of a DeepSpeed checkpoint: parameters, optimizer state by their names, and the client's items at the top.

The parameters are the fp32 vectors where an optimizer has them. The other items of the module are buffers, frozen
parameters, and names of tied parameters. Slices of tensor parallelism stay apart, below ``mp_00``, ``mp_01`` and so on,
because no file tells along which dim they are cut.

Source: deepspeed.utils.zero_to_fp32, deepspeed.checkpoint.ds_to_universal.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from dtckpt.checkpoint.foreign.deepspeed_fields import (
    ModelFields,
    OptimizerFields,
    items_of,
    optimizer_fields,
    universal_fields,
    with_more_names,
    with_names,
)
from dtckpt.checkpoint.foreign.deepspeed_files import KIND, LAYER, OPTIMIZER_STATE, DeepspeedFiles
from dtckpt.checkpoint.foreign.deepspeed_layout import (
    FP32,
    RankVectors,
    Shape,
    cut_ranges,
    joined_ranges,
    missing_regions,
    scalar_of,
    vector_of,
)
from dtckpt.checkpoint.foreign.flat_vectors import FlatRange, tensor_of_ranges
from dtckpt.checkpoint.foreign.pickle_syntax import NODE_NBYTES, TENSOR_NBYTES, Pairs, ReadBudget
from dtckpt.checkpoint.foreign.pickled_tensors import is_tensor, tensor_view
from dtckpt.checkpoint.foreign.pickled_tree import read_tree
from dtckpt.checkpoint.foreign.torch_files import TorchStream
from dtckpt.checkpoint.reading.pieces import MAX_PIECES, PieceIndex, PieceTensor
from dtckpt.errors import CheckpointCorruptError, DtckptError, TreeError
from dtckpt.format import tree as trees
from dtckpt.format.names import name_of_key
from dtckpt.storage.folder import Folder


def read_index(folder: Folder, names: Collection[str]) -> PieceIndex:
    """Read the files of all processes, but for the elements. Blocks: on storage.

    Args:
        folder: The directory.
        names: The names in it.

    Raises:
        CheckpointCorruptError: A file is missing or malformed, or the files contradict each other.
        CheckpointVersionError: A file is of an optimizer that this version does not know.
    """
    files = DeepspeedFiles(folder, names)
    count = max(1, files.model(0)[0].world)
    if count > MAX_PIECES:
        raise CheckpointCorruptError(f"{folder} has {count} model slices, expected at most {MAX_PIECES}")
    tree = _Tree(files.budget)
    layers = [match for match in map(LAYER.fullmatch, sorted(names)) if match is not None]
    is_sliced = count > 1 and not (layers and all(int(layer[2]) == 0 for layer in layers)) and not files.universal
    if layers and is_sliced:
        tree.notes.append("the layers of a pipeline whose stages are also sliced are left out: their files are unread")
        layers = []
    if is_sliced:
        tree.notes.append("slices of the model are kept apart (mp_00, mp_01, …): no file tells how to join them")
        node = {
            "dict": [[top, _Part(files, tree, (top,)).read([mp], [])] for mp in range(count) if (top := f"mp_{mp:02d}")]
        }
    else:
        node = _Part(files, tree, ()).read(range(count), [layer[0] for layer in layers])
    unread = files.unread()
    return PieceIndex(KIND, tree.tensors, node, tree.refused, files.used(), unread, tuple(tree.notes))


class _Tree:
    """The tensors of the tree, and what cannot be read.

    Args:
        budget: Bounds the objects made.
    """

    def __init__(self, budget: ReadBudget) -> None:
        self.budget = budget
        self.tensors: dict[str, PieceTensor] = {}
        self.refused: dict[str, DtckptError] = {}
        self.notes: list[str] = []

    def values(self, value: Any, path: tuple[str, ...], stream: TorchStream) -> trees.Node:
        """Return the node of a pickled value, and take its tensors."""
        tree = read_tree(value, path, self.budget)
        self.refused |= tree.refused
        for tensor in stream.tensors(tree.leaves).values():
            self.tensor(tensor)
        return tree.node

    def tensor(self, tensor: PieceTensor) -> trees.Node:
        """Return the node of a tensor, and take it."""
        if tensor.name in self.tensors:
            raise CheckpointCorruptError(f"two tensors of the checkpoint would both be named {tensor.name[:200]!r}")
        self.budget.take(TENSOR_NBYTES)
        self.tensors[tensor.name] = tensor
        return {"tensor": tensor.name}


@dataclass(frozen=True, slots=True, eq=False)
class _Optimizer:
    """The state of a model slice's optimizer.

    Args:
        parameters: By parameter, by kind, a tensor or a number.
        param_groups: The groups' options, with names of parameters.
        rest: Other values.
        stream: The file that they are from.
    """

    parameters: dict[str, dict[str, PieceTensor | float]]
    param_groups: list[Any]
    rest: Pairs
    stream: TorchStream


class _Part:
    """Reads a model, or a slice of it.

    Args:
        files: The files.
        tree: Takes the tensors.
        top: The path of the model in the tree.
    """

    def __init__(self, files: DeepspeedFiles, tree: _Tree, top: tuple[str, ...]) -> None:
        self._files = files
        self._tree = tree
        self._top = top

    def _name(self, *path: str) -> str:
        return "/".join((*self._top, *map(name_of_key, path)))

    def read(self, slices: Sequence[int], layers: Sequence[str]) -> trees.Node:
        """Return the node of the tree.

        Args:
            slices: Numbers of the model files whose parameters make up the model.
            layers: The files of the layers of a pipeline.
        """
        module: dict[str, trees.Node] = {}
        optimizers: list[_Optimizer] = []
        for mp in slices:
            fields, stream = self._files.model(mp)
            optimizer = self._universal(fields) if self._files.universal else self._zero(mp, fields)
            if optimizer is not None and not (self._files.universal and optimizers):
                optimizers.append(optimizer)
                self._add_masters(module, optimizer)
            self._add_module(module, fields, stream, mp)
            if self._files.is_by_process(mp):
                self._add_frozen(module, mp, fields)
            self._add_tied(module, fields)
        for name in layers:
            self._add_layer(module, name)
        fields, stream = self._files.model(slices[0])
        parts: list[list[Any]] = [["module", {"dict": list(map(list, module.items()))}]]
        if optimizers:
            parts.append(["optimizer", self._optimizer_node(optimizers)])
        elif fields.optimizer is not None:
            parts.append(["optimizer", self._tree.values(fields.optimizer, (*self._top, "optimizer"), stream)])
        return {"dict": [*parts, *self._rest(slices[0], fields, stream)]}

    # --- parameters -----------------------------------------------------------------------------------------------

    def _add_masters(self, module: dict[str, trees.Node], optimizer: _Optimizer) -> None:
        for name, kinds in optimizer.parameters.items():
            if isinstance(tensor := kinds.get(FP32), PieceTensor):
                if name in module:
                    raise CheckpointCorruptError(f"two model files have a parameter {name[:200]!r}")
                module[name] = self._tree.tensor(self._renamed(tensor, name, FP32))

    def _add_module(self, module: dict[str, trees.Node], fields: ModelFields, stream: TorchStream, mp: int) -> None:
        """Add what the module has beside the optimizer's parameters: buffers, frozen parameters; all with ZeRO 0."""
        rest = Pairs()
        if not self._files.is_by_process(mp) and (copies := module.keys() & (fields.module or {}).keys()):
            self._tree.notes.append(
                f"{self._name('module')}: the model file's copies of {len(copies)} parameters are left, which are the "
                "optimizer's fp32 values, rounded"
            )
        for name, value in (fields.module or {}).items():
            is_elsewhere = name in fields.frozen_shapes or name in fields.shared
            is_empty = is_tensor(value) and tensor_view(value, name).shape == (0,) and self._files.is_by_process(mp)
            if name in module or (is_empty and is_elsewhere) or self._is_tied(fields, name, module):
                continue
            if is_empty and name not in fields.buffers:
                self._refuse(name, "its parts are in no file")
            else:
                rest.append((name, value))
        self._add_items(module, rest, stream)

    def _add_items(self, module: dict[str, trees.Node], pairs: Pairs, stream: TorchStream) -> None:
        node = self._tree.values(pairs, (*self._top, "module"), stream)
        module |= dict(node["dict"])

    def _add_layer(self, module: dict[str, trees.Node], file: str) -> None:
        """Add the module of a layer of a pipeline, but for what the optimizer has: its names begin with its number."""
        stream = self._files.open(file)
        number = int(file.split("-", 1)[0].removeprefix("layer_"))
        pairs = Pairs(
            (f"{number}.{name}", value) for name, value in items_of(stream.zip.value, file, self._tree.budget).items()
        )
        self._add_items(module, Pairs(pair for pair in pairs if pair[0] not in module), stream)

    def _add_frozen(self, module: dict[str, trees.Node], mp: int, fields: ModelFields) -> None:
        """Add the parameters that no optimizer has, of which each process has an equal part."""
        if not fields.frozen_shapes:
            return
        parts = [self._files.model(mp, dp) for dp in range(self._count(fields))]
        for name, shape in fields.frozen_shapes.items():
            if name in module:
                continue
            vectors = [[self._vector(each.frozen.get(name), name, stream)] for each, stream in parts]
            for _, ranges in cut_ranges({name: shape}, vectors, str(self._files.folder)):
                module[name] = self._tree.tensor(self._joined(("module", name), shape, ranges))

    def _add_tied(self, module: dict[str, trees.Node], fields: ModelFields) -> None:
        for name, kept in fields.shared.items():
            if self._is_tied(fields, name, module):
                tensor = self._tree.tensors[module[kept]["tensor"]]
                module[name] = self._tree.tensor(self._renamed(tensor, name, FP32))
            elif name not in module:
                self._refuse(name, f"the file ties it to {kept[:80]!r}, and the module does not")

    def _is_tied(self, fields: ModelFields, name: str, module: Mapping[str, trees.Node]) -> bool:
        """Whether a parameter is another one, which is known. Some old files tie everything: their module tells."""
        kept = fields.shared.get(name, name)
        values = fields.module or {}
        if (
            kept == name
            or kept not in module
            or "tensor" not in module[kept]
            or not {name, kept} <= values.keys()
            or name in module
        ):
            return False
        if not (is_tensor(values[name]) and is_tensor(values[kept])):
            return False
        return tensor_view(values[name], name) == tensor_view(values[kept], kept)

    def _renamed(self, tensor: PieceTensor, name: str, kind: str) -> PieceTensor:
        """Return a tensor under the name that a parameter's tensor of a kind has."""
        own = self._name(*_path(name, kind))
        return tensor if tensor.name == own else replace(tensor, name=own)

    def _refuse(self, name: str, reason: str) -> None:
        self._tree.refused[self._name("module", name)] = TreeError(f"cannot read parameter {name[:200]!r}: {reason}")

    def _vector(self, value: Any, where: str, stream: TorchStream) -> PieceTensor:
        where = f"{stream.file}: {where}"
        return stream.tensors({where: tensor_view(value, where)})[where]

    def _joined(self, path: tuple[str, ...], shape: Shape, ranges: Sequence[FlatRange], dtype: str = "") -> PieceTensor:
        dtype = dtype or (ranges[0].vector.dtype if ranges else "float32")
        return tensor_of_ranges(self._name(*path), shape, dtype, ranges, self._tree.budget)

    def _count(self, fields: ModelFields) -> int:
        """Return the number of processes that a parameter is cut for."""
        count = dict(fields.rest).get("dp_world_size")
        if type(count) is not int or not 1 <= count <= MAX_PIECES:
            raise CheckpointCorruptError(f"the files in {self._files.folder} do not tell the number of processes")
        return count

    # --- optimizers -----------------------------------------------------------------------------------------------

    def _universal(self, fields: ModelFields) -> _Optimizer:
        """Read the parameters of a universal checkpoint."""
        stream = self._files.open(OPTIMIZER_STATE)
        groups, rest = universal_fields(stream.zip.value, OPTIMIZER_STATE, self._tree.budget)
        shapes = {name: shape for group in fields.shapes for name, shape in group.items()} | fields.frozen_shapes
        places = [(name, kind, file) for name, own in self._files.universal.items() for kind, file in own.items()]
        parameters: dict[str, dict[str, PieceTensor | float]] = {name: {} for name in self._files.universal}
        for (name, kind, file), each in zip(places, self._files.open_all(file for _, _, file in places), strict=True):
            held: Any = each.zip.value
            value: Any = (
                held
                if is_tensor(held) or type(held) in (int, float)
                else items_of(held, file, self._tree.budget).get("param")
            )
            if is_tensor(value):
                tensor = self._vector(value, kind, each)
                # From ZeRO 3, flat: only the model's files have the shape.
                shape = shapes.get(name, tensor.shape)
                if len(tensor.shape) == 1 and tensor.shape != shape and fields.world == 1:
                    if tensor.shape[0] != math.prod(shape):
                        raise CheckpointCorruptError(f"{file} has {tensor.shape[0]} elements, expected shape {shape}")
                    ranges = [FlatRange(tensor, 0, 0, tensor.shape[0])]
                    tensor = self._joined(_path(name, kind), shape, ranges, tensor.dtype)
                parameters[name][kind] = tensor
            elif type(value) in (int, float):
                parameters[name][kind] = value
            else:
                raise CheckpointCorruptError(f"{self._files.folder}/{file} holds no tensor")
        for name in sorted(fields.shared.keys() & parameters.keys()):
            self._tree.notes.append(
                f"{self._name('module', name)}: DeepSpeed ties it to {fields.shared[name][:80]!r}; its file may be the "
                "rounded copy of that parameter"
            )
        names = [list(group) for group in fields.shapes]
        return _Optimizer(parameters, with_names(groups, names, self._tree.budget), rest, stream)

    def _zero(self, mp: int, fields: ModelFields) -> _Optimizer | None:
        """Read the vectors of all processes; None without ZeRO."""
        if (form := self._files.optimizer_form(mp)) is None:
            return None
        first_file = next(
            (each for dp in range(MAX_PIECES) if self._files.has(each := form.format(dp=dp, mp=mp))),
            form.format(dp=0, mp=mp),
        )
        first = optimizer_fields(self._files.open(first_file).zip.value, first_file, self._tree.budget)
        count = max(first.counts, default=0)
        if not 1 <= count <= MAX_PIECES:
            raise CheckpointCorruptError(f"{first_file} is for {count} processes, expected 1 to {MAX_PIECES}")
        names = [form.format(dp=dp, mp=mp) for dp in range(count)]
        for dp, name in enumerate(names):
            if not self._files.has(name):
                lost = missing_regions(fields.shapes, count, dp, is_cut=first.is_cut)
                raise CheckpointCorruptError(
                    f"{self._files.folder}/{name} is missing, one of {count}; it would hold parts of {lost}; use "
                    "another copy, or restore another checkpoint"
                )
        streams = self._files.open_all(names)
        ranks = [self._rank(optimizer_fields(each.zip.value, each.file, self._tree.budget), each) for each in streams]
        parameters = dict(self._cut(fields, ranks) if first.is_cut else self._parts(fields, first, ranks))
        vectors = [list(group) for group in fields.shapes]
        return _Optimizer(
            parameters, with_names(first.param_groups, vectors, self._tree.budget), first.rest, streams[0]
        )

    def _rank(self, fields: OptimizerFields, stream: TorchStream) -> RankVectors:
        leaves = {
            (number, kind): tensor_view(value, f"{stream.file}: {kind} of group {number}")
            for number, group in enumerate(fields.groups)
            for kind, value in group.items()
            if is_tensor(value)
        }
        tensors = stream.tensors(
            {f"{stream.file}: {kind} of group {number}": leaf for (number, kind), leaf in leaves.items()}
        )
        groups: list[dict[str, PieceTensor | float]] = [
            {kind: value for kind, value in group.items() if type(value) in (int, float)} for group in fields.groups
        ]
        for (number, kind), tensor in zip(leaves, tensors.values(), strict=True):
            groups[number][kind] = tensor
        return RankVectors(stream.file, groups, fields.slices, fields.gaps)

    def _parts(
        self, fields: ModelFields, first: OptimizerFields, ranks: Sequence[RankVectors]
    ) -> Iterator[tuple[str, dict[str, PieceTensor | float]]]:
        """Yield the parameters of ZeRO 1 and 2."""
        groups = ranks[0].groups
        if {len(rank.groups) for rank in ranks} != {len(fields.shapes)}:
            raise CheckpointCorruptError(
                f"{ranks[0].file} has {len(groups)} groups, expected {len(fields.shapes)} as the model file describes"
            )
        for number, shapes in enumerate(fields.shapes):
            own = first.counts[min(number, len(first.counts) - 1)]
            if own != len(ranks):
                for name in shapes:
                    self._refuse(name, f"its group is cut for {own} processes, others for {len(ranks)}, as experts are")
                continue
            found: dict[str, dict[str, PieceTensor | float]] = {name: {} for name in shapes}
            for kind in groups[number]:
                scalar = scalar_of(groups[number][kind])
                if scalar is not None:
                    self._tree.budget.take(NODE_NBYTES * len(found))
                    for kinds in found.values():
                        kinds[kind] = scalar
                    continue
                dtype = vector_of(ranks[0], number, kind).dtype
                for name, ranges in joined_ranges(shapes, number, kind, ranks):
                    path = _path(name, kind)
                    found[name][kind] = self._joined(path, shapes[name], ranges, dtype)
            yield from found.items()

    def _cut(
        self, fields: ModelFields, ranks: Sequence[RankVectors]
    ) -> Iterator[tuple[str, dict[str, PieceTensor | float]]]:
        """Yield the parameters of ZeRO 3."""
        shapes = {name: shape for group in fields.shapes for name, shape in group.items()}
        found: dict[str, dict[str, PieceTensor | float]] = {name: {} for name in shapes}
        groups = ranks[0].groups
        for kind in dict.fromkeys(chain.from_iterable(groups)):
            scalars = [scalar_of(group.get(kind)) for group in groups]
            if scalars[0] is not None:
                for number, own in enumerate(fields.shapes):
                    if (scalar := scalars[min(number, len(scalars) - 1)]) is not None:
                        self._tree.budget.take(NODE_NBYTES * len(own))
                        for name in own:
                            found[name][kind] = scalar
                continue
            vectors = [[vector_of(rank, number, kind) for number in range(len(groups))] for rank in ranks]
            for name, ranges in cut_ranges(shapes, vectors, ranks[0].file):
                path = _path(name, kind)
                found[name][kind] = self._joined(path, shapes[name], ranges, vectors[0][0].dtype)
        yield from found.items()

    def _optimizer_node(self, optimizers: Sequence[_Optimizer]) -> trees.Node:
        state: list[list[Any]] = []
        for name, kinds in ((name, kinds) for each in optimizers for name, kinds in each.parameters.items()):
            own = [
                [
                    kind,
                    self._tree.tensor(self._renamed(value, name, kind))
                    if isinstance(value, PieceTensor)
                    else {"value": value},
                ]
                for kind, value in kinds.items()
                if kind != FP32
            ]
            if own:
                state.append([name, {"dict": own}])
        first = optimizers[0]
        groups = first.param_groups
        for other in optimizers[1:]:  # the stages of a pipeline have the same groups, each with its own parameters
            groups = with_more_names(groups, other.param_groups, self._tree.budget)
        path = (*self._top, "optimizer")
        rest = self._tree.values(first.rest, path, first.stream)
        options = self._tree.values(groups, (*path, "param_groups"), first.stream)
        return {"dict": [["state", {"dict": state}], ["param_groups", options], *rest["dict"]]}

    # --- the client's state ---------------------------------------------------------------------------------------

    def _rest(self, mp: int, fields: ModelFields, stream: TorchStream) -> list[list[Any]]:
        """Return the items of the client's state: one value, or one for each process if theirs differ."""
        if not self._files.is_by_process(mp):
            return list(self._tree.values(fields.rest, self._top, stream)["dict"])
        parts = [self._files.model(mp, dp) for dp in range(self._count(fields))]
        result: list[list[Any]] = []
        for name, value in fields.rest:
            own = [(dict(each.rest).get(name), each_stream) for each, each_stream in parts]
            trials = [read_tree(Pairs([(name, each)]), self._top, self._tree.budget) for each, _ in own]
            if len({trees.dump(each.node) for each in trials}) == 1 and not any(each.leaves for each in trials):
                result += self._tree.values(Pairs([(name, value)]), self._top, stream)["dict"]
                continue
            path = (*self._top, name_of_key(name))
            clients = [
                [dp, child]
                for dp, (each, each_stream) in enumerate(own)
                for _, child in self._tree.values(Pairs([(str(dp), each)]), path, each_stream)["dict"]
            ]
            result.append([name, {"type": ["PerClient", len(own), {"dict": clients}]}])
        return result


def _path(name: str, kind: str) -> tuple[str, ...]:
    """Return the path of a parameter's tensor of a kind."""
    return ("module", name) if kind == FP32 else ("optimizer", "state", name, kind)
