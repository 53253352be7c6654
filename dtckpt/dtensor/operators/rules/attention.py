"""Scaled dot-product attention: the flash, efficient and cuDNN kernels, forward and backward.

Batch and heads may be split; keys and features must be whole. Queries may be split on a CPU, forward, if attention is
not causal: then every query sees all keys. With dropout, the composites below take the call. On a CPU, PyTorch itself
computes attention with dropout by matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dtckpt.dtensor import random
from dtckpt.dtensor.operators.call import Call, Operator, run_on_meta
from dtckpt.dtensor.operators.operands import replicated_layout
from dtckpt.dtensor.operators.registry import composite, rule
from dtckpt.dtensor.operators.rule import Dims, Factors, Rule
from dtckpt.dtensor.operators.rule_builders import result_shapes
from dtckpt.dtensor.operators.rules.random import refill
from dtckpt.dtensor.tensor import DTensor

_aten = torch.ops.aten


@dataclass(frozen=True)
class _Heads:
    """Factors of the dims N (batch), H (heads), L (queries) and S (keys).

    In grouped-query attention several heads of queries share a head of keys. The dim of the queries' heads is then the
    product of two factors: ``heads`` of the keys, and ``heads_per_key_head``.
    """

    batch: tuple[int, ...]
    heads: tuple[int, ...]
    heads_per_key_head: tuple[int, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    factors: Factors = field(default_factory=Factors)

    @classmethod
    def of(cls, query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> _Heads | None:
        """Return the factors for shapes; None if these do not fit each other."""
        if not len(query) == len(key) == len(value) == 4 or 0 in (*query, *key, *value):
            return None
        if not query[0] == key[0] == value[0] or key[1:3] != value[1:3] or query[1] % key[1]:
            return None
        factors = Factors()
        num_per_key_head = query[1] // key[1]
        return cls(
            batch=(factors.new(query[0]),),
            heads=(factors.new(key[1]),),
            heads_per_key_head=(factors.new(num_per_key_head),) if num_per_key_head > 1 else (),
            queries=(factors.new(query[2]),),
            keys=(factors.new(key[2]),),
            factors=factors,
        )

    def of_queries(self, shape: Sequence[int]) -> Dims:
        """Return the dims of a tensor (N, H, L, ...): queries, the output, or one number per query."""
        return (self.batch, self.heads + self.heads_per_key_head, self.queries, *self.factors.dims(shape[3:]))

    def of_keys(self, shape: Sequence[int]) -> Dims:
        """Return the dims of a tensor (N, H, S, ...): keys or values."""
        return (self.batch, self.heads, self.keys, *self.factors.dims(shape[3:]))

    def of_mask(self, shape: Sequence[int]) -> Dims | None:
        """Return the dims of a mask, which is broadcast to (N, H, L, S); None if it cannot be."""
        full = (self.batch, self.heads + self.heads_per_key_head, self.queries, self.keys)[4 - len(shape) :]
        sizes = [math.prod(self.factors.sizes[one] for one in dim) for dim in full]
        if len(sizes) != len(shape) or any(actual not in {1, size} for actual, size in zip(shape, sizes, strict=True)):
            return None
        return tuple(dim if actual == size else () for dim, actual, size in zip(full, shape, sizes, strict=True))

    def whole(self, *, may_split_queries: bool) -> frozenset[int]:
        """Return the factors that must be whole."""
        splittable = {*self.batch, *self.heads, *(self.queries if may_split_queries else ())}
        return frozenset(range(len(self.factors.sizes))) - splittable


@rule(
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)
def _attention(call: Call) -> Rule | None:
    """``(n, h, l, e), (n, h, s, e), (n, h, s, v) -> (n, h, l, v), (n, h, l)``, and state for the backward pass."""
    shapes = {name: tuple(call[name].shape) for name in ("query", "key", "value")}
    heads = _Heads.of(**shapes)
    if heads is None:
        return None
    mask_name = next((name for name in ("attn_mask", "attn_bias") if name in call), None)
    mask = None if mask_name is None else call[mask_name]
    of_mask = None if mask is None else heads.of_mask(tuple(mask.shape))
    if mask is not None and of_mask is None:
        return None
    operands = {
        "query": heads.of_queries(shapes["query"]),
        "key": heads.of_keys(shapes["key"]),
        "value": heads.of_keys(shapes["value"]),
        str(mask_name): of_mask,
    }
    out, total, *others = result_shapes(call)
    is_for_cpu = call.func is _aten._scaled_dot_product_flash_attention_for_cpu.default
    may_split_queries = is_for_cpu and not call["is_causal"]
    # The kernels for GPUs pad the dim of queries in the second result, which has one number per query.
    of_total = heads.of_queries(total) if is_for_cpu else (*heads.of_queries(total)[:2], *heads.factors.dims(total[2:]))
    results = (heads.of_queries(out), of_total, *(heads.factors.dims(shape) for shape in others))
    return Rule(
        heads.factors.sizes,
        call.operands(**operands),
        results,
        whole=heads.whole(may_split_queries=may_split_queries),
        nonempty_pieces=frozenset({*heads.batch, *heads.heads, *heads.queries}),
        replicated_results=frozenset(range(2, len(results))),
    )


@rule(
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    _aten._scaled_dot_product_flash_attention_backward.default,
    _aten._scaled_dot_product_efficient_attention_backward.default,
    _aten._scaled_dot_product_cudnn_attention_backward.default,
)
def _attention_backward(call: Call) -> Rule | None:
    """Batch and heads may be split; gradients have the layouts of queries, keys and values."""
    shapes = {name: tuple(call[name].shape) for name in ("query", "key", "value")}
    heads = _Heads.of(**shapes)
    # The gradient of a broadcast mask would wait for a sum, which the other gradients do not.
    if heads is None or ("grad_input_mask" in call and call["grad_input_mask"][3]):
        return None
    gradients = (
        heads.of_queries(shapes["query"]),
        heads.of_keys(shapes["key"]),
        heads.of_keys(shapes["value"]),
    )
    out, total = call["out"].shape, call["logsumexp"].shape
    is_for_cpu = "attn_mask" in call
    of_total = heads.of_queries(total) if is_for_cpu else (*heads.of_queries(total)[:2], *heads.factors.dims(total[2:]))
    others = {
        name: heads.factors.dims(call[name].shape)
        for name in ("cum_seq_q", "cum_seq_k", "philox_seed", "philox_offset")
        if name in call and call[name] is not None
    }
    for name in ("attn_mask", "attn_bias"):
        if name in call and call[name] is not None:
            of_mask = heads.of_mask(tuple(call[name].shape))
            if of_mask is None:
                return None
            others[name] = of_mask
    operands = call.operands(
        grad_out=heads.of_queries(out),
        grad_out_=heads.of_queries(out),
        query=gradients[0],
        key=gradients[1],
        value=gradients[2],
        out=heads.of_queries(out),
        logsumexp=of_total,
        **others,
    )
    return Rule(
        heads.factors.sizes,
        operands,
        gradients,
        whole=heads.whole(may_split_queries=False),
        nonempty_pieces=frozenset({*heads.batch, *heads.heads}),
    )


# --- attention with dropout ------------------------------------------------------------------------------------------
#
# For PyTorch's kernels on GPUs: by matrix products, and a mask that no layout changes. PyTorch's operators return a
# seed for the backward pass. Here the seed is the key of the random mask: the backward pass draws the same mask again.


def _replicated(like: Any, shape: Any, dtype: torch.dtype, value: int) -> DTensor:
    parts = [torch.full(tuple(shape), value, dtype=dtype, device=one.device) for one in like.components]
    return DTensor(parts, replicated_layout(like.device_mesh, len(shape)), tuple(shape), dtype, device=like.device)


def _on_host(like: Any, value: int) -> DTensor:
    """Return a replicated number in host memory: the backward pass would wait for a GPU to read it from there."""
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
    """Return the gradients of keys or values, from the gradients of their copies by `_repeated`."""
    batch, heads, length, size = gradient.shape
    return gradient.reshape(batch, heads // count, count, length, size).sum(2) if count > 1 else gradient


_forward(_aten._scaled_dot_product_flash_attention.default)
_forward(_aten._scaled_dot_product_efficient_attention.default)
_forward(_aten._scaled_dot_product_cudnn_attention.default)
_backward(_aten._scaled_dot_product_flash_attention_backward.default, "grad_out")
_backward(_aten._scaled_dot_product_efficient_attention_backward.default, "grad_out_")
_backward(_aten._scaled_dot_product_cudnn_attention_backward.default, "grad_out")
