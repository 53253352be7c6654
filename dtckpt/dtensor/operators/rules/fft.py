"""Fourier transforms: ``fft``, ``rfft``, ``irfft``. The dims that are transformed must be whole; linear."""

from __future__ import annotations

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import rule
from dtckpt.dtensor.operators.rule import LINEAR, Factors, Rule
from dtckpt.dtensor.operators.rule_builders import result_shapes

_aten = torch.ops.aten


@rule(_aten._fft_c2c.default, _aten._fft_c2r.default, _aten._fft_r2c.default)
def _transform(call: Call) -> Rule | None:
    """The dims that are transformed must be whole, and may change in size; linear."""
    (shape,), (result,) = call.shapes, result_shapes(call)
    transformed = {dim % len(shape) for dim in call["dim"]} if shape else set()
    factors = Factors()
    dims = factors.dims(shape)
    results = tuple(
        (factors.new(size),) if number in transformed else dims[number] for number, size in enumerate(result)
    )
    splittable = [dims[number][0] for number in range(len(shape)) if number not in transformed]
    return Rule(
        factors.sizes,
        (dims,),
        (results,),
        whole=frozenset(range(len(factors.sizes))) - frozenset(splittable),
        nonempty_pieces=frozenset(splittable),
        passes=LINEAR,
    )
