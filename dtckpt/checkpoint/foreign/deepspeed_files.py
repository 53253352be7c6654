"""Find and read DeepSpeed's checkpoints: the files of all processes, and from these one index.

A checkpoint is a folder that ``latest`` beside it names::

    mp_rank_00_model_states.pt                            the 16-bit module and the client's state; ZeRO 0 to 2
    zero_pp_rank_{dp}_mp_rank_00_model_states.pt          one for each process; ZeRO 3
    [bf16_]zero_pp_rank_{dp}_mp_rank_00_optim_states.pt   one process's flat vectors; ZeRO 1 to 3
    layer_{n}-model_{tp}-model_states.pt                  the module of one layer of a pipeline
    layer_{n}_expert_{e}_mp_rank_00_model_states.pt       one expert of a layer of a mixture of experts
    expp_rank_{r}_mp_rank_00_optim_states.pt              the optimizer of one part of the experts, without ZeRO
    zero/{parameter}/{fp32,exp_avg,…}.pt                  a universal checkpoint: one small file for each tensor

The tree is as in training scripts: ``module``, ``optimizer``, and the client's items at the top. The parameters are
the fp32 vectors where an optimizer has them. Slices of tensor parallelism are joined if the files tell how
(`dtckpt.checkpoint.foreign.deepspeed_slices`); else they stay apart, below ``mp_00``, ``mp_01`` and so on.

Source: deepspeed.runtime.engine (``_save_checkpoint``, ``_save_zero_checkpoint``), deepspeed.checkpoint.constants.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from dtckpt.checkpoint.foreign.deepspeed_fields import ModelFields, items_of, model_fields
from dtckpt.checkpoint.foreign.deepspeed_layout import FP32
from dtckpt.checkpoint.foreign.file_reads import read_each
from dtckpt.checkpoint.foreign.pickle_syntax import ReadBudget, parse_pickle
from dtckpt.checkpoint.foreign.pickled_tensors import StorageView, is_tensor, tensor_view
from dtckpt.checkpoint.foreign.torch_files import StreamTensor, TensorStreams, TorchStream, file_nbytes, open_stream
from dtckpt.errors import CheckpointCorruptError
from dtckpt.storage.folder import Folder
from dtckpt.storage.local_folder import LocalFolder

KIND = "deepspeed"
LATEST = ("latest", "latest_universal")
"""Files of the folder of a run that name the newest checkpoint."""
MARKERS = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
UNIVERSAL = "zero"
"""The folder of a universal checkpoint's parameters."""
OPTIMIZER_STATE = f"{UNIVERSAL}/optimizer_state.pt"
_OURS = re.compile(r"(bf16_)?(zero_pp_rank_[0-9]+_)?mp_rank_[0-9]+_?(model|optim)_states\.pt")
LAYER = re.compile(r"layer_([0-9]{2,6})-model_([0-9]{2,6})-model_states\.pt")
EXPERT = re.compile(r"(?:layer_([0-9]{1,6})_)?expert_([0-9]{1,6})_mp_rank_([0-9]{2,6})_model_states\.pt")
"""Also the name of old versions, without a layer."""
EXPERT_OPTIMIZER = re.compile(r"expp_rank_([0-9]{1,6})_mp_rank_([0-9]{2,6})_optim_states\.pt")
_UNIVERSAL_FILE = re.compile(rf"{UNIVERSAL}/(.+)/([A-Za-z0-9_]+)\.pt")
_OPTIMIZERS = tuple(
    f"{precision}zero_pp_rank_{{dp}}_mp_rank_{{mp:02d}}{end}"
    for precision in ("", "bf16_")
    for end in ("_optim_states.pt", "optim_states.pt")
)
"""Names of the optimizer files; before version 0.4, no underscore."""


def is_file(name: str, head: bytes) -> bool:  # noqa: ARG001  (a file alone is a file of torch.save)
    """Whether a file alone is such a checkpoint: never."""
    return False


def is_folder(names: Collection[str]) -> bool:
    """Whether a directory is such a checkpoint, by the names in it."""
    return any(map(_OURS.fullmatch, names))


