"""Parse the files that Megatron-Core adds to a distributed checkpoint of PyTorch: format, common state; pure.

``metadata.json`` is written last and names the format. Values that are the same on all processes are in ``common.pt``,
and from 0.19 in the item `COMMON_ITEM`, a list of one dict. Tensors need a word in two cases, which `notes_of` says.

Sources: megatron.core.dist_checkpointing, and megatron.core.optimizer.distrib_optimizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from dtckpt.checkpoint.reading.pieces import PieceTensor
from dtckpt.errors import CheckpointVersionError
from dtckpt.format import tree as trees

COMMON_ITEM = "common_state/shard_0_1"
"""The name of the item."""
STEP_NAME = "latest_checkpointed_iteration.txt"
"""The file of a run's folder that names the newest step."""
BACKEND, VERSION = "torch_dist", 1
_PADDED = re.compile(r"(module\.|model\.)?(embedding\.word_embeddings|output_layer)\.weight")
_BUCKET = re.compile(r"optimizer\.distributed\.dp_group_idx_[0-9]+\.gbuf_idx_[0-9]+\..+")
_VOCABULARY = "args/padded_vocab_size"


def is_format(data: bytes, where: str, expected: str = BACKEND) -> bool:
    """Whether ``metadata.json`` names a format of Megatron.

    Args:
        data: Its content.
        where: Its name, for messages.
        expected: The format of the other files in the directory.

    Raises:
        CheckpointVersionError: The file names another format, or another version than `VERSION`.
    """
    content = None
    with suppress(ValueError, RecursionError):
        content = json.loads(data)
    if not isinstance(content, dict) or not isinstance(backend := content.get("sharded_backend"), str):
        return False
    version = content.get("sharded_backend_version", VERSION)
    if (backend, version) != (expected, VERSION):
        raise CheckpointVersionError(
            f"{where} names format {backend[:40]!r} of version {str(version)[:20]}, expected {expected!r} of version "
            f"{VERSION}; convert the checkpoint with Megatron, or upgrade dtckpt"
        )
    return True


def step_folder(text: str) -> str:
    """Return the name of the folder of the step that `STEP_NAME` names: a number, or ``release``."""
    text = text.strip()
    return f"iter_{int(text):07d}" if text.isdecimal() else text


def only_item(value: Any) -> Any:
    """Return the value that Megatron pickled as a list of one."""
    return value[0] if type(value) is list and len(value) == 1 else value


def notes_of(tensors: Mapping[str, PieceTensor], structure: trees.Node) -> Iterator[str]:
    """Yield what a reader must know about the tensors of Megatron's checkpoint."""
    if any(map(_BUCKET.fullmatch, tensors)):
        yield (
            "optimizer.distributed.*: flat buffers of Megatron's distributed optimizer (dp_reshardable); the files do "
            "not tell the place of each parameter: --dist-ckpt-optim-fully-reshardable writes it by parameter"
        )
    vocabulary = next((node for path, node in trees.value_nodes(structure) if path == _VOCABULARY), {})
    padded = vocabulary.get("value")
    for name, tensor in tensors.items():
        if _PADDED.fullmatch(name.removeprefix("model/")) and tensor.shape[:1] == (padded,):
            yield f"{name}: {padded} rows are the vocabulary as Megatron padded it; the last rows may be padding"
