"""The parameters of a model: names, shapes, usual layouts, and the state that training keeps of each; from JSON.

A file describes many parameters by a line, with braces as of a shell::

    {
      "name": "A model",
      "state": {"model": "bfloat16", "optimizer/exp_avg": "float32"},
      "parameters": {"layers.{0..31}.wq": {"shape": [4096, 4096], "layout": "tp+dp,unsharded"}}
    }

``state`` has the tensors that training keeps of every parameter, by the first part of their names: the example stands
for ``model/layers.0.wq`` and so on. ``layout`` has an entry per dim, as ``--layout`` of ``dtckpt reshard`` has; it
holds as far as a mesh has its axes.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dtckpt.errors import ConfigError, DtckptError, did_you_mean
from dtckpt.format.dtypes import validate_dtype
from dtckpt.format.grid import ChunkGrid
from dtckpt.layout import text_format
from dtckpt.layout.create_mesh import abstract_mesh
from dtckpt.layout.layout import UNSHARDED, Layout

MAX_FILE_NBYTES = 16 << 20
MAX_PARAMETERS = 1 << 20
"""Bound on the parameters that a file describes; the braces of one short line could stand for billions."""
_FOLDER = Path(__file__).parent / "models"
_BRACES = re.compile(r"\{([0-9.,]+)\}")
_RANGE = re.compile(r"(\d{1,9})(?:\.\.(\d{1,9}))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class ModelParameter:
    """One parameter of a model; ``layout`` is on a mesh of one device, and tells the usual axes."""

    name: str
    shape: tuple[int, ...]
    layout: Layout


@dataclass(frozen=True)
class ModelShapes:
    """The parameters of a model, and the state that training keeps of each.

    Args:
        name: The model's name.
        parameters: Its parameters, in the order of the model's JSON file.
        state: The tensors that training keeps for every parameter: dtype by the prefix of their names, such as
            ``optimizer/exp_avg``.
        source: Where the numbers are from.
    """

    name: str
    parameters: tuple[ModelParameter, ...] = field(repr=False)
    state: Mapping[str, str]
    source: str = ""

    @cached_property
    def num_parameters(self) -> int:
        """Number of the elements of all parameters."""
        return sum(math.prod(each.shape) for each in self.parameters)


def known_models() -> list[str]:
    """Return the names of the models that this package describes."""
    return sorted(file.stem for file in _FOLDER.glob("*.json"))


def open_model(model: str | Path) -> ModelShapes:
    """Return a model by its name (see `known_models`), or read the JSON file that describes it.

    Raises:
        ConfigError: There is no such model, or the file describes none.
    """
    known = known_models()
    file = _FOLDER / f"{model}.json" if str(model) in known else Path(model)
    if file.suffix != ".json":
        raise ConfigError(
            f"model {str(model)!r} is unknown; expected a JSON file, or one of {', '.join(known)}"
            f"{did_you_mean(str(model), known)}"
        )
    try:
        with open(file, "rb") as stream:
            data = stream.read(MAX_FILE_NBYTES + 1)
        if len(data) > MAX_FILE_NBYTES:
            raise ValueError(f"it is larger than {MAX_FILE_NBYTES} bytes")
        return _model_of(json.loads(data))
    except (OSError, ValueError, TypeError, AttributeError, KeyError, RecursionError, DtckptError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else getattr(error, "message", error)
        raise ConfigError(f"model file {file} cannot be used: {reason}") from error


def _model_of(record: Mapping[str, Any]) -> ModelShapes:
    state = {str(prefix): str(dtype) for prefix, dtype in record.get("state", {"model": "bfloat16"}).items()}
    validate_state(state)
    parameters = tuple(itertools.islice(_parameters(record["parameters"]), MAX_PARAMETERS + 1))
    if not 0 < len(parameters) <= MAX_PARAMETERS:
        raise ValueError(f"expected 1 to {MAX_PARAMETERS} parameters")
    if len({each.name for each in parameters}) < len(parameters):
        raise ValueError("it describes a parameter twice")
    return ModelShapes(str(record["name"]), parameters, state, str(record.get("source", "")))


def validate_state(state: Mapping[str, str]) -> None:
    """Refuse a state of no tensors, or of dtypes that cannot be stored.

    Raises:
        ConfigError: The state is empty.
        DTypeError: A dtype is unknown.
    """
    if not state:
        raise ConfigError("the state of a parameter is empty; expected a dtype for each of its tensors")
    for dtype in state.values():
        validate_dtype(dtype)


def _parameters(records: Mapping[str, Mapping[str, Any]]) -> Iterator[ModelParameter]:
    for pattern, record in records.items():
        shape = tuple(int(size) for size in record["shape"])
        ChunkGrid(shape, tuple(max(1, size) for size in shape))  # refuses shapes that no checkpoint can hold
        specs = _specs(record.get("layout", ",".join([UNSHARDED] * len(shape))))
        if len(specs) != len(shape):
            raise ValueError(f"parameter {pattern!r}: got a layout of {len(specs)} dims, expected {len(shape)}")
        axes = [axis for spec in specs for axis in ((spec,) if isinstance(spec, str) else spec) if axis != UNSHARDED]
        layout = Layout(specs, abstract_mesh(dict.fromkeys(axes or ["x"], 1)))
        yield from (ModelParameter(name, shape, layout) for name in expanded(pattern))


def _specs(text: str) -> list[text_format.Spec]:
    return [text_format.spec_from_text(entry.strip()) for entry in text.split(",")] if text.strip() else []


def expanded(pattern: str) -> Iterator[str]:
    """Yield the names that a name with braces stands for: ``a.{0..2,7}`` for ``a.0``, ``a.1``, ``a.2`` and ``a.7``."""
    parts = _BRACES.split(pattern)
    choices = [_numbers(part) if place % 2 else [part] for place, part in enumerate(parts)]
    yield from map("".join, itertools.product(*choices))


def _numbers(text: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"got {{{text}}} in a name, expected numbers such as {{0..31}}")
        last = int(match[2] or match[1])
        if last - int(match[1]) > MAX_PARAMETERS:
            raise ValueError(f"{{{text}}} stands for too many names")
        numbers += map(str, range(int(match[1]), last + 1))
    return numbers
