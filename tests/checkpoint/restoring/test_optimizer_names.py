"""The state of optimizers finds its parameters by their names, whatever the order, the groups and the stages."""

import re

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import LBFGS, SGD, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam
from torch.optim.lr_scheduler import LambdaLR

import dtckpt
from checkpoint import optimizer_cases
from checkpoint.optimizer_cases import net, state_by_name, stepped
from dtckpt import RestoreOptions
from dtckpt.errors import ShapeMismatchError, TensorNotFoundError, TreeError


def restored(path, tree, **options):
    """Restore a tree; return the report."""
    reports = []
    dtckpt.restore(path, tree, options=RestoreOptions(report=reports.append, **options))
    return reports[-1]


@pytest.fixture
def saved(tmp_path):
    """A path, and the state by name that was saved there."""
    model = net("abc")
    optimizer = stepped(AdamW(model.parameters()), model)
    dtckpt.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    return tmp_path / "s", state_by_name(optimizer, model)


def test_layers_in_another_order(saved):
    path, expected = saved
    model = net("cab")
    optimizer = AdamW(model.parameters())
    report = restored(path, {"model": model, "optimizer": optimizer})
    assert state_by_name(optimizer, model) == expected
    assert set(report.owners.values()) == {"name"}
    assert report.owners["optimizer/state/model/a.weight"] == "name"


def test_members_that_moved_between_groups_of_one_size(tmp_path):
    model = net("ab")
    a, b = (list(layer.parameters()) for layer in model.children())
    optimizer = stepped(AdamW([{"params": a, "lr": 0.1}, {"params": b, "lr": 0.2}]), model)
    dtckpt.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    other = net("ab")
    a, b = (list(layer.parameters()) for layer in other.children())
    groups = [{"params": [a[0], b[0]], "lr": 1.0}, {"params": [b[1], a[1]], "lr": 1.0}]
    target = AdamW(groups)
    dtckpt.restore(tmp_path / "s", {"model": other, "optimizer": target})
    assert state_by_name(target, other) == state_by_name(optimizer, model)
    # A group takes the options that most of its members had; of options that equally many have, the first.
    assert [group["lr"] for group in target.param_groups] == [0.1, 0.2]


def test_groups_that_become_one(tmp_path):
    model = net("ab")
    groups = [
        {"params": layer.parameters(), "lr": torch.tensor(rate)}
        for layer, rate in zip(model.values(), (1.0, 2.0), strict=True)
    ]
    optimizer = stepped(AdamW(groups), model)
    dtckpt.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    other = net("ba")
    target = AdamW(other.parameters(), lr=torch.tensor(7.0))
    # The rate of the other group is not unexpected, be it a number or a tensor.
    dtckpt.restore(tmp_path / "s", {"model": other, "optimizer": target})
    assert target.param_groups[0]["lr"] == 2.0
    assert state_by_name(target, other) == state_by_name(optimizer, model)


@pytest.mark.parametrize("key", ["optimizer", "other"])
def test_names_that_the_optimizer_got(tmp_path, key):
    model = net("abc")
    optimizer = stepped(AdamW(model.named_parameters()), model)
    trees = {"optimizer": {"optimizer": optimizer}, "other": {"net": model, "optimizer": optimizer}}
    dtckpt.save(tmp_path / "s", trees[key])
    other = net("bca")
    target = AdamW(other.named_parameters())
    report = restored(tmp_path / "s", {"optimizer": target}, allow_unexpected=True)
    assert state_by_name(target, other) == state_by_name(optimizer, model)
    assert set(report.owners.values()) == {"name"}


def test_an_optimizer_without_its_module_and_one_with_it(tmp_path):
    model = net("abc")
    optimizer = stepped(AdamW(model.named_parameters()), model)
    dtckpt.save(tmp_path / "s", {"optimizer": optimizer})
    other = net("bca")
    target = AdamW(other.parameters())
    restored(tmp_path / "s", {"model": other, "optimizer": target}, allow_missing=True)
    assert state_by_name(target, other) == state_by_name(optimizer, model)


