"""Fourier transforms: the dims that are transformed must be whole; a transform is linear."""

from __future__ import annotations

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import rule
from dtckpt.dtensor.operators.rule import LINEAR, Factors, Rule
from dtckpt.dtensor.operators.rule_builders import result_shapes

_aten = torch.ops.aten


@rule(_aten._fft_c2c.default, _aten._fft_c2r.default, _aten._fft_r2c.default)
def _transform(call: Call) -> Rule | None:
    """Dims keep their places; transformed ones may change in size."""
    (shape,), (result,) = call.shapes, result_shapes(call)
    changed = {dim % len(shape) for dim in call["dim"]} if shape else set()
    factors = Factors()
    dims = factors.dims(shape)
    results = tuple((factors.new(size),) if number in changed else dims[number] for number, size in enumerate(result))
    free = [dims[number][0] for number in range(len(shape)) if number not in changed]
    return Rule(
        factors.sizes,
        (dims,),
        (results,),
        whole=frozenset(range(len(factors.sizes))) - frozenset(free),
        nonempty_pieces=frozenset(free),
        passes=LINEAR,
    )
