"""Attention with dropout, for PyTorch's kernels on cards: by matrix products, and a mask that no layout changes.

PyTorch's operators return a seed for the backward pass. Here the seed is the key of the random mask: the backward pass
draws the same mask again.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from dtckpt.dtensor import random
from dtckpt.dtensor.operators.call import Call, Operator, run_on_meta
from dtckpt.dtensor.operators.operands import replicated_layout
from dtckpt.dtensor.operators.registry import composite
from dtckpt.dtensor.operators.rules.random import refill
from dtckpt.dtensor.tensor import DTensor

_aten = torch.ops.aten


def _replicated(like: Any, shape: Any, dtype: torch.dtype, value: int) -> DTensor:
    parts = [torch.full(tuple(shape), value, dtype=dtype, device=one.device) for one in like.components]
    return DTensor(parts, replicated_layout(like.device_mesh, len(shape)), tuple(shape), dtype, device=like.device)


def _on_host(like: Any, value: int) -> DTensor:
    """Return a replicated number in host memory: the backward pass would wait for a card to read it from there."""
    parts = [torch.full((), value, dtype=torch.int64) for _ in like.components]
    return DTensor(parts, replicated_layout(like.device_mesh, 0), (), torch.int64)


def _repeated(tensor: Any, count: int) -> Any:
    """Return keys or values with each head repeated for the heads of queries that share it.

    Args:
        tensor: Of dims (N, H, S, E).
        count: Number of heads of queries per head of keys.
    """
    batch, heads, length, size = tensor.shape
    return tensor.unsqueeze(2).expand(batch, heads, count, length, size).reshape(batch, heads * count, length, size)


def _weights(call: Call, key: Any) -> tuple[Any, float]:
    """Return the attention weights (N, H, L, S) before dropout, and the scale."""
    query = call["query"]
    scale = call["scale"] if call["scale"] is not None else 1 / math.sqrt(query.shape[-1])
    scores = torch.matmul(query * scale, key.transpose(-2, -1))
    bias = call.get("attn_bias")
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
        key = random.agreed_key(weights.device_mesh)
        out = torch.matmul(weights * _mask(weights, call, key), _repeated(call["value"], count))
        results: list[Any] = list(run_on_meta(func, args, kwargs, call.tensors))
        seeds = [number for number, one in enumerate(func._schema.returns) if one.name in {"rng_state", "philox_seed"}]
        for number, meta in enumerate(results):
            if isinstance(meta, torch.Tensor):
                results[number] = _replicated(out, meta.shape, meta.dtype, 0)
        results[0] = out.to(call["query"].dtype)
        results[seeds[0]] = _on_host(out, key)
        return tuple(results)


def _mask(weights: Any, call: Call, key: int) -> Any:
    """Return the factors that dropout multiplies weights by: 0, or 1 over the chance that an element stays."""
    mask = refill(torch.empty_like(weights), "bernoulli", known_key=key, p=1 - call["dropout_p"])
    return mask * (1 / (1 - call["dropout_p"])) if call["dropout_p"] < 1 else mask


def _backward(func: Operator, gradient: str) -> None:
    @composite(func)
    def run(*args: Any, **kwargs: Any) -> Any:
        call = Call(func, args, kwargs)
        if not call["dropout_p"]:
            return NotImplemented
        query, grad, mask_key = call["query"], call[gradient], int(call["philox_seed"])
        count = query.shape[1] // call["key"].shape[1]
        key, value = _repeated(call["key"], count), _repeated(call["value"], count)
        weights, scale = _weights(call, key)
        mask = _mask(weights, call, mask_key)
        grad_weights = torch.matmul(grad, value.transpose(-2, -1)) * mask
        grad_scores = weights * (grad_weights - (grad_weights * weights).sum(-1, keepdim=True))  # through softmax
        gradients = (
            torch.matmul(grad_scores, key) * scale,
            _summed(torch.matmul(grad_scores.transpose(-2, -1), query) * scale, count),
            _summed(torch.matmul((weights * mask).transpose(-2, -1), grad), count),
        )
        if "grad_input_mask" not in call:
            return gradients
        bias = call["attn_bias"]
        needs_bias = call["grad_input_mask"][3] and bias is not None and bias.numel()
        return (*gradients, grad_scores.sum_to_size(bias.shape) if needs_bias else None)


def _summed(gradient: Any, count: int) -> Any:
    """Return the gradients of keys or values, from the gradients of what `_repeated` returned for them."""
    batch, heads, length, size = gradient.shape
    return gradient.reshape(batch, heads // count, count, length, size).sum(2) if count > 1 else gradient


_forward(_aten._scaled_dot_product_flash_attention.default)
_forward(_aten._scaled_dot_product_efficient_attention.default)
_forward(_aten._scaled_dot_product_cudnn_attention.default)
_backward(_aten._scaled_dot_product_flash_attention_backward.default, "grad_out")
_backward(_aten._scaled_dot_product_efficient_attention_backward.default, "grad_out_")
_backward(_aten._scaled_dot_product_cudnn_attention_backward.default, "grad_out")