def test_equal_names_of_layers_in_a_list_that_was_reordered(tmp_path):
    model = net("ab")
    optimizers = [stepped(SGD(layer.named_parameters(), momentum=0.9), model) for layer in model.children()]
    dtckpt.save(tmp_path / "s", {"model": model, "optimizers": optimizers})
    other = net("ab")
    targets = [SGD(layer.named_parameters(), momentum=0.9) for layer in reversed(list(other.children()))]
    dtckpt.restore(tmp_path / "s", {"model": other, "optimizers": targets})
    for target, optimizer in zip(targets, reversed(optimizers), strict=True):
        assert state_by_name(target, other) == state_by_name(optimizer, model)


def test_a_new_head_gets_no_state_of_the_old_one(tmp_path):
    model = nn.ModuleDict({"body": net("a"), "old": net("b")})
    tree = {"body": model["body"], "old": model["old"], "optimizer": stepped(AdamW(model.parameters()), model)}
    dtckpt.save(tmp_path / "s", tree)
    other = nn.ModuleDict({"body": net("a"), "new": net("b")})
    target = {"body": other["body"], "new": other["new"], "optimizer": AdamW(other.parameters())}
    with pytest.raises(TensorNotFoundError, match=r"new/b\.weight"):
        dtckpt.restore(tmp_path / "s", target)
    report = restored(tmp_path / "s", target, allow_missing=True, allow_unexpected=True)
    assert state_by_name(target["optimizer"], other).keys() == {"body.a.weight", "body.a.bias"}
    assert "optimizer/state/old/b.weight/exp_avg" in report.unexpected


def test_one_optimizer_per_client_keeps_its_names(tmp_path):
    model = net("ab")
    mine = {"model": model, "optimizer": stepped(AdamW(model.parameters()), model)}
    dtckpt.save(tmp_path / "s", {"mine": dtckpt.PerClient(mine)})
    other = net("ba")
    target = {"model": other, "optimizer": AdamW(other.parameters())}
    dtckpt.restore(tmp_path / "s", {"mine": dtckpt.PerClient(target)})
    assert state_by_name(target["optimizer"], other) == state_by_name(mine["optimizer"], model)


def test_state_is_named_as_the_tensors_of_the_model(tmp_path):
    model = nn.ModuleDict({"a": checkpoint_wrapper(nn.Linear(3, 3))})
    dtckpt.save(tmp_path / "s", {"model": model, "optimizer": stepped(AdamW(model.parameters()), model)})
    with dtckpt.open_checkpoint(tmp_path / "s") as checkpoint:
        assert {"model/a.weight", "optimizer/state/model/a.weight/exp_avg"} <= {*checkpoint.tensors}


# --- numbers ---


def save_numbered(path, layers="abc", kind=AdamW):
    model = net(layers)
    optimizer = stepped(kind(model.parameters()), model)
    dtckpt.save(path, {"model": model, "optimizer": optimizer.state_dict()})
    return state_by_name(optimizer, model)


def test_a_numbered_checkpoint_is_matched_by_position(tmp_path):
    expected = save_numbered(tmp_path / "s")
    model = net("abc")
    target = AdamW(model.parameters())
    report = restored(tmp_path / "s", {"model": model, "optimizer": target})
    assert state_by_name(target, model) == expected
    assert set(report.owners.values()) == {"position"}
    with pytest.raises(TensorNotFoundError, match="found by position, which strict='names' refuses"):
        dtckpt.restore(tmp_path / "s", {"model": model, "optimizer": target}, strict="names")


@pytest.mark.parametrize("kind", [AdamW, Adagrad, torch.optim.Adafactor])
def test_a_numbered_checkpoint_whose_shapes_do_not_fit_is_refused(tmp_path, kind):
    model = nn.ModuleDict({"a": nn.Linear(2, 3), "b": nn.Linear(4, 5)})
    dtckpt.save(tmp_path / "s", {"model": model, "optimizer": stepped(kind(model.parameters()), model).state_dict()})
    other = nn.ModuleDict({"b": nn.Linear(4, 5), "a": nn.Linear(2, 3)})
    target = kind(other.parameters())
    before = state_by_name(target, other)
    text = re.escape("number 0 has another shape; got (5, 4) in the target, the saved state 'optimizer/state/0' has")
    with pytest.raises(ShapeMismatchError, match=text):
        dtckpt.restore(tmp_path / "s", {"model": other, "optimizer": target})
    assert state_by_name(target, other) == before


