"""Attention with dropout, where PyTorch has one operator for it: its mask must not depend on the layout.

The operators keep a seed for the backward pass; here that is the key of the mask, which is made again.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dtckpt.dtensor import random
from dtckpt.dtensor.operators.call import Call, Operator
from dtckpt.dtensor.operators.operands import replicated_layout
from dtckpt.dtensor.operators.plans import run_on_meta
from dtckpt.dtensor.operators.registry import composite
from dtckpt.dtensor.operators.rules.random import refill
from dtckpt.dtensor.tensor import DTensor

_aten = torch.ops.aten


def _replicated(like: Any, shape: Any, dtype: torch.dtype, value: int) -> DTensor:
    parts = [torch.full(tuple(shape), value, dtype=dtype, device=one.device) for one in like.components]
    return DTensor(parts, replicated_layout(like.device_mesh, len(shape)), tuple(shape), dtype, device=like.device)


def _on_host(like: Any, value: int) -> DTensor:
    """Return a number whose copies lie in host memory: to read it from a card, the backward pass would wait."""
    parts = [torch.full((), value, dtype=torch.int64) for _ in like.components]
    return DTensor(parts, replicated_layout(like.device_mesh, 0), (), torch.int64)


def _repeated(tensor: Any, count: int) -> Any:
    """Return heads of keys or values, each as often as there are heads of queries for it."""
    batch, heads, length, size = tensor.shape
    return tensor.unsqueeze(2).expand(batch, heads, count, length, size).reshape(batch, heads * count, length, size)


def _weights(call: Call, key: Any) -> tuple[Any, float]:
    """Return how much each query makes of each key, dropout apart, and the scale."""
    query = call["query"]
    scale = call["scale"] if call["scale"] is not None else 1 / math.sqrt(query.shape[-1])
    scores = torch.matmul(query * scale, key.transpose(-2, -1))
    bias = call["attn_bias"] if "attn_bias" in call else None  # noqa: SIM401  (a call has no ``get``)
    if bias is not None and bias.numel():
        scores = scores + bias
    if call["is_causal"]:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.softmax(scores, -1), scale


def _forward(func: Operator) -> None:
    @composite(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        call = Call(func, args, kwargs)
        if not call["dropout_p"]:
            return NotImplemented
        count = call["query"].shape[1] // call["key"].shape[1]
        weights, _ = _weights(call, _repeated(call["key"], count))
        number = random.agreed_key(weights.device_mesh)
        out = torch.matmul(weights * _kept(weights, call, number), _repeated(call["value"], count))
        results: list[Any] = list(run_on_meta(func, args, kwargs, call.tensors))
        seeds = [place for place, one in enumerate(func._schema.returns) if one.name in {"rng_state", "philox_seed"}]
        for place, meta in enumerate(results):
            if isinstance(meta, torch.Tensor):
                results[place] = _replicated(out, meta.shape, meta.dtype, 0)
        results[0] = out.to(call["query"].dtype)
        results[seeds[0]] = _on_host(out, number)
        return tuple(results)


def _kept(weights: Any, call: Call, number: int) -> Any:
    """Return the factors that dropout multiplies by."""
    kept = refill(torch.empty_like(weights), "bernoulli", known_key=number, p=1 - call["dropout_p"])
    return kept * (1 / (1 - call["dropout_p"])) if call["dropout_p"] < 1 else kept


def _backward(func: Operator, gradient: str) -> None:
    @composite(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        call = Call(func, args, kwargs)
        if not call["dropout_p"]:
            return NotImplemented
        query, grad, number = call["query"], call[gradient], int(call["philox_seed"])
        count = query.shape[1] // call["key"].shape[1]
        key, value = _repeated(call["key"], count), _repeated(call["value"], count)
        weights, scale = _weights(call, key)
        kept = _kept(weights, call, number)
        through = torch.matmul(grad, value.transpose(-2, -1)) * kept
        scores = weights * (through - (through * weights).sum(-1, keepdim=True))
        made = (
            torch.matmul(scores, key) * scale,
            _summed(torch.matmul(scores.transpose(-2, -1), query) * scale, count),
            _summed(torch.matmul((weights * kept).transpose(-2, -1), grad), count),
        )
        if "grad_input_mask" not in call:
            return made
        bias = call["attn_bias"]
        wanted = call["grad_input_mask"][3] and bias is not None and bias.numel()
        return (*made, scores.sum_to_size(bias.shape) if wanted else None)


def _summed(gradient: Any, count: int) -> Any:
    """Return gradients of heads of keys or values, of which each was used by several heads of queries."""
    batch, heads, length, size = gradient.shape
    return gradient.reshape(batch, heads // count, count, length, size).sum(2) if count > 1 else gradient


_forward(_aten._scaled_dot_product_flash_attention.default)
_forward(_aten._scaled_dot_product_efficient_attention.default)
_forward(_aten._scaled_dot_product_cudnn_attention.default)
_backward(_aten._scaled_dot_product_flash_attention_backward.default, "grad_out")
_backward(_aten._scaled_dot_product_efficient_attention_backward.default, "grad_out_")
_backward(_aten._scaled_dot_product_cudnn_attention_backward.default, "grad_out")
