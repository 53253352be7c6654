"""The documents of an Orbax checkpoint: its items, the tree of an item, strings, and how arrays were sharded; pure.

::

    _CHECKPOINT_METADATA   {"item_handlers": {item: class of its handler}}     a text, if the folder is the only item
    _METADATA              {"tree_metadata": {..: {"key_metadata": [{"key", "key_type"}], "value_metadata": {..}}}}
    _strings.json          {name: text}
    _sharding              {base64 of a name: JSON text of the sharding}
    array_metadatas/..     {"array_metadatas": [{"array_metadata": {"param_name", "ext_metadata": {"impl": name}}}]}

The name of an array is the keys of its path, joined by dots. As keys may have dots, too, a name does not tell the keys.

Sources: orbax.checkpoint, _src/metadata/{tree,checkpoint,value,sharding}.py and _src/serialization/type_handlers.py.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dtckpt.errors import CheckpointCorruptError, CheckpointVersionError, LayoutError, MeshError
from dtckpt.layout.create_mesh import abstract_mesh
from dtckpt.layout.layout import UNSHARDED, Layout
from dtckpt.layout.mesh import Mesh

Path = tuple[str | int, ...]

MAX_LEAVES = 1 << 20
MAX_MESH_SIZE = 1 << 16
"""Devices of a mesh; the sharding of a larger one is passed over."""
SEQUENCE, DICT = 1, 2
"""The types of keys."""
EMPTY_TYPES: dict[str, dict[str, Any]] = {
    "Dict": {"dict": []},
    "NamedTuple": {"dict": []},
    "List": {"list": []},
    "Tuple": {"tuple": []},
}
"""By the type of a value without content, its node."""


@dataclass(frozen=True, slots=True)
class OrbaxLeaf:
    """A leaf of the tree of an item.

    Args:
        path: Its keys; an int is a position in a list.
        name: Its name in the store.
        value_type: The type of its value, as ``jax.Array``, ``scalar`` or ``string``.
        is_empty: Whether it has no array.
    """

    path: Path
    name: str
    value_type: str
    is_empty: bool

    @property
    def empty_node(self) -> dict[str, Any]:
        """The node of a leaf without an array: an empty container, or None."""
        return EMPTY_TYPES.get(self.value_type, {"value": None})


@dataclass(frozen=True, slots=True)
class OrbaxTree:
    """The tree of an item.

    Args:
        leaves: Its leaves.
        has_database: Whether the arrays are in an OCDBT database; None: the metadata does not tell.
        is_zarr3: Whether they are of Zarr v3.
        is_filled: Whether a chunk that is missing is made of zeros.
        custom: The user's own metadata.
    """

    leaves: Sequence[OrbaxLeaf]
    has_database: bool | None
    is_zarr3: bool
    is_filled: bool
    custom: Any


def parse_tree(data: bytes, where: str) -> OrbaxTree:
    """Parse a ``_METADATA``.

    Raises:
        CheckpointCorruptError: The document is damaged.
        CheckpointVersionError: A key is of a kind that is not known.
    """
    document = parse_object(data, where)
    entries = document.get("tree_metadata")
    if not isinstance(entries, dict) or len(entries) > MAX_LEAVES:
        raise CheckpointCorruptError(f"{where} is damaged: it has no tree, or one of more than {MAX_LEAVES} leaves")
    try:
        leaves = [_leaf(entry, where) for entry in entries.values()]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointCorruptError(f"{where} is damaged: an entry of its tree is malformed ({error!r:.80})") from None
    has_database = document.get("use_ocdbt")
    return OrbaxTree(
        leaves,
        has_database if isinstance(has_database, bool) else None,
        is_zarr3=document.get("use_zarr3") is True,
        is_filled=document.get("store_array_data_equal_to_fill_value") is not True,
        custom=document.get("custom_metadata"),
    )


def _leaf(entry: Mapping[str, Any], where: str) -> OrbaxLeaf:
    path: list[str | int] = []
    keys: list[str] = []
    for each in entry["key_metadata"]:
        key, kind = each["key"], each["key_type"]
        if not isinstance(key, str) or not key.isprintable():
            raise ValueError("a key is no text")
        if kind not in (SEQUENCE, DICT):
            raise CheckpointVersionError(
                f"{where} has a key of type {kind!r:.80}, expected 1 (sequence) or 2 (dict); upgrade dtckpt"
            )
        # Positions that are no more than the leaves also keep a dict of them fast, whatever an attacker chooses.
        if kind == SEQUENCE and not (key.isascii() and key.isdigit() and int(key[:8]) < MAX_LEAVES):
            raise ValueError("a position of a list is none")
        keys.append(key)
        path.append(int(key) if kind == SEQUENCE else key)
    value = entry["value_metadata"]
    if not isinstance(value["value_type"], str):
        raise TypeError("the type of a value is no text")
    return OrbaxLeaf(tuple(path), ".".join(keys), value["value_type"], value.get("skip_deserialize") is True)


def parse_random_keys(data: bytes) -> dict[str, str]:
    """Parse a file of ``array_metadatas``; return the implementation of each array of random keys, by name.

    A file that is malformed has none: it is not needed to read arrays.
    """
    with suppress(ValueError, RecursionError, AttributeError, KeyError, TypeError):
        entries = [each["array_metadata"] for each in json.loads(data)["array_metadatas"]]
        return {
            each["param_name"]: str(implementation)[:80]
            for each in entries
            if each.get("ext_metadata") and (implementation := next(iter(each["ext_metadata"].values()), None))
        }
    return {}


def parse_object(data: bytes, where: str) -> Mapping[str, Any]:
    """Parse a JSON object. Raises: `CheckpointCorruptError`."""
    document = parse_json(data, where)
    if not isinstance(document, dict):
        raise CheckpointCorruptError(f"{where} is damaged: it is no JSON object")
    return document


def parse_json(data: bytes, where: str) -> Any:
    """Parse JSON. Raises: `CheckpointCorruptError`."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorruptError(f"{where} is damaged: it is no JSON ({str(error)[:80]})") from None