class DeepspeedFiles:
    """The files of one checkpoint.

    Args:
        folder: The directory.
        names: The names in it.
    """

    def __init__(self, folder: Folder, names: Collection[str]) -> None:
        self.folder = folder
        # One for all: of many files, each could ask for the least that a file may.
        self.budget = ReadBudget(str(folder))
        self._names = set(names)
        self._streams: dict[str, TorchStream] = {}
        self._params: set[str] = set()
        self._tensor_streams = TensorStreams(folder, budget=self.budget, parse=self._parse)
        self._values: dict[bytes, Any] = {}
        self._lock = Lock()
        """Of `_values`: threads that parse take turns anyway."""
        self._models: dict[int, ModelFields] = {}
        self.universal = self._universal()

    def _universal(self) -> dict[str, dict[str, str]]:
        """Return the files of a universal checkpoint: by parameter, by kind."""
        if not self.has(OPTIMIZER_STATE):
            if UNIVERSAL in self._names:
                raise CheckpointCorruptError(
                    f"{self.folder}/{OPTIMIZER_STATE} is missing, and {UNIVERSAL}/ is there; use another copy, or "
                    "restore another checkpoint"
                )
            return {}
        below = self.folder / UNIVERSAL
        names = (
            [
                f"{each.name}/{name}" if name else each.name
                for each in os.scandir(below.path)
                for name in (os.listdir(each.path) or [f"{FP32}.pt"] if each.is_dir() else [""])
            ]
            if isinstance(below, LocalFolder)
            else [name.removeprefix(f"{UNIVERSAL}/") for name in self.folder.names(f"{UNIVERSAL}/")]
        )
        found: dict[str, dict[str, str]] = {}
        self._names -= {UNIVERSAL}
        self._names |= {f"{UNIVERSAL}/{name}" for name in (*names, "optimizer_state.pt")}
        for name in sorted(self._names):
            if (match := _UNIVERSAL_FILE.fullmatch(name)) is not None:
                found.setdefault(match[1], {})[match[2]] = name
        return found

    def list_all(self) -> set[str]:
        """Return the names of all files, where directories are listed only on demand. Blocks: on storage."""
        self._names |= set(self.folder.names())
        return self._names

    def used(self) -> tuple[str, ...]:
        """Return the names of the files that were opened."""
        return tuple(sorted(self._params.union(self._streams)))

    def unread(self) -> tuple[str, ...]:
        """Return the names of the other files."""
        return tuple(sorted(self._names.difference(self._streams, self._params)))

    def matching(self, form: re.Pattern[str], mp: int) -> list[tuple[tuple[int, ...], str]]:
        """Return the files of a model slice whose names have a form that ends with its number.

        Returns:
            Per file, the other numbers in its name, ascending, and its name.
        """
        found = [(match, name) for name in self._names if (match := form.fullmatch(name)) is not None]
        numbers = [(tuple(int(each or -1) for each in match.groups()), name) for match, name in found]
        return sorted((each[:-1], name) for each, name in numbers if each[-1] == mp)

    def has(self, name: str) -> bool:
        """Whether there is a file of a name. Blocks: on storage, where directories are not listed."""
        return name in self._names or self.folder.find_short_file({name: 1}) is None

    def open_all(self, names: Iterable[str]) -> list[TorchStream]:
        """Read files but for their elements. Blocks: on storage."""
        return read_each(self.folder, self.open, names)

    def open(self, name: str) -> TorchStream:
        """Read a file but for its elements. Blocks: on storage."""
        if name not in self._streams:
            with self._missing(name):
                nbytes = file_nbytes(self.folder, name)
                stream = open_stream(self.folder, name, 0, nbytes, budget=self.budget, parse=self._parse)
                self._streams[name] = stream
                # Pieces share no elements of a vector, so the length of the file bounds the pieces.
                self.budget.grow(nbytes)
        return self._streams[name]

    def open_params(self, names: Iterable[str]) -> list[StreamTensor | int | float]:
        """Read files of a universal checkpoint, but for their elements. Blocks: on storage.

        Raises:
            CheckpointCorruptError: A file is missing or damaged, or holds neither a tensor nor a number.
        """
        return read_each(self.folder, self._open_param, names)

    def _open_param(self, name: str) -> StreamTensor | int | float:
        def view_of(held: Any) -> StorageView | int | float:
            is_bare = is_tensor(held) or type(held) in (int, float)
            value = held if is_bare else items_of(held, name, self.budget).get("param")
            if type(value) is int or type(value) is float:
                return value
            if not is_tensor(value):
                raise CheckpointCorruptError(f"{self.folder}/{name} holds no tensor")
            return tensor_view(value, name)

        with self._missing(name):
            nbytes = file_nbytes(self.folder, name)
            stream = self._tensor_streams.read(name, 0, nbytes, view_of)
        self.budget.grow(nbytes)
        self._params.add(name)
        return stream

    @contextmanager
    def _missing(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise CheckpointCorruptError(f"{self.folder}/{name} is missing; restore another checkpoint") from None

    def _parse(self, data: bytes, where: str, budget: ReadBudget) -> Any:
        """Return the value of a pickle. Files of most processes, and of tensors of one shape, have the same."""
        with self._lock:
            if data not in self._values:
                self._values[data] = parse_pickle(data, where, budget)
            return self._values[data]

    def model(self, mp: int, dp: int = 0) -> tuple[ModelFields, TorchStream]:
        """Return the fields of a model file. Blocks: on storage."""
        whole = f"mp_rank_{mp:02d}_model_states.pt"
        name = whole if self.has(whole) else f"zero_pp_rank_{dp}_{whole}"
        stream = self.open(name)
        key = id(stream.zip.value)  # the streams keep it
        if key not in self._models:
            self._models[key] = model_fields(stream.zip.value, f"{self.folder}/{name}", self.budget)
        return self._models[key], stream

    def is_by_process(self, mp: int) -> bool:
        """Whether each process wrote its own model file, as with ZeRO 3."""
        return not self.has(f"mp_rank_{mp:02d}_model_states.pt")

    def optimizer_form(self, mp: int) -> str | None:
        """Return the form of the names of a model slice's optimizer files; None without ZeRO."""
        for form in _OPTIMIZERS:
            known = re.compile(re.escape(form.format(dp=0, mp=mp)).replace("rank_0_", "rank_[0-9]+_", 1))
            if self.has(form.format(dp=0, mp=mp)) or any(map(known.fullmatch, self._names)):
                return form
        return None