@pytest.mark.parametrize(("layers", "has_names", "rule"), [("abc", False, "position"), ("bca", True, "name")])
def test_a_named_checkpoint_into_the_dict_of_an_optimizer(saved, layers, has_names, rule):
    path, expected = saved
    model = net(layers)
    optimizer = AdamW(model.named_parameters() if has_names else model.parameters())
    tree = {"model": model, "optimizer": optimizer.state_dict()}
    report = restored(path, tree)
    optimizer.load_state_dict(tree["optimizer"])
    assert state_by_name(optimizer, model) == expected
    assert set(report.owners.values()) == {rule}


def test_a_named_checkpoint_into_an_optimizer_alone(saved):
    path, expected = saved
    model = net("abc")
    optimizer = AdamW(model.parameters())
    report = restored(path, {"optimizer": optimizer}, allow_unexpected=True)
    assert state_by_name(optimizer, model) == expected
    assert set(report.owners.values()) == {"position"}


# --- options and classes ---


def test_a_key_that_a_newer_pytorch_has(tmp_path):
    model = net("ab")
    optimizer = stepped(AdamW(model.parameters(), lr=0.5), model)
    value = optimizer.param_groups[0].pop("maximize")
    dtckpt.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    target = AdamW(model.parameters())
    report = restored(tmp_path / "s", {"model": model, "optimizer": target})
    assert (target.param_groups[0]["lr"], target.param_groups[0]["maximize"]) == (0.5, value)
    assert report.owners["optimizer/param_groups/0/maximize"] == "default"
    assert report.owners["optimizer/param_groups/0"] == "name"
    with pytest.raises(TensorNotFoundError, match="param_groups/0/maximize'; found by default"):
        dtckpt.restore(tmp_path / "s", {"model": model, "optimizer": target}, strict="names")


@pytest.mark.parametrize(
    ("kind", "other", "lacking"),
    [
        (SGD, Adam, "amsgrad"),
        (Adagrad, Adam, "amsgrad"),
        (Adamax, Adam, "amsgrad"),
        (RAdam, AdamW, "amsgrad"),
        (RAdam, NAdam, "momentum_decay"),
    ],
)
def test_the_state_of_another_class_is_refused(tmp_path, kind, other, lacking):
    model = net("ab")
    dtckpt.save(tmp_path / "s", {"model": model, "optimizer": stepped(kind(model.parameters(), lr=0.1), model)})
    target = other(model.parameters())
    with pytest.raises(TensorNotFoundError, match=lacking):
        dtckpt.restore(tmp_path / "s", {"model": model, "optimizer": target})
    assert not target.state


def test_lbfgs_keeps_its_order(tmp_path):
    model = net("abc")
    optimizer = LBFGS(model.parameters(), history_size=3, max_iter=3)
    for _ in range(2):
        optimizer.step(lambda: optimizer_cases.gradients(model))
    dtckpt.save(tmp_path / "s", {"model": model, "optimizer": optimizer})
    other = net("abc")
    target = LBFGS(other.parameters(), history_size=3, max_iter=3)
    dtckpt.restore(tmp_path / "s", {"model": other, "optimizer": target})
    for module, each in ((model, optimizer), (other, target)):
        each.step(lambda module=module: optimizer_cases.gradients(module))
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    for layers in ("bac", "ab"):
        part = net(layers)
        target = LBFGS(part.parameters(), history_size=3)
        with pytest.raises(TreeError, match="all parameters in their order"):
            restored(tmp_path / "s", {"model": part, "optimizer": target}, allow_unexpected=True)
        assert not target.state


