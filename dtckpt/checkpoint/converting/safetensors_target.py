"""Plan safetensors files, single or several with an index, as transformers and safetensors read them; pure.

Tensors keep the order of the state tree; a file is full when the next tensor would make it larger than the bound, as in
``save_pretrained``. In a file the tensors with the largest elements come first, so that all are aligned.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from dtckpt.checkpoint.converting.export import Export, ExportedTensor
from dtckpt.checkpoint.converting.file_plan import FileDigests, FilePlan, FileSlot
from dtckpt.checkpoint.foreign.safetensors_index import LENGTH_NBYTES, MAX_HEADER_NBYTES, NAMES, header_bytes
from dtckpt.checkpoint.foreign.safetensors_tree import CONTENT, FORMAT, TREE, content_text, file_names, needs_tree
from dtckpt.errors import ConfigError, DTypeError, RegionNotFoundError
from dtckpt.format import tree as trees
from dtckpt.layout.region import Region

STEM = "model"
INDEX_NAME = f"{STEM}.safetensors.index.json"


def is_own(path: Path) -> bool:
    """Whether a file of a directory is one of a model in safetensors files."""
    return path.name.endswith((".safetensors", ".safetensors.index.json"))


def plan_folder(export: Export, max_file_nbytes: int) -> list[FilePlan]:
    """Plan a directory: ``model.safetensors``, or several files and their index.

    Args:
        export: The tensors and values to write.
        max_file_nbytes: Bound on the elements' bytes of a file; a larger tensor has a file to itself.

    Raises:
        DTypeError: safetensors lacks the dtype of a tensor.
        TensorNameError: Two tensors would have one name in the files.
        RegionNotFoundError: A tensor was saved in part.
        ConfigError: The names or values need more room than a header has.
    """
    names = _validated_names(export)
    shards = _shards(export.stored, max_file_nbytes)
    if len(shards) == 1:
        return [_plan_file(f"{STEM}.safetensors", shards[0], export, names, with_tree=True)]
    files = [
        _plan_file(f"{STEM}-{number:05}-of-{len(shards):05}.safetensors", shard, export, names, with_tree=False)
        for number, shard in enumerate(shards, start=1)
    ]
    weight_map = {names[slot.tensor.name]: file.name for file in files for slot in file.slots}
    notes = {"total_size": sum(tensor.nbytes for tensor in export.stored), **_tree_note(export)}
    index = {"metadata": notes, "weight_map": dict(sorted(weight_map.items()))}
    return [*files, _document(INDEX_NAME, f"{json.dumps(index, indent=2)}\n".encode())]


def plan_file(export: Export, name: str) -> list[FilePlan]:
    """Plan one file of a name. Raises: as `plan_folder`."""
    return [_plan_file(name, export.stored, export, _validated_names(export), with_tree=True)]


def _document(name: str, data: bytes) -> FilePlan:
    return FilePlan(name, len(data), frame=lambda _: [(0, data)])


def _validated_names(export: Export) -> dict[str, str]:
    """Return the names of all tensors in the files, after a look at each tensor."""
    for tensor in export.tensors:
        if tensor.dtype not in NAMES:
            raise DTypeError(
                f"safetensors cannot hold tensor {tensor.name!r} of dtype {tensor.dtype}; expected one of "
                f"{', '.join(NAMES)}; leave it out, or convert it"
            )
        if not tensor.info.is_whole:
            raise RegionNotFoundError(
                f"tensor {tensor.info.name!r} was saved in part, and safetensors knows whole tensors only; leave it out"
            )
    return file_names(tensor.name for tensor in export.tensors)


def _shards(tensors: Iterable[ExportedTensor], max_nbytes: int) -> list[Sequence[ExportedTensor]]:
    """Cut the tensors, in their order, into as few files as the bound on each allows."""
    shards: list[list[ExportedTensor]] = [[]]
    nbytes = 0
    for tensor in tensors:
        if shards[-1] and nbytes + tensor.nbytes > max_nbytes:
            shards.append([])
            nbytes = 0
        shards[-1].append(tensor)
        nbytes += tensor.nbytes
    return list(shards)


def _plan_file(
    name: str, tensors: Iterable[ExportedTensor], export: Export, names: Mapping[str, str], *, with_tree: bool
) -> FilePlan:
    ordered = sorted(tensors, key=lambda tensor: -tensor.itemsize)
    here = {tensor.name for tensor in ordered}
    notes = {FORMAT: "pt", **(_tree_note(export) if with_tree else {})}
    notes |= {names[tied]: names[kept] for tied, kept in export.tied.items() if kept in here}

    def header(contents: Mapping[str, int]) -> bytes:
        # The digests are known last, but their texts are all of one length.
        digests = {names[tensor.name]: contents.get(tensor.name, 0) for tensor in ordered}
        entries = [(names[tensor.name], tensor.dtype, tensor.shape) for tensor in ordered]
        return header_bytes(entries, {**notes, CONTENT: content_text(digests)})

    def frame(written: FileDigests) -> Iterator[tuple[int, bytes]]:
        yield 0, header(written.contents)

    start = len(header({}))
    if start - LENGTH_NBYTES > MAX_HEADER_NBYTES:
        raise ConfigError(
            f"the header of {name} would have {start} bytes, expected at most {MAX_HEADER_NBYTES}; write fewer tensors "
            "or values to a file"
        )
    slots, end = [], start
    for tensor in ordered:
        slots.append(FileSlot(tensor, Region.full(tensor.shape), end))
        end += tensor.nbytes
    return FilePlan(name, end, tuple(slots), frame)


def _tree_note(export: Export) -> dict[str, str]:
    # Without the note, the names in the files are the names of the tree.
    return {TREE: trees.dump(export.structure).decode()} if needs_tree(export.structure) else {}
