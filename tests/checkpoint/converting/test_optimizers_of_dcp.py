"""Distributed checkpoints of PyTorch become files of ``torch.save`` whose optimizer states load."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

import dtckpt
from checkpoint.optimizer_cases import net, state_by_name, stepped
from dtckpt.checkpoint.inspecting.compare import plan_comparison

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed")


def adam(model):
    """Return an optimizer whose groups are in another order than the parameters."""
    weights, biases = ([p for name, p in model.named_parameters() if name.endswith(end)] for end in ("weight", "bias"))
    return torch.optim.AdamW([{"params": biases, "weight_decay": 0.0}, {"params": weights[::-1]}], lr=0.1)


MAKERS = {
    "adam": adam,
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    # Without any state: DCP keeps no empty dict.
    "plain": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
}
WAYS = {
    "below a key": lambda model, optimizer: ({"model": model.state_dict(), "o": optimizer.state_dict()}, ["o"]),
    "at the top": lambda _, optimizer: (optimizer.state_dict(), []),
    "deep": lambda _, optimizer: ({"a": {"b": [{"o": optimizer.state_dict()}]}}, ["a", "b", 0, "o"]),
    "several": lambda _, optimizer: ({"o": [optimizer.state_dict()] * 2}, ["o", 1]),
    "by name": lambda model, optimizer: (dict(zip("mo", get_state_dict(model, optimizer), strict=True)), ["o"]),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_an_optimizer_takes_its_moments_from_the_file(tmp_path, make, way):
    model = net("abc")
    optimizer = stepped(make(model), model)
    state, path = way(model, optimizer)
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    dtckpt.convert(tmp_path / "dcp", tmp_path / "new.pt")
    loaded = torch.load(tmp_path / "new.pt", weights_only=True)
    for key in path:
        loaded = loaded[key]
    other = net("abc")
    target = make(other)
    target.load_state_dict(loaded)
    assert state_by_name(target, other) == state_by_name(optimizer, model)
    groups = [
        [{key: group[key] for key in ("lr", "weight_decay")} for group in each.param_groups]
        for each in (target, optimizer)
    ]
    assert groups[0] == groups[1]


def test_numbers_that_no_group_has_stay(tmp_path):
    """A dict that only looks like an optimizer's state, and a number of no parameter, are left as they are."""
    state = {
        "o": {"state": {0: {"m": torch.ones(1)}, 7: {"m": torch.zeros(1)}}, "param_groups": [{"params": [0], "lr": 1}]},
        "else": {"state": {"0": 1}, "param_groups": [{"lr": 1}]},
        "alone": {"param_groups": "none"},
    }
    torch.save(state, tmp_path / "old.pt")
    dtckpt.convert(tmp_path / "old.pt", tmp_path / "new.pt")
    assert repr(torch.load(tmp_path / "new.pt")) == repr(state)
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    dtckpt.convert(tmp_path / "dcp", tmp_path / "from_dcp.pt")
    loaded = torch.load(tmp_path / "from_dcp.pt")
    assert list(loaded["o"]["state"]) == [0, "7"]
    assert (loaded["else"], loaded["alone"]) == (state["else"], state["alone"])


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_numbers_and_names_are_compared_by_number(tmp_path, make, way):
    model = net("abc")
    state, _ = way(model, stepped(make(model), model))
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    dtckpt.convert(tmp_path / "dcp", tmp_path / "new.pt")
    for places in (("dcp", "new.pt"), ("new.pt", "dcp")):
        with dtckpt.open_checkpoint(tmp_path / places[0]) as a, dtckpt.open_checkpoint(tmp_path / places[1]) as b:
            report = plan_comparison(a, b).run()
            assert report.is_same, report.differences
            assert report.num_tensors == len(a.tensors)
