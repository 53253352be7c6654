"""Lightning's trainer on two processes, with callbacks, metrics and removals, under both plug-ins."""

import pytest

from .example_cases import call

CASES = "interop.lightning_cases"


def fit(pool, folder, kind, epochs, checkpoint=None, clients=2, **options):
    answers = pool.values(
        call, CASES, "fit", str(folder), kind, epochs, checkpoint, clients=clients, group=True, **options
    )
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


@pytest.mark.share(1)
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_run_with_everything(framework_pool, tmp_path, kind, is_async):
    whole = fit(framework_pool, tmp_path / "whole", kind, 4, is_async=is_async)
    assert whole["names"] == [whole["best"], "last.ckpt"] == ["epoch=3.ckpt", "last.ckpt"]
    assert whole["best again"] == pytest.approx(whole["score"])
    fit(framework_pool, tmp_path / "part", kind, 2, is_async=is_async)
    clients = {0: 0} if kind == "ddp" else {0: 0, 1: 1}
    resumed = fit(framework_pool, tmp_path / "part", kind, 4, "last", is_async=is_async)
    assert resumed == whole | {"clients": clients}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_run_that_began_with_lightnings_own_checkpoints(framework_pool, tmp_path, kind):
    whole = fit(framework_pool, tmp_path / "whole", kind, 3, is_plugged=False)
    fit(framework_pool, tmp_path / "part", kind, 2, is_plugged=False)
    resumed = fit(framework_pool, tmp_path / "part", kind, 3, "last")
    assert (tmp_path / "part" / "last.ckpt" / "dtckpt.manifest").is_file()
    assert resumed == whole | {"clients": {}}


def test_a_link_to_the_last_checkpoint(framework_pool, tmp_path):
    whole = fit(framework_pool, tmp_path / "whole", "ddp", 3, save_last="link")
    assert (tmp_path / "whole" / "last.ckpt").resolve().name == whole["best"]
    fit(framework_pool, tmp_path / "part", "ddp", 2, save_last="link")
    resumed = fit(framework_pool, tmp_path / "part", "ddp", 3, "last", save_last="link")
    assert resumed["best again"] == whole["best again"]


def test_fabric(framework_pool, tmp_path):
    path = str(tmp_path / "step_7.ckpt")
    assert framework_pool.values(call, CASES, "use_fabric", path, clients=2, group=True) == [[True, 7, 2]] * 2
    assert (tmp_path / "step_7.ckpt" / "dtckpt.manifest").is_file()


def test_strict_loading(framework_pool, tmp_path):
    fit(framework_pool, tmp_path / "c", "fsdp2", 1)
    arguments = str(tmp_path / "c"), str(tmp_path / "c" / "last.ckpt")
    for errors in framework_pool.values(call, CASES, "fit_strictly", *arguments, clients=2, group=True):
        assert errors == ["TensorNotFoundError", "UnexpectedTensorError"]
