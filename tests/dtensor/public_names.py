"""The generator of docs/names.md: ``python -m dtensor.public_names > ../docs/names.md``, run in ``tests``.

It compares the names and arguments of ``torch.distributed.tensor`` and ``tf.experimental.dtensor`` with those here:
PyTorch's from the installed one, TensorFlow's from ``public_names.toml``, which also says why some depart.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed.tensor

FACTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
DEPARTURES: Mapping[str, str] = FACTS["departures"]
TENSORFLOW = "tf.experimental.dtensor"

MODULES = {
    "torch.distributed.tensor": "dtckpt.dtensor",
    "torch.distributed.tensor.placement_types": "dtckpt.dtensor.placement_types",
    "torch.distributed.device_mesh": "dtckpt.dtensor",
    "torch.distributed.tensor.debug": "dtckpt.dtensor.debug",
    "torch.distributed.tensor.experimental": "dtckpt.dtensor.experimental",
    "torch.distributed.tensor.parallel": "dtckpt.dtensor.parallel",
}
"""Where the names of PyTorch's modules are here."""

WORKS, DEPARTS, MISSING = "works", "departs", "not here"
_ABSENT = object()
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

_HEAD = f"""# Names of PyTorch and TensorFlow

`cd tests; python -m dtensor.public_names > ../docs/names.md` writes this page, here from PyTorch \
{torch.__version__.split("+")[0]} and the list of TensorFlow 2.21's names in `tests/dtensor/public_names.toml`.

*Works*: the name is here, and takes the same arguments, of the same names, in the same order, with the same defaults;
there may be more of them. *Departs*: a program may notice a difference. [departures.md](departures.md) says more.
"""


@dataclass(frozen=True)
class Name:
    """A name that programs for PyTorch or TensorFlow use.

    Args:
        path: The name with its module, and its class.
        theirs: Parameters there; None for what does not tell.
        ours: The object with the name here, `_ABSENT` if there is none.
        is_called: Whether it is a function or a class there.
    """

    path: str
    theirs: inspect.Signature | None
    ours: Any
    is_called: bool

    @property
    def is_here(self) -> bool:
        return self.ours is not _ABSENT

    @property
    def differences(self) -> list[str]:
        """The parameters that differ."""
        if self.is_here and self.is_called != callable(self.ours):
            return ["()"]
        if not self.is_here or self.theirs is None:
            return []
        return list(_differences(_parameters(self.theirs), _parameters(inspect.signature(self.ours))))

    @property
    def why(self) -> str:
        """The known departure of the name, or of all of its module."""
        return DEPARTURES.get(self.path, DEPARTURES.get(self.path.rpartition(".")[0], "") if not self.is_here else "")

    @property
    def verdict(self) -> str:
        if not self.is_here:
            return MISSING
        return DEPARTS if self.differences or self.why else WORKS

    @property
    def text(self) -> str:
        """The name without its module, with its parameters."""
        short = self.path.removeprefix(f"{module_of(self.path)}.")
        if self.theirs is None:
            return short
        parameters = [name for name in _parameters(self.theirs) if name not in ("self", "mutable")]
        return f"{short}({', '.join(parameters)})"


def module_of(path: str) -> str:
    """Return the longest module that a path begins with."""
    return max((name for name in (*MODULES, TENSORFLOW) if path.startswith(f"{name}.")), key=len)


def _parameters(signature: inspect.Signature) -> dict[str, inspect.Parameter]:
    """Return parameters without private ones; options that a factory passes on are listed by name."""
    found = {}
    for name, parameter in signature.parameters.items():
        if "Options" in str(parameter.annotation) and parameter.kind is inspect.Parameter.VAR_KEYWORD:
            make = importlib.import_module("dtckpt.dtensor.factories")._make
            passed = inspect.signature(make).parameters.values()
            found |= {each.name: each for each in passed if each.kind is inspect.Parameter.KEYWORD_ONLY}
        elif not name.startswith("_"):
            found[name] = parameter
    return found


