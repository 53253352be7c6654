import pytest
import torch

import dtckpt
from dtckpt import RestoreOptions
from dtckpt.checkpoint.restoring.wrapper_prefixes import match_unwrapped, unwrapped
from dtckpt.errors import TensorNotFoundError


@pytest.mark.parametrize(
    ("key", "name"),
    {
        "weight": "weight",
        "_orig_mod.weight": "weight",
        "module._orig_mod.module.a.weight": "a.weight",
        "a._checkpoint_wrapped_module.b._fsdp_wrapped_module.weight": "a.b.weight",
        "a.module.weight": "a.module.weight",
        "module": "module",
        "module.module": "module",
        "_orig_mod": "_orig_mod",
        "state.module.a.weight.exp_avg": "state.a.weight.exp_avg",
        "state": "state",
        "": "",
    }.items(),
)
def test_names_without_wrappers(key, name):
    assert unwrapped(key) == name


@pytest.mark.parametrize(
    ("wanted", "saved", "matched"),
    [
        (["a"], ["a", "module.a"], {}),
        (["_orig_mod.a"], ["a"], {"_orig_mod.a": "a"}),
        (["a"], ["module.a"], {"a": "module.a"}),
        (["module.a"], ["_orig_mod.a"], {"module.a": "_orig_mod.a"}),
        (["_orig_mod.a"], ["a", "module.a"], {}),
        (["_orig_mod.a", "module.a"], ["a"], {}),
        ([0, None], ["0"], {}),
        (["b"], [], {}),
    ],
)
def test_keys_that_only_wrappers_tell_apart(wanted, saved, matched):
    assert match_unwrapped(wanted, saved) == matched


class CountedKey(str):
    """A key that counts how often any key is compared with another."""

    comparisons = 0

    def __eq__(self, other):
        CountedKey.comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


@pytest.mark.parametrize("prefix", ["", "module.", "other."])
def test_many_keys_are_compared_a_few_times_each(prefix):
    wanted = [CountedKey(f"{prefix}layers.{number}.weight") for number in range(3000)]
    saved = [CountedKey(f"layers.{number}.weight") for number in range(3000)]
    CountedKey.comparisons = 0
    assert len(match_unwrapped(wanted, saved)) == (3000 if prefix == "module." else 0)
    assert CountedKey.comparisons < 20 * 3000


def test_a_compiled_module_takes_the_state_of_the_plain_one(tmp_path):
    torch.manual_seed(0)
    plain, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    reports = []
    options = RestoreOptions(report=reports.append)
    dtckpt.save(tmp_path / "plain", {"model": plain, "step": 3})
    dtckpt.restore(tmp_path / "plain", {"model": torch.compile(other, backend="eager"), "step": 0}, options=options)
    assert other.weight.equal(plain.weight)
    assert reports[0].renamed == {"model/weight": "model/_orig_mod.weight", "model/bias": "model/_orig_mod.bias"}
    assert reports[0].restored == ("model/_orig_mod.weight", "model/_orig_mod.bias")
    dtckpt.save(tmp_path / "wrapped", {"model": {f"module.{name}": each for name, each in plain.state_dict().items()}})
    torch.nn.init.zeros_(other.weight)
    dtckpt.restore(tmp_path / "wrapped", {"model": other})
    assert other.weight.equal(plain.weight)


def test_an_error_names_the_nearest_names(tmp_path):
    dtckpt.save(tmp_path / "s", {"model": {"layers.0.weight": torch.ones(1), "layers.1.weight": torch.ones(1)}, "n": 1})
    with pytest.raises(
        TensorNotFoundError,
        match=r"nothing at 'model/layer.0.weight' \(of the unmatched names, 'model/layers.0.weight' is nearest to "
        r"'model/layer.0.weight'\)",
    ):
        dtckpt.restore(
            tmp_path / "s", {"model": {"layer.0.weight": torch.ones(1), "layers.1.weight": torch.ones(1)}, "n": 0}
        )
