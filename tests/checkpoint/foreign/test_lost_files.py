"""Each file of each sample is removed, and one is added to each folder: nothing is lost without a word."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

import dtckpt
from checkpoint.foreign.sample_files import copied_sample, facts, sample_names
from dtckpt import errors

OPTIONAL = {
    *("model.safetensors", "optimizer.pt", "optimizer.bin", "scheduler.pt", "scheduler.bin", "rng_state.pth"),
    *("random_states_0.pkl", "trainer_state.json", "custom_checkpoint_0.pkl"),
}
"""Parts of a folder of Hugging Face: trainers also write folders without them, and a note names the main ones."""
MARKS = {"adapter_config.json", "orbax.checkpoint"}
"""Without these, the same tensors have other names."""


class Content(NamedTuple):
    tensors: dict[str, Any]
    values: dict[str, str]
    refused: dict[str, str]
    notes: tuple[str, ...]
    unread: tuple[str, ...]


def content(path: Path) -> Content:
    with dtckpt.open_checkpoint(path) as checkpoint:
        return Content(
            {name: facts(checkpoint.read(name)) for name in checkpoint.tensors},
            {name: repr(value) for name, value in checkpoint.values.items()},
            {name: error.message for name, error in checkpoint.refused.items()},
            tuple(checkpoint.notes),
            tuple(checkpoint.unread),
        )


@pytest.fixture
def copy(request, tmp_path):
    return copied_sample(request.param, tmp_path / "copy")


def below(name, paths):
    return any(f"{name}/".startswith(f"{path}/") for path in paths)


@pytest.mark.share(3)
@pytest.mark.parametrize("copy", sample_names(), indirect=True)
def test_each_file_is_removed(copy):
    root, path = copy
    whole = content(path)
    for file in sorted(each for each in root.rglob("*") if each.is_file()):
        data = file.read_bytes()
        file.unlink()
        try:
            found = content(path)
        except errors.CheckpointError as error:
            is_pointer = file.name.startswith(("latest", "_CHECKPOINT_METADATA", "mp_rank_00_model"))
            is_gone = isinstance(error, errors.CheckpointNotFoundError) and (is_pointer or file.suffix == ".index")
            rank = f"of process {file.stem.rpartition('_rank')[2]} "
            if not (is_gone or file.name in error.message or rank in error.message):
                raise
        else:
            if file.name in MARKS:
                assert sorted(found.tensors.values()) == sorted(whole.tensors.values())
            else:
                known = whole.tensors | whole.values
                left = found.tensors | found.values
                refused = found.refused.keys() - whole.refused.keys()
                # Lists have None in place of an item that is refused.
                kept = {name for name in left if not any(below(path, [name]) for path in refused)}
                assert {name: known.get(name) for name in kept} == {name: left[name] for name in kept}, file
                words = [*(found.refused[name] for name in refused), *found.notes]
                names = (file.name, str(file.parent.relative_to(root)))  # a chunk, or the array that it is of
                is_named = file.name in OPTIONAL or any(name in text for name in names for text in words)
                assert known.keys() == left.keys() or is_named, file
        finally:
            file.write_bytes(data)


@pytest.mark.share(3)
@pytest.mark.parametrize("copy", sample_names(), indirect=True)
def test_a_file_is_added_to_each_folder(copy):
    _, path = copy
    whole = content(path)
    base = path if path.is_dir() else path.parent
    # The folder of a run has other things beside the checkpoint.
    is_run = any(base.glob("latest*"))
    for folder in sorted({*([] if is_run else [base]), *(each for each in base.rglob("*") if each.is_dir())}):
        stranger = folder / ("stranger.bin" if path.is_dir() else f"{path.name}.stranger")
        stranger.write_bytes(b"somebody's")
        found = content(path)
        assert found.tensors == whole.tensors
        named = [name.removeprefix("../") for name in found.unread if name not in whole.unread]
        relative = stranger.relative_to(base)
        wanted = {str(relative), str(relative.relative_to(relative.parts[0])) if len(relative.parts) > 1 else ""}
        is_known = any(below(str(relative), [name]) for name in whole.unread)
        assert is_known or wanted & set(named) or any(below(each, named) for each in wanted if each), (folder, named)
        stranger.unlink()
