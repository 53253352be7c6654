"""Writes to expanded tensors: PyTorch allows some, with a warning, and refuses the others."""

import pytest
import torch

from .operator_checks import S0, S1, P, R, distributed

ROWS = torch.tensor([0, 2])


def set_rows(x):
    x[ROWS] = 5.0


def set_where(x):
    x[x > 0] = 7.0


ALLOWED = {
    "rows": set_rows,
    "mask": set_where,
    "one value": lambda x: x.index_put_((ROWS,), torch.tensor(3.0)),
    "elements": lambda x: x.index_put_((ROWS, torch.tensor([1, 2])), torch.tensor([3.0, 4.0])),
    "sums": lambda x: x.index_put_((ROWS,), torch.tensor(3.0), accumulate=True),
    "index_fill_": lambda x: x.index_fill_(0, ROWS, 3.0),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 3.0),
    "fill_": lambda x: x.fill_(3.0),
    "zero_": lambda x: x.zero_(),
}
REFUSED = {
    "add_": lambda x: x.add_(1.0),
    "copy_": lambda x: x.copy_(torch.ones(3, 4)),
    "index_add_": lambda x: x.index_add_(0, ROWS, torch.ones(2, 4)),
    "scatter_": lambda x: x.scatter_(0, ROWS[:, None], 2.0),
}
COLUMN = torch.arange(3.0)[:, None]


@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors is deprecated")
@pytest.mark.parametrize("placed", [S0, S1, R, (S0, R), (S1, S0)], ids=str)
@pytest.mark.parametrize("name", ALLOWED)
def test_allowed_writes_reach_the_memory_that_elements_share(name, placed):
    plain, ours = COLUMN.clone(), distributed(COLUMN, placed)
    views = [one.expand(3, 4) for one in (plain, ours)]
    for view in views:
        ALLOWED[name](view)
    for one, other in ((ours, plain), (views[1], views[0])):
        torch.testing.assert_close(one.full_tensor(), other)


@pytest.mark.parametrize("placed", [S0, R], ids=str)
def test_pytorchs_warning_is_given(placed):
    with pytest.warns(UserWarning, match="index_put_ on expanded tensors is deprecated"):
        set_rows(distributed(COLUMN, placed).expand(3, 4))


@pytest.mark.parametrize("placed", [S0, S1, R], ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_other_writes_are_refused(name, placed):
    for one in (COLUMN.clone(), distributed(COLUMN, placed)):
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            REFUSED[name](one.expand(3, 4))


def test_tensors_with_pending_sums():
    ours = distributed(COLUMN, P)
    ours.expand(3, 4).fill_(2.0)
    torch.testing.assert_close(ours.full_tensor(), torch.full((3, 1), 2.0))
