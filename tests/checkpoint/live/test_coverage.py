"""Targets that must fill every byte of a model: views of its parameters do, copies and gaps are refused."""

import pytest
import torch
from torch import nn

from dtckpt.checkpoint.live.coverage import validate_covered
from dtckpt.errors import LayoutError


class Fused(nn.Module):
    """An attention whose three weights are one parameter, with a persistent buffer and a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(12, 4))
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(5), persistent=False)


def views(model):
    q, k, v = model.qkv.detach().split(4)
    return {"q": q, "k": k.T, "v": v, "steps": model.steps}


def test_views_of_a_fused_weight_cover_it():
    model = Fused()
    validate_covered(views(model), [model])
    validate_covered({"model": model}, [model])


def test_a_copy_is_refused():
    model = Fused()
    with pytest.raises(LayoutError, match=r"'k'.* in no parameter.*'qkv'.*in part"):
        validate_covered({**views(model), "k": model.qkv[4:8].detach().clone()}, [model])


@pytest.mark.parametrize("name", ["q", "steps"])
def test_a_gap_is_refused(name):
    model = Fused()
    target = views(model)
    del target[name]
    with pytest.raises(LayoutError, match="in part or not at all"):
        validate_covered(target, [model])


def test_tied_parameters_are_covered_once():
    model = nn.ModuleDict({"embed": nn.Linear(3, 3, bias=False), "head": nn.Linear(3, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    validate_covered({"embed": model["embed"].weight}, [model])
