"""Find and read folders of transformers' ``Trainer``, of accelerate and of PEFT: a model, and state beside it.

::

    model.safetensors, pytorch_model.bin, an index    model; model_1.safetensors: model_1
    pytorch_model_fsdp.bin, pytorch_model_fsdp_0/     model, whole or a distributed checkpoint (FSDP)
    adapter_model.safetensors, adapter_config.json    adapter, adapter_config (PEFT)
    optimizer.pt, optimizer_1.bin, optimizer_0/       optimizer, optimizer_1
    scheduler.pt, scaler.pt, sampler.bin, …           scheduler, scaler, sampler
    custom_checkpoint_0.pkl                           custom_checkpoint_0
    rng_state.pth, random_states_{rank}.pkl           rng; of several processes a value for each
    trainer_state.json                                trainer_state
    latest, global_step7/                             module, optimizer and so on, as DeepSpeed has them
    pytorch_model_fsdp_0_rank{rank}.bin               module and optimizer, as FSDP1 has them

The reader of a part's format reads the part. All pickles are files of ``torch.save``. Other files, such as
``training_args.bin``, are listed as unread.

Source: transformers.trainer, accelerate.checkpointing, accelerate.utils.fsdp_utils, and peft.utils.save_and_load.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from dtckpt.checkpoint.foreign import (
    dcp_files,
    deepspeed_files,
    deepspeed_tree,
    fsdp_files,
    safetensors_files,
    torch_files,
)
from dtckpt.checkpoint.foreign.dcp_metadata import StoredItem
from dtckpt.checkpoint.foreign.dcp_processes import Value, read_value
from dtckpt.checkpoint.foreign.fsdp_fields import parse_template
from dtckpt.checkpoint.foreign.huggingface_fields import note_of_numbers, placed, with_names
from dtckpt.checkpoint.foreign.pickle_syntax import NODE_NBYTES, ReadBudget
from dtckpt.checkpoint.reading.pieces import PieceIndex, PieceTensor, is_file_name
from dtckpt.errors import (
    CheckpointCorruptError,
    CheckpointIncompleteError,
    CheckpointVersionError,
    DtckptError,
    TreeError,
    capped,
)
from dtckpt.format import tree as trees
from dtckpt.format.names import DCP_METADATA_NAME
from dtckpt.storage.failures import MalformedError
from dtckpt.storage.folder import Folder
from dtckpt.storage.local_folder import LocalFolder

KIND = "huggingface"
DOCUMENTS = ("trainer_state.json", "adapter_config.json")
"""Documents that become plain values, under their names without the ending."""
MAX_DOCUMENT_NBYTES = 64 << 20
MAX_LATEST_NBYTES = 256
MAX_PROCESSES = 1 << 16
_STATE = re.compile(
    r"((?:optimizer|scheduler|scaler|sampler|dl_state_dict)(?:_[0-9]{1,6})?)\.(?:pt|bin)"
    r"|(custom_checkpoint_[0-9]{1,6})\.pkl"
)
_RANDOM = ("rng_state_{}.pth", "random_states_{}.pkl")
_RANDOM_ALONE = "rng_state.pth"
_OF_RANK = re.compile("|".join(re.escape(form).replace(r"\{\}", "([0-9]{1,6})") for form in _RANDOM))
_SAFETENSORS = re.compile(r"(model|adapter_model)(?:-[0-9]+-of-[0-9]+)?\.safetensors(?:\.index\.json)?")
_PICKLED = re.compile(r"(pytorch_model|adapter_model)(?:-[0-9]+-of-[0-9]+)?\.bin(?:\.index\.json)?")
_NUMBERED = re.compile(r"(?:pytorch_)?(model_[0-9]{1,6})\.(safetensors|bin)")
_FSDP_WHOLE = re.compile(r"pytorch_model_fsdp(_[0-9]{1,6})?\.bin")
_FSDP_FOLDER = re.compile(r"(pytorch_model_fsdp|optimizer)(_[0-9]{1,6})(?:/\.metadata)?")
_MODEL_OF_STEM = {"model": "model", "pytorch_model": "model", "adapter_model": "adapter"}
MARKERS = (
    *DOCUMENTS,
    *("optimizer.pt", "optimizer.bin", "scheduler.pt", "scheduler.bin", "scaler.pt", "sampler.bin"),
    *("dl_state_dict.bin", "custom_checkpoint_0.pkl", _RANDOM_ALONE, *(form.format(0) for form in _RANDOM)),
    *(*torch_files.WHOLE, "pytorch_model_fsdp.bin", f"pytorch_model_fsdp_0/{DCP_METADATA_NAME}"),
    *(f"optimizer_0/{DCP_METADATA_NAME}", fsdp_files.TEMPLATE),
)


def is_file(name: str, head: bytes) -> bool:  # noqa: ARG001  (a file alone is of another format)
    """Whether a file alone is such a checkpoint: never."""
    return False


def is_folder(names: Collection[str]) -> bool:
    """Whether a directory is such a checkpoint, by the names in it: a model, and state of its training beside it."""
    if any(name in DOCUMENTS or name == _RANDOM_ALONE or _OF_RANK.fullmatch(name) for name in names):
        return True
    return any(map(_STATE.fullmatch, names)) and any(
        pattern.fullmatch(name) for name in names for pattern in (_SAFETENSORS, _PICKLED, _FSDP_WHOLE)
    )


def read_index(folder: Folder, names: Collection[str]) -> PieceIndex:
    """Read the parts of a folder, but for the elements. Blocks: on storage.

    Args:
        folder: The directory.
        names: The names in it.

    Raises:
        CheckpointCorruptError: The model is damaged, or a template is of another optimizer.
        CheckpointIncompleteError: A file of the model, or the random state of a process is missing.
    """
    reader = _PartsReader(folder, names)
    reader.read()
    unread = (*sorted(set(names).difference(reader.read_names)), *reader.unread)
    structure: trees.Node = {"dict": [[key, node] for key, node in reader.items.items()]}
    return PieceIndex(KIND, reader.tensors, structure, reader.refused, tuple(reader.files), unread, tuple(reader.notes))


class _PartsReader:
    """Reads the parts of a folder.

    Args:
        folder: The directory.
        names: The names in it.

    Attributes:
        items: The parts, by key in the tree.
        read_names: The names of which everything was read.
    """

    def __init__(self, folder: Folder, names: Collection[str]) -> None:
        self._folder = folder
        self._names = sorted(names)
        # One for all: of many files, each could ask for the least that a file may.
        self._budget = ReadBudget(str(folder))
        self.items: dict[str, trees.Node] = {}
        self.tensors: dict[str, PieceTensor] = {}
        self.refused: dict[str, DtckptError] = {}
        self.files: list[str] = []
        self.unread: list[str] = []
        self.notes: list[str] = []
        self.read_names: set[str] = set()

    def read(self) -> None:
        """Read all parts. Blocks: on storage."""
        has_shards = self._read_shards()
        self._read_models()
        self._read_deepspeed()
        template = None if has_shards else self._template()
        for name in self._names:
            if (match := _STATE.fullmatch(name)) is None:
                continue
            key = match[1] or match[2]
            if key.startswith("optimizer"):
                self._read_optimizer(key, name, template if key == "optimizer" else None)
            else:
                self._add_value((key,), name, self._value((key,), name))
        self._read_random_states()
        for name in self._names:
            if name in DOCUMENTS:
                self._read_document(name)
        self._note_missing()

    def _note_missing(self) -> None:
        """Note the parts that a folder of a training has as a rule, and this one has not."""
        if "adapter_config" in self.items and "adapter" not in self.items and "adapter" not in self.refused:
            raise CheckpointCorruptError(
                f"{self._folder}/adapter_model.safetensors is missing, and adapter_config.json is there; use another "
                "copy"
            )
        if not {"trainer_state", "rng"} & {*self.items, *self.refused}:
            return
        kinds = {each.partition("_")[0] for each in (*self.items, *self.refused)}
        for files, any_of in (
            ("model.safetensors or pytorch_model.bin", {"model", "module", "adapter"}),
            ("optimizer.pt or optimizer.bin", {"optimizer"}),
            ("scheduler.pt or scheduler.bin", {"scheduler", "lr"}),
            (f"{_RANDOM_ALONE} or {_RANDOM[0].format(0)}", {"rng"}),
        ):
            if not any_of & kinds:
                self.notes.append(f"there is no {files} in the folder, so the tree lacks this part")

    # --- models -------------------------------------------------------------------------------------------------

    def _read_models(self) -> None:
        for key, names, read in self._models():
            if key not in self.items:  # as transformers: safetensors before pickles
                self._add_index((key,), read(self._folder, names))
        for name in self._names:
            if (match := _FSDP_FOLDER.fullmatch(name)) is not None:
                kind = "optimizer" if match[1] == "optimizer" else "model"
                below = f"{match[1]}{match[2]}"
                if dcp_files.is_folder(names := self._names_below(below, dcp_files.MARKERS)):
                    index = dcp_files.read_index(self._folder / below, names)
                    self._add_index((kind if match[2] == "_0" else f"{kind}{match[2]}",), index, below, name)

    def _models(self) -> Iterator[tuple[str, Collection[str], Callable[[Folder, Collection[str]], PieceIndex]]]:
        """Yield each model's key, the names of its files, and their reader."""
        for pattern, form in ((_SAFETENSORS, safetensors_files), (_PICKLED, torch_files)):
            found: dict[str, list[str]] = {}
            for name in self._names:
                if (match := pattern.fullmatch(name)) is not None:
                    found.setdefault(match[1], []).append(name)
            for stem, names in found.items():
                yield _MODEL_OF_STEM[stem], names, form.read_index
        for name in self._names:
            if (match := _NUMBERED.fullmatch(name)) is not None:
                form = safetensors_files if match[2] == "safetensors" else torch_files
                yield match[1], [name], form.read_index
            elif (match := _FSDP_WHOLE.fullmatch(name)) is not None:
                number = "" if match[1] in (None, "_0") else match[1]
                yield f"model{number}", [name], torch_files.read_index

    def _names_below(self, below: str, markers: Collection[str]) -> Collection[str]:
        """Return the names in a folder below. Where directories cannot be listed, only names that matter."""
        folder = self._folder / below
        if not isinstance(folder, LocalFolder):
            return [name for name in markers if folder.find_short_file({name: 1}) is None]
        try:
            return folder.names()
        except (FileNotFoundError, NotADirectoryError):
            return ()

    def _read_shards(self) -> bool:
        """Read the files of FSDP1's processes; return whether there are any."""
        names = [name for name in self._names if fsdp_files.is_folder([name])]
        if names:
            names += [name for name in self._names if name == fsdp_files.TEMPLATE]
            self._add_index((), fsdp_files.read_index(self._folder, names))
        return bool(names)

    def _read_deepspeed(self) -> None:
        """Read the folder that a file of DeepSpeed names."""
        for name in deepspeed_files.LATEST:
            if name not in self._names:
                continue
            try:
                below = self._folder.read_whole(name, MAX_LATEST_NBYTES).decode(errors="replace").strip()
            except MalformedError:
                continue  # a directory or a long file, which somebody else gave this name
            if not is_file_name(below) or "/" in below:
                continue
            if deepspeed_files.is_folder(names := self._names_below(below, deepspeed_files.MARKERS)):
                self._add_index((), deepspeed_tree.read_index(self._folder / below, names), below, name)
                return

    def _add_index(self, path: tuple[str, ...], index: PieceIndex, below: str = "", *found: str) -> None:
        """Take the index of a part.

        Args:
            path: Its key in the tree; none: its items are at the top.
            index: The index.
            below: The folder below that its files are in.
            found: Names in the folder that led to it.
        """
        part = placed(index, path, below)
        node: trees.Node = {"dict": [[path[0], part.structure]] if path else part.structure["dict"]}
        self._add(node, part.tensors, part.refused)
        self.files += part.files
        self.unread += [each for each in part.unread if below or each not in self._names]
        self.notes += part.notes
        self.read_names |= {*found, *part.files, below}

    def _add(self, node: trees.Node, tensors: Mapping[str, PieceTensor], refused: Mapping[str, DtckptError]) -> None:
        """Take the items of a dict, but for those whose keys are taken."""
        self.refused |= refused
        for key, child in node["dict"]:
            if str(key) in self.items:
                self.refused[str(key)] = TreeError(f"{str(key)[:200]!r} is in two parts of {self._folder}")
                continue
            self.items[str(key)] = child
            self.tensors |= {name: tensors[name] for name in trees.tensor_names(child)}

    # --- state beside the model -----------------------------------------------------------------------------------

    def _read_optimizer(self, key: str, name: str, template: Mapping[str, tuple[int, ...]] | None) -> None:
        numbered: dict[str, Any] = {}
        misfit = False

        def named(value: Any) -> Any:
            nonlocal misfit
            misfit = template is not None
            value, without = with_names(value, template, f"{self._folder}/{name}", self._budget)
            numbered.update(without)
            misfit = False
            return value

        value = self._value((key,), name, named)
        # The user's own file is not to be passed over, as a damaged part is.
        if misfit and isinstance(value, DtckptError):
            raise value
        self._add_value((key,), name, value)
        if numbered:
            self.notes.append(note_of_numbers(key, numbered))

    def _template(self) -> Mapping[str, tuple[int, ...]] | None:
        if fsdp_files.TEMPLATE not in self._names:
            return None
        data = self._folder.read_whole(fsdp_files.TEMPLATE, fsdp_files.MAX_TEMPLATE_NBYTES)
        self._budget.grow(len(data))
        self.files.append(fsdp_files.TEMPLATE)
        self.read_names.add(fsdp_files.TEMPLATE)
        return parse_template(data, f"{self._folder}/{fsdp_files.TEMPLATE}")

    def _value(
        self, path: tuple[str, ...], name: str, find: Callable[[Any], Any] = lambda value: value
    ) -> Value | DtckptError | None:
        """Return the value in a file, or the error that says why it is unreadable; None if its format is unknown."""
        try:
            item = StoredItem(name, 0, torch_files.file_nbytes(self._folder, name))
            value = read_value(self._folder, path, item, self._budget, find=find)
        except (MalformedError, PermissionError):  # a directory, a fifo, or another user's file
            return None
        return None if isinstance(value, CheckpointVersionError) else value

    def _add_value(self, path: tuple[str, ...], name: str, value: Value | DtckptError | None) -> None:
        if value is None:
            return
        self.files.append(name)
        self.read_names.add(name)
        if isinstance(value, DtckptError):
            self.refused["/".join(path)] = value
        else:
            self._add({"dict": [[path[0], value.node]]}, value.tensors, value.refused)

    def _read_random_states(self) -> None:
        """Read the random state of each process; where there is one process without a number, one for all."""
        if _RANDOM_ALONE in self._names:
            self._add_value(("rng",), _RANDOM_ALONE, self._value(("rng",), _RANDOM_ALONE))
        for form in _RANDOM:
            files = self._files_by_rank(form)
            values = {rank: self._value(("rng", str(rank)), name) for rank, name in files.items()}
            found = {rank: value for rank, value in values.items() if isinstance(value, Value)}
            self.files += [files[rank] for rank, value in values.items() if value is not None]
            self.read_names |= {files[rank] for rank, value in values.items() if value is not None}
            self.refused |= {f"rng/{rank}": value for rank, value in values.items() if isinstance(value, DtckptError)}
            if not found:
                continue
            clients = [[rank, value.node] for rank, value in found.items()]
            node: trees.Node = {"type": ["PerClient", len(files), {"dict": clients}]}
            tensors = {name: tensor for value in found.values() for name, tensor in value.tensors.items()}
            refused = {name: error for value in found.values() for name, error in value.refused.items()}
            self._add({"dict": [["rng", node]]}, tensors, refused)

    def _files_by_rank(self, form: str) -> dict[int, str]:
        """Return the files of all processes, by rank."""
        pattern = re.compile(re.escape(form).replace(r"\{\}", "([0-9]{1,6})"))
        found = {int(match[1]): name for name in self._names if (match := pattern.fullmatch(name)) is not None}
        # Where directories are not listed, the next file is there, or was the last.
        while found and len(found) < MAX_PROCESSES and not isinstance(self._folder, LocalFolder):
            name = form.format(len(found))
            if len(found) in found or self._folder.find_short_file({name: 1}) is not None:
                break
            found[len(found)] = name
        if lost := [
            form.format(rank) for rank in range(min(max(found, default=-1), MAX_PROCESSES)) if rank not in found
        ]:
            raise CheckpointIncompleteError(
                f"{self._folder} lacks {capped(lost)}, the random state of a process; use another copy, or restore "
                "another checkpoint"
            )
        return dict(sorted(found.items()))

    def _read_document(self, name: str) -> None:
        """Read a JSON document as plain values."""
        key = name.removesuffix(".json")
        where = f"{self._folder}/{name}"
        self.files.append(name)
        self.read_names.add(name)
        try:
            data = self._folder.read_whole(name, MAX_DOCUMENT_NBYTES)
            self._budget.grow(len(data))
            # Before it is parsed: each value follows one of these characters.
            self._budget.take(NODE_NBYTES * sum(data.count(each) for each in b"[{,:"))
            node = trees.flatten(json.loads(data), lambda _: False, at=key)[1]
        except DtckptError as error:
            self.refused[key] = error
        except (MalformedError, ValueError, RecursionError) as error:
            self.refused[key] = CheckpointCorruptError(f"{where} is damaged: its JSON cannot be read: {error}")
        else:
            self._add({"dict": [[key, node]]}, {}, {})
