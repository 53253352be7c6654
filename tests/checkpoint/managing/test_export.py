"""`CheckpointManager.export`: all clients write the files that one client alone would write, or nothing appears."""

import pytest
import torch

import dtckpt
from checkpoint.saving import save_async_cases
from dtckpt import CheckpointManager, ExportOptions, errors


def files_in(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("shard_size", [1, 1 << 30])
def test_the_files_are_those_of_one_client(pool, tmp_path, clients, shard_size):
    root, path = tmp_path / "run", tmp_path / "model"
    written = pool.values(save_async_cases.export, f"{root}", f"{path}", shard_size, clients=clients)
    expected = tmp_path / "expected"
    rename = {"w": "weight"}
    dtckpt.convert(root / "step_00000002", expected, to="safetensors", max_shard_size=shard_size, rename=rename)
    assert files_in(path) == files_in(expected)
    assert sorted(name for names in written for name in names) == sorted(files_in(path))
    if clients == 3 and shard_size == 1:
        assert all(written), "each client has a share"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["expected", "model", "run"]
    restored = dtckpt.restore(path)
    assert restored.keys() == {"weight", "c", "step"}


@pytest.mark.parametrize("victim", [0, 1])
def test_nothing_appears_if_one_client_fails(pool, tmp_path, victim):
    root, path = tmp_path / "run", tmp_path / "model"
    pool.values(save_async_cases.export, f"{root}", f"{path}", 1, clients=2)
    before = files_in(path)
    answers = pool.run(save_async_cases.export, f"{root}", f"{path}", 2, victim, clients=2)
    assert [answer.error for answer in answers] == ["StorageFullError"] * 2
    assert files_in(path) == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model", "run"]
    pool.values(save_async_cases.export, f"{root}", f"{path}", 1 << 30, clients=2)
    assert [path.name for path in path.iterdir()] == ["model.safetensors"]


def test_clients_that_export_differently(pool, tmp_path):
    answers = pool.run(save_async_cases.export_differently, f"{tmp_path}/run", f"{tmp_path}/model", clients=2)
    assert [answer.error for answer in answers] == ["CheckpointConflictError"] * 2
    assert not (tmp_path / "model").exists()


@pytest.fixture
def manager(tmp_path):
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, {"w": torch.arange(3.0), "v": torch.arange(3.0)})
        yield manager


def test_one_file_of_a_step(tmp_path, manager):
    options = ExportOptions(select="*", dtype=torch.bfloat16, tied={"v": "w"})
    assert manager.export(tmp_path / "m.safetensors", 1, options=options) == 1
    assert dtckpt.restore(tmp_path / "m.safetensors")["w"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("step", "options", "error"),
    [
        (2, {}, errors.CheckpointNotFoundError),
        (None, {"select": "none"}, errors.TensorNotFoundError),
        (None, {"max_memory": 0}, errors.ConfigError),
        (None, {"dtype": torch.int8}, errors.ConfigError),
    ],
)
def test_refused_exports_leave_nothing(tmp_path, manager, step, options, error):
    with pytest.raises(error):
        manager.export(tmp_path / "model", step, options=ExportOptions(**options))
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_targets_that_are_refused(tmp_path, manager):
    for target in ("memory://bucket/model", tmp_path / "run" / "step_00000001" / "model"):
        with pytest.raises(errors.ConfigError):
            manager.export(target)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(errors.CheckpointExistsError):
        manager.export(tmp_path / "model", options=ExportOptions(overwrite=True))
    with pytest.raises(errors.CheckpointNotFoundError, match="there is no checkpoint to export"):
        CheckpointManager(tmp_path / "empty").export(tmp_path / "other")
