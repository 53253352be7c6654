"""The tree of a DeepSpeed checkpoint: parameters, optimizer state by their names, and the client's items at the top.

The parameters are the fp32 vectors where an optimizer has them. The other items of the module are buffers, frozen
parameters, and names of tied parameters. Slices of tensor parallelism are joined if a file tells how; else they stay
apart, below ``mp_00``, ``mp_01`` and so on.

Source: deepspeed.utils.zero_to_fp32, deepspeed.checkpoint.ds_to_universal.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from dtckpt.checkpoint.foreign.deepspeed_files import (
    EXPERT,
    EXPERT_OPTIMIZER,
    KIND,
    LAYER,
    OPTIMIZER_STATE,
    UNIVERSAL,
    DeepspeedFiles,
)
from dtckpt.checkpoint.foreign.deepspeed_layout import (
    FP32,
    RankVectors,
    Shape,
    cut_pieces,
    joined_pieces,
    missing_regions,
    scalar_of,
    vector_of,
)
from dtckpt.checkpoint.foreign.deepspeed_slices import (
    INFO,
    SAME,
    SliceRules,
    joined_tensor,
    slice_rules,
    validate_version,
)
from dtckpt.checkpoint.foreign.flat_vectors import BoxCounts, FlatPieces, FlatRange, FlatVectors, tensor_of_ranges
from dtckpt.checkpoint.foreign.pickle_syntax import NODE_NBYTES, TENSOR_NBYTES, Pairs, ReadBudget
from dtckpt.checkpoint.foreign.pickled_tensors import is_tensor, tensor_view
from dtckpt.checkpoint.foreign.pickled_tree import read_tree
from dtckpt.checkpoint.foreign.torch_files import StreamTensor, TorchStream
from dtckpt.checkpoint.reading.pieces import MAX_PIECES, PieceIndex, PieceTensor
from dtckpt.errors import CheckpointCorruptError, DtckptError, TreeError
from dtckpt.format import tree as trees
from dtckpt.format.names import name_of_key
from dtckpt.layout.region import Region
from dtckpt.storage.folder import Folder
from dtckpt.storage.local_folder import LocalFolder


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
    fields, stream = files.model(0)
    rest = dict(fields.rest)
    if not isinstance(folder, LocalFolder) and (fields.module is None or rest.get("num_experts")):
        names = files.list_all()  # layers and experts have files that other fields do not name
    layers = _layers(folder, names)
    degree = max(layers, default=count - 1) + 1
    if count % degree:
        raise CheckpointCorruptError(f"{folder} has layers in {degree} slices, and {count} model files")
    info = rest.get(INFO)
    if files.universal:
        if info is not None:
            validate_version(info, f"{folder}/{stream.file}", files.budget)
        node = _Part(files, tree, ()).read(range(count), layers.get(0, []))
    elif degree == 1:
        node = _Part(files, tree, ()).read(range(count), layers.get(0, []))
    else:
        rules = slice_rules(info, f"{folder}/{stream.file}", files.budget)
        is_joined = isinstance(rules, SliceRules)
        tops = [() if is_joined and not slice_ else (f"mp_{slice_:02d}",) for slice_ in range(degree)]
        nodes = [
            _Part(files, tree, top).read(range(slice_, count, degree), layers.get(slice_, []))
            for slice_, top in enumerate(tops)
        ]
        if isinstance(rules, SliceRules):
            node = _Join(tree, rules, [files.model(mp)[0] for mp in range(0, count, degree)]).node(nodes)
        else:
            tree.notes.append(f"slices of the model are kept apart (mp_00, mp_01, …): {rules}")
            node = {"dict": [["".join(top), each] for top, each in zip(tops, nodes, strict=True)]}
    unread = files.unread()
    return PieceIndex(KIND, tree.tensors, node, tree.refused, files.used(), unread, tuple(tree.notes))


def _layers(folder: Folder, names: Collection[str]) -> dict[int, list[str]]:
    """Return the files of a pipeline's layers by slice, in their order.

    Raises:
        CheckpointCorruptError: A slice has a layer that another slice lacks.
    """
    found: dict[int, dict[int, str]] = {}
    for match in sorted(filter(None, map(LAYER.fullmatch, names)), key=lambda match: int(match[1])):
        found.setdefault(int(match[2]), {})[int(match[1])] = match[0]
    numbers = sorted({number for own in found.values() for number in own})
    for slice_ in range(max(found, default=-1) + 1):
        missing = next((number for number in numbers if number not in found.get(slice_, {})), None)
        if missing is not None:
            raise CheckpointCorruptError(
                f"{folder}/layer_{missing:02d}-model_{slice_:02d}-model_states.pt is missing; it would hold slice "
                f"{slice_} of layer {missing}; use another copy, or restore another checkpoint"
            )
    return {slice_: list(own.values()) for slice_, own in found.items()}


class _Tree:
    """The tensors of the tree, and what cannot be read.

    Args:
        budget: Bounds the objects made.
    """

    def __init__(self, budget: ReadBudget) -> None:
        self.budget = budget
        self.counts = BoxCounts(budget)
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


class _Join:
    """Joins the trees of the slices of a model.

    Args:
        tree: Has the tensors; the tensors of the first slice have the names of the whole.
        rules: How the slices make up the parameters.
        stages: The model files of the first slice.
    """

    def __init__(self, tree: _Tree, rules: SliceRules, stages: Sequence[ModelFields]) -> None:
        self._tree = tree
        self._rules = rules
        self._shared = {name: kept for each in stages for name, kept in each.shared.items()}
        self._parameters = {name for each in stages for group in (*each.shapes, each.frozen_shapes) for name in group}
        self._buffers = {name for each in stages for name in each.buffers}

    def node(self, nodes: Sequence[trees.Node]) -> trees.Node:
        """Return the node of the whole. Values of a slice that the first slice lacks stay below ``mp_01`` and so on."""
        first, *others = map(_items, nodes)
        if any(("optimizer" in each) != ("optimizer" in first) for each in others):
            raise CheckpointCorruptError(
                "a slice of the model has no optimizer, and another one has: are the files of one save? use another "
                "copy, or restore another checkpoint"
            )
        whole = dict(first)
        whole["module"] = self._named(first["module"], [each["module"] for each in others])
        if "optimizer" in first:
            parts = [_items(each["optimizer"]) for each in (first, *others)]
            states = [_items(each["state"]) if "state" in each else {} for each in parts]
            state = {
                name: self._named(own, [each.get(name, {"dict": []}) for each in states[1:]], name)
                for name, own in states[0].items()
            }
            whole["optimizer"] = _dict(parts[0] | ({"state": _dict(state)} if "state" in parts[0] else {}))
        self._tree.notes.append(
            f"the slices of tensor parallelism are joined as {INFO} tells; of equal slices one is read"
        )
        for name in filter(self._rules.is_padded, sorted(self._parameters)):
            self._tree.notes.append(f"module/{name[:200]}: its last rows may be padding of the vocabulary")
        for number, other in enumerate(others, start=1):
            rest = {name: each for name, each in other.items() if name not in ("module", "optimizer")}
            more = {name: each for name, each in rest.items() if trees.dump(each) != trees.dump(first.get(name, {}))}
            if "optimizer" in other:
                own = {name: each for name, each in _items(other["optimizer"]).items() if name != "state"}
                known = _items(first.get("optimizer", _dict({})))
                own = {name: each for name, each in own.items() if trees.dump(each) != trees.dump(known.get(name, {}))}
                more |= {"optimizer": _dict(own)} if own else {}
            if more:
                whole[f"mp_{number:02d}"] = _dict(more)
        return _dict(whole)

    def _named(self, node: trees.Node, others: Sequence[trees.Node], parameter: str | None = None) -> trees.Node:
        """Return the node of a dict of parameters by name, or of a parameter's state by kind."""
        own, slices = _items(node), [_items(each) for each in others]
        for each in slices:
            if each.keys() != own.keys():
                lost = sorted(map(str, each.keys() ^ own.keys()))
                raise CheckpointCorruptError(
                    f"the slices of the model have other parameters, such as {lost[0][:200]!r}"
                )
        return _dict(
            {
                name: joined
                for name, child in own.items()
                if (joined := self._joined(parameter or str(name), child, [each[name] for each in slices])) is not None
            }
        )

    def _joined(self, parameter: str, node: trees.Node, others: Sequence[trees.Node]) -> trees.Node | None:
        """Return the node of a parameter, or of a kind of its state; None if its slices cannot be joined."""
        if "tensor" not in node or any("tensor" not in each for each in others):
            if any(each != node for each in others):
                raise CheckpointCorruptError(f"the slices of the model differ about {parameter[:200]!r}")
            return node
        tensors = self._tree.tensors
        slices = [tensors[node["tensor"]], *(tensors.pop(each["tensor"]) for each in others)]
        try:
            way = self._way(parameter) if slices[0].shape else SAME
            tensors[node["tensor"]] = joined_tensor(slices, way, self._tree.budget)
        except TreeError as error:
            del tensors[node["tensor"]]
            self._tree.refused[node["tensor"]] = error
            return None
        return node

    def _way(self, name: str) -> str:
        """Return how slices make up a parameter; slices have the same buffers."""
        kept = self._shared.get(name, name)
        # Without ZeRO no file lists the parameters.
        is_parameter = kept in self._parameters if self._parameters else kept not in self._buffers
        return self._rules.way(kept) if is_parameter else SAME