def _differences(theirs: Mapping[str, inspect.Parameter], ours: Mapping[str, inspect.Parameter]) -> Iterator[str]:
    """Yield the parameters that are not here, or not at the same place or with the same default."""
    positions = [
        [name for name, each in one.items() if each.kind <= each.POSITIONAL_OR_KEYWORD] for one in (theirs, ours)
    ]
    for name, parameter in theirs.items():
        if parameter.kind in _VARIABLE:
            if not any(each.kind is parameter.kind for each in ours.values()):
                yield name
            continue
        if name not in ours:
            yield name
            continue
        is_moved = name in positions[0] and positions[0].index(name) != _index(positions[1], name)
        if is_moved or repr(parameter.default) != repr(ours[name].default):
            yield name


def _index(names: list[str], name: str) -> int | None:
    return names.index(name) if name in names else None


def names() -> Iterator[Name]:
    """Yield all names, module by module."""
    for theirs, ours in MODULES.items():
        yield from _names_of(importlib.import_module(theirs), _module(ours))
    dtckpt = importlib.import_module("dtckpt")
    for path, text in FACTS["tensorflow"].items():
        signature = _parsed(text) if text else None
        yield Name(f"{TENSORFLOW}.{path}", signature, _attribute(dtckpt, path), bool(text))


def _parsed(text: str) -> inspect.Signature:
    """Return the signature that a text such as ``(self, dim=None)`` stands for."""
    return inspect.signature(eval(f"lambda {text[1:-1]}: 0"))


def _module(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


def _names_of(theirs: ModuleType, ours: ModuleType | None) -> Iterator[Name]:
    listed = FACTS["listed"].get(theirs.__name__) or getattr(theirs, "__all__", None)
    for name in listed or [one for one in vars(theirs) if not one.startswith("_")]:
        value = getattr(theirs, name)
        if isinstance(value, ModuleType):
            continue
        path, here = f"{theirs.__name__}.{name}", _attribute(ours, name)
        yield _name(path, value, here)
        if inspect.isclass(value) and theirs.__name__ != "torch.distributed.tensor.placement_types":
            for member in _members(value):
                yield _name(f"{path}.{member}", getattr(value, member), _attribute(_instances(here), member))


def _name(path: str, value: Any, here: Any) -> Name:
    text = FACTS["pytorch"].get(path)
    return Name(path, _parsed(text) if text else _signature(value), here, callable(value))


def _members(cls: type) -> list[str]:
    """Return the methods and properties that a class of PyTorch's defines itself."""
    public = {name: value for name, value in vars(cls).items() if not name.startswith("_")}
    return [name for name, value in public.items() if callable(value) or isinstance(value, property | staticmethod)]


def _instances(cls: Any) -> Any:
    """Return the class whose members instances have: `DeviceMesh` makes instances of `Mesh`."""
    return importlib.import_module("dtckpt").Mesh if getattr(cls, "__name__", "") == "DeviceMesh" else cls


def _attribute(owner: Any, path: str) -> Any:
    for name in path.split("."):
        owner = getattr(owner, name, _ABSENT)
    return owner


def _signature(value: Any) -> inspect.Signature | None:
    """Return the signature of a function or class; None for properties, private names, and functions of C++."""
    if not callable(value) or value is torch.distributed.tensor.DTensor:
        return None
    try:
        return inspect.signature(value)
    except ValueError:
        return None


def page() -> str:
    """Return the page as Markdown, a table per module."""
    by_module: dict[str, list[Name]] = {}
    for name in names():
        by_module.setdefault(module_of(name.path), []).append(name)
    lines = [_HEAD]
    for module, found in by_module.items():
        lines += [f"## {module}", "", "| name and arguments | here | why |", "| --- | --- | --- |"]
        lines += [f"| `{name.text}` | {name.verdict} | {_reason(name)} |" for name in found]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _reason(name: Name) -> str:
    differing = ", ".join(f"`{each}`" for each in name.differences)
    return "; ".join(filter(None, [f"differs in {differing}" if differing else "", name.why]))


if __name__ == "__main__":
    sys.stdout.write(page())
