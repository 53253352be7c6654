"""Attention: batch and heads may be sharded, and queries too where each sees all keys; keys and features are whole.

On a CPU PyTorch takes these operators where no dropout is asked for; else it makes attention of matrix products.
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
    """Factors of dims N, H, L and S; heads of queries are several for each head of keys."""

    batch: tuple[int, ...]
    heads: tuple[int, ...]
    each: tuple[int, ...]
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
        each = query[1] // key[1]
        return cls(
            batch=(factors.new(query[0]),),
            heads=(factors.new(key[1]),),
            each=(factors.new(each),) if each > 1 else (),
            queries=(factors.new(query[2]),),
            keys=(factors.new(key[2]),),
            factors=factors,
        )

    def of_queries(self, shape: Sequence[int]) -> Dims:
        """Return the dims of queries, of what becomes of them, or of a number for each."""
        return (self.batch, self.heads + self.each, self.queries, *self.factors.dims(shape[3:]))

    def of_keys(self, shape: Sequence[int]) -> Dims:
        return (self.batch, self.heads, self.keys, *self.factors.dims(shape[3:]))

    def of_mask(self, shape: Sequence[int]) -> Dims | None:
        """Return the dims of a mask, which is broadcast; None if it cannot be."""
        full = (self.batch, self.heads + self.each, self.queries, self.keys)[4 - len(shape) :]
        sizes = [math.prod(self.factors.sizes[one] for one in dim) for dim in full]
        if len(sizes) != len(shape) or any(have not in {1, size} for have, size in zip(shape, sizes, strict=True)):
            return None
        return tuple(dim if have == size else () for dim, have, size in zip(full, shape, sizes, strict=True))

    def unsplit(self, *, are_queries_free: bool) -> frozenset[int]:
        """Return the factors that must be whole."""
        free = {*self.batch, *self.heads, *(self.queries if are_queries_free else ())}
        return frozenset(range(len(self.factors.sizes))) - free


@rule(
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)
def _attention(call: Call) -> Rule | None:
    """Queries N, H, L, E; keys and values N, H, S and features; results N, H, L, and what a device keeps to itself."""
    given = {name: tuple(call[name].shape) for name in ("query", "key", "value")}
    heads = _Heads.of(**given)
    if heads is None:
        return None
    mask_name = next((name for name in ("attn_mask", "attn_bias") if name in call), None)
    mask = None if mask_name is None else call[mask_name]
    of_mask = None if mask is None else heads.of_mask(tuple(mask.shape))
    if mask is not None and of_mask is None:
        return None
    operands = {
        "query": heads.of_queries(given["query"]),
        "key": heads.of_keys(given["key"]),
        "value": heads.of_keys(given["value"]),
        str(mask_name): of_mask,
    }
    out, total, *others = result_shapes(call)
    is_for_cpu = call.func is _aten._scaled_dot_product_flash_attention_for_cpu.default
    are_queries_free = is_for_cpu and not call["is_causal"]
    # Other kernels pad the totals' dim of queries.
    of_total = heads.of_queries(total) if is_for_cpu else (*heads.of_queries(total)[:2], *heads.factors.dims(total[2:]))
    results = (heads.of_queries(out), of_total, *(heads.factors.dims(shape) for shape in others))
    return Rule(
        heads.factors.sizes,
        call.operands(**operands),
        results,
        whole=heads.unsplit(are_queries_free=are_queries_free),
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
    """Gradients lie as queries, keys and values do."""
    given = {name: tuple(call[name].shape) for name in ("query", "key", "value")}
    heads = _Heads.of(**given)
    # A mask's gradient would wait for reductions, which the others do not.
    if heads is None or ("grad_input_mask" in call and call["grad_input_mask"][3]):
        return None
    gradients = (
        heads.of_queries(given["query"]),
        heads.of_keys(given["key"]),
        heads.of_keys(given["value"]),
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
        whole=heads.unsplit(are_queries_free=False),
        nonempty_pieces=frozenset({*heads.batch, *heads.heads}),
    )