def parse_items(data: bytes, where: str) -> tuple[list[str], bool]:
    """Parse a ``_CHECKPOINT_METADATA``.

    Returns:
        The names of the items, none if the folder is the only item; and whether it has metadata of the user.
    """
    document = parse_object(data, where)
    handlers = document.get("item_handlers")
    names = list(handlers) if isinstance(handlers, dict) else []
    return names, bool(document.get("custom_metadata"))


def parse_layouts(data: bytes) -> Mapping[str, Layout]:
    """Parse a ``_sharding``: by name of an array, its layout on its mesh.

    Shardings that a layout does not describe are left out, as they are not needed to read.
    """
    layouts: dict[str, Layout] = {}
    meshes: dict[str, Mesh] = {}
    with suppress(ValueError, RecursionError, AttributeError):
        for encoded, text in json.loads(data).items():
            with suppress(
                binascii.Error, ValueError, KeyError, TypeError, AttributeError, RecursionError, LayoutError, MeshError
            ):
                layout = _layout(json.loads(text), meshes)
                layouts[base64.b64decode(encoded).decode()] = layout
    return layouts


def _layout(sharding: Mapping[str, Any], meshes: dict[str, Mesh]) -> Layout:
    if sharding["sharding_type"] != "NamedSharding":
        raise ValueError("it has no axes")
    axes = dict(zip(sharding["axis_names"], sharding["shape"], strict=True))
    if math.prod(axes.values()) > MAX_MESH_SIZE:
        raise ValueError("it has too many devices")
    if (key := repr(axes)) not in meshes:
        meshes[key] = abstract_mesh(axes)
    return Layout([_spec(each) for each in sharding["partition_spec"]], meshes[key])


def _spec(spec: Any) -> Any:
    if spec is None or spec == []:
        return UNSHARDED
    return tuple(spec) if isinstance(spec, list) else spec


def layout_of(layout: Layout | None, shape: Sequence[int]) -> Layout | None:
    """Return the layout of an array whose partition may name fewer dims than it has; None if it does not fit."""
    if layout is None or layout.rank > len(shape):
        return None
    with suppress(LayoutError):
        return Layout([*layout.sharding_specs, *[UNSHARDED] * (len(shape) - layout.rank)], layout.mesh)
    return None