def test_a_scheduler_follows_the_parameters_to_another_optimizer(tmp_path):
    def jobs(layers, rates):
        model = net("ab")
        optimizers = [SGD(model[layer].parameters(), lr=rate) for layer, rate in zip(layers, rates, strict=True)]
        return model, optimizers, [LambdaLR(each, lambda epoch: 0.5**epoch) for each in optimizers]

    model, optimizers, schedulers = jobs("ab", (0.1, 0.2))
    for each in (*optimizers, *schedulers):
        each.step()
    dtckpt.save(tmp_path / "s", {"model": model, "optimizers": optimizers, "schedulers": schedulers})
    other, targets, target_schedulers = jobs("ba", (7.0, 7.0))
    dtckpt.restore(tmp_path / "s", {"schedulers": target_schedulers, "model": other, "optimizers": targets})
    assert [scheduler.base_lrs for scheduler in target_schedulers] == [[0.2], [0.1]]
    for each in (*targets, *target_schedulers):
        each.step()
    assert [optimizer.param_groups[0]["lr"] for optimizer in targets] == [0.2 * 0.25, 0.1 * 0.25]
    apart = {"one": target_schedulers[0], "two": target_schedulers[1], "model": other, "optimizers": targets}
    dtckpt.save(tmp_path / "apart", apart)
    model, optimizers, schedulers = jobs("ab", (7.0, 7.0))
    apart = {"one": schedulers[0], "two": schedulers[1], "model": model, "optimizers": optimizers}
    with pytest.raises(TreeError, match="keep schedulers in a list or dict with the keys of their optimizers"):
        dtckpt.restore(tmp_path / "apart", apart)


# --- objects ---


class Drawing:
    """An object that draws numbers when it is saved and when it is loaded."""

    calls = 0

    def state_dict(self):
        self.calls += 1
        torch.rand(1)
        return {"x": 1}

    def load_state_dict(self, state):
        torch.rand(3)


def test_random_states_are_taken_and_given_last(tmp_path):
    torch.manual_seed(3)
    tree = {"rng": dtckpt.RngState(), "drawing": Drawing()}
    dtckpt.save(tmp_path / "s", tree)
    expected = torch.rand(4)
    torch.manual_seed(5)
    dtckpt.restore(tmp_path / "s", {"rng": dtckpt.RngState(), "drawing": Drawing()})
    assert torch.rand(4).equal(expected)


def test_a_restore_asks_an_object_for_its_state_once(tmp_path):
    model = net("ab")
    tree = {"x": torch.ones(2), "drawing": Drawing(), "more": [Drawing()], "model": model}
    dtckpt.save(tmp_path / "s", {**tree, "optimizer": AdamW(model.parameters())})
    tree |= {"drawing": (one := Drawing()), "more": [(other := Drawing())]}
    optimizer = AdamW(model.parameters())
    states = []
    optimizer.register_state_dict_pre_hook(states.append)
    dtckpt.restore(tmp_path / "s", {**tree, "optimizer": optimizer})
    assert (one.calls, other.calls, len(states)) == (1, 1, 1)


@pytest.mark.parametrize(
    "rename",
    [
        {"model/*": "net/*"},
        {"model/*": "net/*", "optimizer/*": "adam/*"},
        {re.compile(r"^model/(.*)"): r"net/\1"},
        lambda name: name.replace("model/", "net/"),
        lambda name: re.sub("^model/", "net/", name),
    ],
    ids=["globs", "both", "regex", "function everywhere", "function"],
)
def test_new_names(saved, rename):
    path, expected = saved
    model = net("bca")
    optimizer = AdamW(model.parameters())
    key = "adam" if isinstance(rename, dict) and "optimizer/*" in rename else "optimizer"
    report = restored(path, {"net": model, key: optimizer}, rename=rename)
    assert state_by_name(optimizer, model) == expected
    assert set(report.owners.values()) == {"name"}


# --- several clients ---


def test_fsdp_with_layers_in_another_order(pool, tmp_path):
    saved = pool.values(optimizer_cases.save, f"{tmp_path}/s", "fsdp", "abc", clients=2, group=True)
    found = pool.values(optimizer_cases.restore, f"{tmp_path}/s", "fsdp", "cab", clients=2, group=True)
    assert found == saved
    assert pool.values(optimizer_cases.restore, f"{tmp_path}/s", "fsdp", "bca", clients=1, group=True) == saved[:1]


@pytest.mark.parametrize("clients", [1, 4])
def test_stages_of_a_pipeline(pool, tmp_path, clients):
    saved = pool.values(optimizer_cases.save, f"{tmp_path}/s", "stages", "abcd", clients=2, group=True)
    expected = saved[0] | saved[1]
    found = pool.values(optimizer_cases.restore, f"{tmp_path}/s", "stages", "abcd", clients=clients, group=True)
    assert {name: each for part in found for name, each in part.items()} == expected
    assert len(expected) == 8
