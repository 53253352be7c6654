"""Convolutions, sharded over batch and channels."""

import pytest
import torch
from torch.nn import functional

from .operator_checks import S0, S1, S2, P, R, check

CASES = {
    "plain": (functional.conv2d, {}, ((8, 12, 7, 6), (8, 12, 3, 3), (8,))),
    "without bias": (functional.conv2d, {"padding": 1}, ((8, 12, 7, 6), (8, 12, 3, 3))),
    "wide": (functional.conv2d, {}, ((8, 48, 7, 6), (2, 48, 3, 3), (2,))),
    "1d": (functional.conv1d, {"stride": 2}, ((8, 12, 7), (8, 12, 3), (8,))),
    "groups": (functional.conv2d, {"groups": 4}, ((8, 12, 7, 6), (8, 3, 3, 3), (8,))),
    "depthwise": (functional.conv2d, {"groups": 6}, ((8, 6, 7, 6), (6, 1, 3, 3), (6,))),
    "transposed": (functional.conv_transpose2d, {"stride": 2}, ((8, 12, 5, 4), (12, 8, 3, 3), (8,))),
    "transposed groups": (functional.conv_transpose1d, {"groups": 4}, ((8, 12, 5), (12, 2, 3), (8,))),
    "uneven": (functional.conv2d, {}, ((7, 12, 7, 6), (7, 12, 3, 3), (7,))),
    "few": (functional.conv2d, {}, ((3, 12, 7, 6), (8, 12, 3, 3), (8,))),
}
TABLE = [
    ("plain", (S0, R, R), S0),
    ("plain", (R, S0, S0), S1),
    ("without bias", (P, R), P),
    ("plain", (S2, R, R), None),
    ("plain", ((S0, R), (R, S0), (R, S0)), (S0, S1)),
    ("plain", ((S0, S1), (R, S1), (R, R)), None),
    ("wide", (S1, S1, R), P),
    ("1d", (S0, R, R), S0),
    ("groups", (S1, S0, S0), S1),
    ("groups", ((S1, S0), (S0, R), (S0, R)), (S1, S0)),
    ("depthwise", ((S1, S0), (S0, R), (S0, R)), (S1, S0)),
    ("transposed", (R, S1, S0), S1),
    ("transposed", (S0, R, R), S0),
    ("transposed groups", (S1, S0, S0), S1),
    ("uneven", (S0, R, R), S0),
    ("uneven", (R, S0, S0), S1),
    ("few", (S0, R, R), None),
]


@pytest.mark.parametrize(("name", "placed", "expected"), TABLE, ids=str)
def test_convolutions(name, placed, expected, monkeypatch):
    # Even of small images, channels that go in are to be contracted where they lie.
    monkeypatch.setattr("dtckpt.dtensor.operators.strategy._LATENCY_NBYTES", 1)
    function, options, shapes = CASES[name]
    tensors = [torch.randn(shape) for shape in shapes]
    check(
        lambda *given: function(*given, **options),
        tensors,
        placed,
        expected,
        most=0 if expected not in {None, P} or len(shapes) == 2 else None,
    )
