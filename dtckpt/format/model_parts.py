"""The names of files that are parts of a model, as transformers and the writers of PyTorch number them; pure.

::

    model-00001-of-00002.safetensors               a part: some of the tensors; the index names the file of each
    pytorch_model-00001-of-00002.bin               the same in a file of torch.save
    shard-00001-model-00001-of-00001.safetensors   the shards that one client had (`dtckpt.format.safetensors_shards`)
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection

from dtckpt.errors import CheckpointCorruptError, CheckpointIncompleteError, capped

MAX_PARTS = 1 << 20
"""Bound on the number of files that a name may tell."""
SHARD = re.compile(r"shard-(?P<number>[0-9]{1,9})-.*\.safetensors")
_PART = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{1,9})-of-(?P<count>[0-9]{1,9})(?P<suffix>\.safetensors|\.bin)")


_DESCRIPTIONS = (
    *("config.json", "generation_config.json", "tokenizer*", "vocab.*", "merges.txt", "special_tokens_map.json"),
    *("added_tokens.json", "preprocessor_config.json", "processor_config.json", "chat_template*", "model_index.json"),
    *("README*", "LICENSE*", "NOTICE*", "USE_POLICY*", "*.md", ".gitattributes", ".gitignore", ".git", ".cache"),
)


def is_description(file: str) -> bool:
    """Whether a file beside a published model describes the model or its tokenizer, by its name: it has no state."""
    return any(fnmatch.fnmatchcase(file, pattern) for pattern in _DESCRIPTIONS)


def validate_alone(file: str) -> None:
    """Refuse a file that is a part of a model by its name.

    Raises:
        CheckpointIncompleteError: It is.
    """
    if (match := SHARD.fullmatch(file)) is not None:
        raise CheckpointIncompleteError(
            f"{file} holds the shards of client {int(match['number'])} of a job only; give the directory of all shards"
        )
    if (match := _PART.fullmatch(file)) is not None and int(match["count"]) > 1:
        raise CheckpointIncompleteError(
            f"{file} is part {int(match['number'])} of {int(match['count'])} of a model; give its directory, or the "
            f"index {match['stem']}{match['suffix']}.index.json"
        )


def validate_parts(files: Collection[str], where: str) -> None:
    """Check that no file of a model in several files is missing, as far as the names tell.

    Args:
        files: The names of the files.
        where: Their folder, for messages.

    Raises:
        CheckpointIncompleteError: A file is missing.
        CheckpointCorruptError: A name claims too many files.
    """
    numbers: dict[tuple[str, str, str], set[int]] = {}
    for file in files:
        # A client has no file for the parts that it holds no tensor of.
        if SHARD.fullmatch(file) is None and (match := _PART.fullmatch(file)) is not None:
            numbers.setdefault((match["stem"], match["count"], match["suffix"]), set()).add(int(match["number"]))
    for (stem, count, suffix), found in numbers.items():
        if int(count) > MAX_PARTS:
            raise CheckpointCorruptError(f"{where} has a file that is one of {count} by its name, expected fewer")
        if absent := [number for number in range(1, int(count) + 1) if number not in found]:
            names = (f"{stem}-{str(number).zfill(len(count))}-of-{count}{suffix}" for number in absent)
            raise CheckpointIncompleteError(
                f"{where} holds {len(found)} of the {int(count)} files of a model; missing: "
                f"{capped(names, count=len(absent))}"
            )
