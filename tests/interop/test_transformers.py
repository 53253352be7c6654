"""`DtckptTrainer` on two processes: its files, their rotation, and the checkpoint that it resumes from."""

import shutil

import pytest

import dtckpt

from .example_cases import call

CASES = "interop.transformers_cases"
STEPS = 6


def train(pool, folder, steps=STEPS, *args, **options):
    answers = pool.values(call, CASES, "train", str(folder), steps, *args, clients=2, group=True, **options)
    assert answers[0] == answers[1]
    return answers[0]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def whole(framework_pool, tmp_path_factory):
    """A run of ours, and what became of it."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(framework_pool, folder)


def test_the_files_of_a_checkpoint(framework_pool, whole):
    folder, facts = whole
    assert names(folder) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    assert facts["last"] == "checkpoint-6"
    ours = {"dtckpt", "config.json", "generation_config.json", "model.safetensors", "trainer_state.json"}
    assert {*names(folder / "checkpoint-4")} == ours | {"training_args.bin"}
    tree = dtckpt.restore(folder / "checkpoint-4" / "dtckpt")
    assert (sorted(tree), sorted(tree["rng"])) == (["optimizer", "rng", "scheduler"], [0, 1])
    members = {name for group in tree["optimizer"]["param_groups"] for name in group["params"]}
    assert members == {*tree["optimizer"]["state"]}
    assert all("weight" in name or "bias" in name for name in members)


@pytest.mark.parametrize("resume", [True, "path"])
def test_a_run_goes_on(framework_pool, tmp_path, whole, resume):
    folder, facts = whole
    run = tmp_path / "run"
    shutil.copytree(folder / "checkpoint-4", run / "checkpoint-4")
    assert train(framework_pool, run, STEPS, resume if resume is True else str(run / "checkpoint-4")) == facts


def test_what_a_killed_save_has_left_is_passed_over(framework_pool, tmp_path, whole):
    folder, facts = whole
    run = shutil.copytree(folder, tmp_path / "run")
    (run / "checkpoint-6" / "trainer_state.json").write_text('{"epoch": 1.2, "log_hist')
    shutil.rmtree(run / "checkpoint-6" / "dtckpt")
    assert train(framework_pool, run, STEPS, True) == facts
    assert (run / "checkpoint-6" / "dtckpt").is_dir()


def test_rotation(framework_pool, tmp_path):
    train(framework_pool, tmp_path, STEPS, save_total_limit=1)
    assert names(tmp_path) == ["checkpoint-6"]
    train(framework_pool, tmp_path, STEPS + 2, True, save_total_limit=1)
    assert names(tmp_path) == ["checkpoint-8"]


def test_trainers_own_checkpoints_are_resumed_from(framework_pool, tmp_path, whole):
    _, facts = whole
    assert train(framework_pool, tmp_path, is_ours=False) == facts
    shutil.rmtree(tmp_path / "checkpoint-6")
    assert (tmp_path / "checkpoint-4" / "optimizer.pt").is_file()
    assert train(framework_pool, tmp_path, STEPS, True) == facts
    assert (tmp_path / "checkpoint-6" / "dtckpt").is_dir()


def test_the_best_model_and_no_state(framework_pool, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_only_model": True}
    train(framework_pool, tmp_path, STEPS, **options)
    assert not list(tmp_path.rglob("dtckpt"))