def _items(node: trees.Node) -> dict[Any, trees.Node]:
    return dict(node["dict"])


def _dict(items: Mapping[Any, trees.Node]) -> trees.Node:
    return {"dict": [[name, child] for name, child in items.items()]}


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
        self._segments: dict[str, str] = {}
        """By key, its form in names."""

    def _name(self, *path: str) -> str:
        known = self._segments
        return "/".join((*self._top, *(known.get(key) or known.setdefault(key, name_of_key(key)) for key in path)))

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
        for mp in slices:
            self._add_experts(module, mp)
        fields, stream = self._files.model(slices[0])
        parts: list[list[Any]] = [["module", {"dict": list(map(list, module.items()))}]]
        if optimizers:
            parts.append(["optimizer", self._optimizer_node(optimizers)])
        elif (of_experts := self._optimizers_of_experts(slices)) is not None:
            parts.append(["optimizer", of_experts])
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
        """Add the module's tensors beside the optimizer's parameters: buffers, frozen parameters; all with ZeRO 0."""
        rest = Pairs()
        if not self._files.is_by_process(mp) and (copies := module.keys() & (fields.module or {}).keys()):
            self._tree.notes.append(
                f"{self._name('module')}: the model file's copies of {len(copies)} parameters are left, which are the "
                "optimizer's fp32 values, rounded"
            )
        is_by_process = self._files.is_by_process(mp)
        for name, value in (fields.module or {}).items():
            if name in module or self._is_tied(fields, name, module):
                continue
            is_elsewhere = name in fields.frozen_shapes or name in fields.shared
            is_empty = is_by_process and is_tensor(value) and tensor_view(value, name).shape == (0,)
            if is_empty and is_elsewhere:
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

    def _add_experts(self, module: dict[str, trees.Node], mp: int) -> None:
        """Add the experts of a mixture, each of which has a file.

        Raises:
            CheckpointCorruptError: The file of an expert is missing.
        """
        found = dict(self._files.matching(EXPERT, mp))
        if not found:
            return
        told = dict(self._files.model(mp)[0].rest).get("num_experts")
        for layer in sorted({layer for layer, _ in found}):
            count = max(number for each, number in found if each == layer) + 1
            if type(told) is list and 0 <= layer < len(told) and type(told[layer]) is int:
                count = max(count, min(told[layer], MAX_PIECES))
            for number in range(count):
                if (layer, number) not in found:
                    place = f"layer_{layer}_" if layer >= 0 else ""
                    raise CheckpointCorruptError(
                        f"{self._files.folder}/{place}expert_{number}_mp_rank_{mp:02d}_model_states.pt is missing; it "
                        f"would hold expert {number} of {count}; use another copy, or restore another checkpoint"
                    )
        for name, stream in zip(found.values(), self._files.open_all(found.values()), strict=True):
            values = items_of(stream.zip.value, name, self._tree.budget)
            if twice := values.keys() & module.keys():
                raise CheckpointCorruptError(
                    f"{stream.file} has a parameter {min(twice)[:200]!r}, and so has another file"
                )
            self._add_items(module, Pairs(values.items()), stream)
            for each in values:
                self._tree.refused.pop(self._name("module", each), None)

    def _optimizers_of_experts(self, slices: Sequence[int]) -> trees.Node | None:
        """Return the node of the optimizers of the parts of a mixture's experts, without ZeRO; None without such."""
        nodes: list[list[Any]] = []
        for mp in slices:
            for _, name in self._files.matching(EXPERT_OPTIMIZER, mp):
                stream = self._files.open(name)
                value = items_of(stream.zip.value, name, self._tree.budget).get("optimizer")
                if value is not None:
                    key = name.removesuffix("_optim_states.pt")
                    pairs = Pairs([(key, value)])
                    nodes += self._tree.values(pairs, (*self._top, "optimizer"), stream)["dict"]
        if nodes:
            self._tree.notes.append(
                f"{self._name('optimizer')}: one optimizer for each part of the experts, which number their parameters"
            )
        return {"dict": nodes} if nodes else None

    def _add_frozen(self, module: dict[str, trees.Node], mp: int, fields: ModelFields) -> None:
        """Add the parameters that no optimizer has, of which each process has an equal part."""
        if not fields.frozen_shapes:
            return
        parts = [self._files.model(mp, dp) for dp in range(self._count(fields))]
        for name, shape in fields.frozen_shapes.items():
            if name in module:
                continue
            vectors = [[self._vector(each.frozen.get(name), name, stream)] for each, stream in parts]
            for _, pieces in cut_pieces({name: shape}, vectors, str(self._files.folder), self._tree.counts):
                module[name] = self._tree.tensor(self._tensor(("module", name), shape, pieces))

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
        return tensor if tensor.name == own else tensor.renamed(own)

    def _refuse(self, name: str, reason: str) -> None:
        self._tree.refused[self._name("module", name)] = TreeError(f"cannot read parameter {name[:200]!r}: {reason}")

    def _vector(self, value: Any, where: str, stream: TorchStream) -> PieceTensor:
        where = f"{stream.file}: {where}"
        return stream.tensors({where: tensor_view(value, where)})[where]

    def _tensor(self, path: tuple[str, ...], shape: Shape, pieces: FlatPieces) -> PieceTensor:
        return PieceTensor(self._name(*path), shape, pieces.dtype, pieces)

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
        self._validate_kinds(fields)
        places = [(name, kind, file) for name, own in self._files.universal.items() for kind, file in own.items()]
        parameters: dict[str, dict[str, PieceTensor | float]] = {name: {} for name in self._files.universal}
        opened = self._files.open_params(file for _, _, file in places)
        for (name, kind, file), each in zip(places, opened, strict=True):
            if not isinstance(each, StreamTensor):
                parameters[name][kind] = each
                continue
            own, view = self._name(*_path(name, kind)), each.view
            pieces = () if 0 in view.shape else (each.piece(Region.full(view.shape), file, 0),)
            tensor = PieceTensor(own, view.shape, view.dtype, pieces)
            # From ZeRO 3, flat: only the model's files have the shape.
            shape = shapes.get(name, tensor.shape)
            if len(tensor.shape) == 1 and tensor.shape != shape and fields.world == 1:
                if tensor.shape[0] != math.prod(shape):
                    raise CheckpointCorruptError(f"{file} has {tensor.shape[0]} elements, expected shape {shape}")
                vectors = FlatVectors([tensor], tensor.dtype)
                ranges = [FlatRange(tensor, 0, 0, tensor.shape[0])]
                tensor = tensor_of_ranges(own, shape, ranges, vectors, self._tree.counts)
            parameters[name][kind] = tensor
        for name in sorted(fields.shared.keys() & parameters.keys()):
            self._tree.notes.append(
                f"{self._name('module', name)}: DeepSpeed ties it to {fields.shared[name][:80]!r}; its file may be the "
                "rounded copy of that parameter"
            )
        names = [list(group) for group in fields.shapes]
        return _Optimizer(parameters, with_names(groups, names, self._tree.budget), rest, stream)

    def _validate_kinds(self, fields: ModelFields) -> None:
        """Raise `CheckpointCorruptError` if a parameter lacks a file of a kind that others have."""
        found = self._files.universal
        apart = fields.shared.keys() | fields.frozen_shapes.keys()
        trained = {name for group in fields.shapes for name in group if name not in apart}
        kinds = {kind for name in trained & found.keys() for kind in found[name]}
        for name in sorted(found.keys() | (trained if fields.world == 1 else ())):
            for kind in sorted({FP32} | (kinds if name in trained else set())):
                if kind not in found.get(name, {}):
                    raise CheckpointCorruptError(
                        f"{self._files.folder}/{UNIVERSAL}/{name[:200]}/{kind}.pt is missing; use another copy, or "
                        "restore another checkpoint"
                    )

    def _zero(self, mp: int, fields: ModelFields) -> _Optimizer | None:
        """Read the vectors of all processes; None without ZeRO."""
        if (form := self._files.optimizer_form(mp)) is None:
            if fields.shapes:
                self._tree.notes.append(
                    f"{self._name('module')}: the optimizer's files of mp_rank_{mp:02d} are missing, so its parameters "
                    "are the 16-bit copies"
                )
            return None
        if not fields.shapes and self._files.matching(EXPERT, mp):
            self._tree.notes.append(
                f"{self._name('module')}: the 16-bit parameters; with experts the files do not have the shapes that "
                "ZeRO's vectors are made of, so these are not read"
            )
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
                for name, pieces in joined_pieces(shapes, number, kind, ranks, self._tree.counts):
                    found[name][kind] = self._tensor(_path(name, kind), shapes[name], pieces)
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
            for name, pieces in cut_pieces(shapes, vectors, ranks[0].file, self._tree.counts):
                found[name][kind] = self._tensor(_path(name, kind), shapes[name], pieces)
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
            distinct = {id(each): each for each, _ in own}.values()  # equal files were parsed once
            trials = [read_tree(Pairs([(name, each)]), self._top, self._tree.budget) for each in distinct]
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
