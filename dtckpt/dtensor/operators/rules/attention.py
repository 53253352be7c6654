"""Scaled dot-product attention: the flash, efficient and cuDNN kernels, forward and backward.

Batch and heads may be split; keys and features must be whole. Queries may be split on a CPU, forward, if attention is
not causal: then every query sees all keys. With dropout, `attention_dropout` takes the call. On a CPU, PyTorch itself
computes attention with dropout by matrix products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dtckpt.dtensor.operators.call import Call
from dtckpt.dtensor.operators.registry import rule
from dtckpt.dtensor.operators.rule import Dims, Factors, Rule
from dtckpt.dtensor.operators.rule_builders import result_shapes

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
    # The kernels for cards pad the dim of queries in the second result, which has one number per query.
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
