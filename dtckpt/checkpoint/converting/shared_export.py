"""`export_together`: write safetensors files of a checkpoint by all clients, each its share of the files.

    client 0, the leader                       client 1
    ---------------------------------------    ----------------------------
    choose, make a hidden folder               (nothing)                        round ``chosen``
    plan, check the target                     plan                             round ``planned``
    write its files, sync                      write its files, sync            round ``written``
    read all files back, rename the folder     (nothing)                        round ``placed``

All clients make the same plan, and compare its digest. The proof of each tensor is made by the client that writes it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from dtckpt.checkpoint.collective import Collective
from dtckpt.checkpoint.converting.convert import (
    DEFAULT_MAX_MEMORY,
    DEFAULT_SHARD_NBYTES,
    validate_sizes,
    validate_tied,
)
from dtckpt.checkpoint.converting.export import plan_export
from dtckpt.checkpoint.converting.file_plan import FilePlan
from dtckpt.checkpoint.converting.files_target import FilesConversion
from dtckpt.checkpoint.converting.targets import FILE_TARGETS
from dtckpt.checkpoint.leaves import dtype_name
from dtckpt.checkpoint.open import open_checkpoint
from dtckpt.checkpoint.restoring.rename_rules import Rename
from dtckpt.errors import CheckpointConflictError, ConfigError
from dtckpt.storage.location import Location, validate_not_nested
from dtckpt.storage.new_files import check_new, new_files

TARGET = FILE_TARGETS["safetensors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """The options of an export; all as for `dtckpt.convert`."""

    select: str | Sequence[str] = ()
    rename: Rename | None = None
    dtype: torch.dtype | None = None
    tied: Mapping[str, str] | None = None
    max_shard_size: int = DEFAULT_SHARD_NBYTES
    max_memory: int = DEFAULT_MAX_MEMORY
    overwrite: bool = False


def export_together(
    collective: Collective,
    choose: Callable[[], int],
    source_of: Callable[[int], Location],
    where: Location,
    options: ExportOptions,
) -> int:
    """Write safetensors files of the checkpoint of a step; return the step.

    Collective: Over the participants, in rounds ``chosen``, ``planned``, ``written`` and ``placed``.

    Args:
        collective: The operation, whose lock the caller holds.
        choose: Returns the step; called on the leader.
        source_of: Returns the path or URL of a step's checkpoint.
        where: The target, which all clients reach.
        options: See `ExportOptions`.

    Raises:
        CheckpointConflictError: Clients see different checkpoints, or export with different options.
        DtckptError: As for `dtckpt.convert`; the same on all clients.
    """
    with ExitStack() as placed, ExitStack() as opened:

        def begin() -> tuple[None, bytes]:
            if not collective.is_leader:
                return None, b""
            validate_sizes(options.max_memory, options.max_shard_size)
            step = choose()
            validate_not_nested(source_of(step), where)
            if not isinstance(where, Path):
                raise ConfigError(f"safetensors files are written to a file system; got {where}; export to a path")
            is_file = where.name.endswith(TARGET.suffixes)
            check = functools.partial(
                check_new,
                where,
                TARGET.is_own,
                is_file=is_file,
                overwrite=options.overwrite,
                advice="ExportOptions(overwrite=True)",
            )
            check()
            folder = placed.enter_context(new_files(where, check, is_file=is_file))
            return None, json.dumps([step, folder.name]).encode()

        def plan() -> tuple[FilesConversion, bytes]:
            checkpoint = opened.enter_context(open_checkpoint(source_of(step)))
            export = plan_export(
                checkpoint,
                select=[options.select] if isinstance(options.select, str) else options.select,
                rename=options.rename,
                dtype=None if options.dtype is None else dtype_name(options.dtype),
                tied=options.tied,
            )
            planned = FilesConversion(
                checkpoint,
                export,
                where,
                TARGET,
                max_memory=options.max_memory,
                max_file_nbytes=options.max_shard_size,
                overwrite=options.overwrite,
            )
            if collective.is_leader:
                validate_tied(checkpoint, export, options.tied or {})
            return planned, f"{planned.digest(checkpoint.identity):016x}".encode()

        _, payloads = collective.run_first_round("chosen", begin)
        step, folder_name = json.loads(payloads[collective.leader])
        conversion, digests = collective.run_round_with_value("planned", plan)
        if len(set(digests.values())) > 1:
            raise CheckpointConflictError(
                f"clients cannot export step {step} to {where} together: they see different checkpoints, or pass "
                "different arguments; call export alike on all clients, on one shared file system"
            )
        folder = conversion.path.with_name(folder_name)

        def write() -> None:
            number = collective.participants.index(collective.client)
            conversion.write(folder, shares(conversion.plans, len(collective.participants))[number])

        def place() -> None:
            if collective.is_leader:
                conversion.validate(folder)
                placed.close()

        collective.run_round("written", write)
        collective.run_round("placed", place)
        return int(step)


def shares(files: Sequence[FilePlan], num_clients: int) -> list[list[FilePlan]]:
    """Deal files out to clients: the largest first, each to the client that has the fewest bytes so far."""
    found: list[list[FilePlan]] = [[] for _ in range(num_clients)]
    nbytes = [0] * num_clients
    for file in sorted(files, key=lambda each: (-each.nbytes, each.name)):
        least = nbytes.index(min(nbytes))
        found[least].append(file)
        nbytes[least] += file.nbytes
    return found
