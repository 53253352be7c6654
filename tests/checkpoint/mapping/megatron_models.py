"""The forward pass of Megatron-Core's models, from its stacked and fused tensors: Llama, Mixtral and GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model.

    Args:
        groups: Groups of queries.
        dim: Elements of a head.
        theta: Base of the rotary embedding.
        eps: Added to variances.
        top_k: Experts of a token.
    """

    groups: int
    dim: int
    theta: float = 10_000.0
    eps: float = 1e-6
    top_k: int = 2


def llama_logits(tensors: Tensors, tokens: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Return the logits of a row of tokens; with a router, the layers have experts."""
    hidden = tensors["embedding.word_embeddings.weight"][tokens]
    layers = {name.removeprefix("decoder.layers."): each for name, each in tensors.items() if "decoder.layers." in name}
    for number in range(layers["mlp.linear_fc1.layer_norm_weight"].shape[0]):
        layer = {name: each[number] for name, each in layers.items()}
        normed = _rms(hidden, layer["self_attention.linear_qkv.layer_norm_weight"], sizes)
        fused = normed @ layer["self_attention.linear_qkv.weight"].T
        hidden = hidden + _attention(fused, sizes, is_rotary=True) @ layer["self_attention.linear_proj.weight"].T
        normed = _rms(hidden, layer["mlp.linear_fc1.layer_norm_weight"], sizes)
        hidden = hidden + (_experts if "mlp.router.weight" in layer else _gated)(normed, layer, sizes)
    hidden = _rms(hidden, tensors["decoder.final_layernorm.weight"], sizes)
    return hidden @ tensors["output_layer.weight"].T


def gpt2_logits(tensors: Tensors, tokens: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Return the logits of a row of tokens; the output layer is the embedding."""
    embedding = tensors["embedding.word_embeddings.weight"]
    hidden = embedding[tokens] + tensors["embedding.position_embeddings.weight"][: len(tokens)]
    layers = {name.removeprefix("decoder.layers."): each for name, each in tensors.items() if "decoder.layers." in name}

    def linear(layer: Tensors, name: str, values: torch.Tensor) -> torch.Tensor:
        return values @ layer[f"{name}.weight"].T + layer[f"{name}.bias"]

    def norm(owner: Tensors, name: str, values: torch.Tensor) -> torch.Tensor:
        weight, bias = owner[f"{name}weight"], owner[f"{name}bias"]
        return functional.layer_norm(values, weight.shape, weight, bias, sizes.eps)

    for number in range(layers["mlp.linear_fc1.weight"].shape[0]):
        layer = {name: each[number] for name, each in layers.items()}
        fused = linear(layer, "self_attention.linear_qkv", norm(layer, "self_attention.linear_qkv.layer_norm_", hidden))
        hidden = hidden + linear(layer, "self_attention.linear_proj", _attention(fused, sizes, is_rotary=False))
        inner = linear(layer, "mlp.linear_fc1", norm(layer, "mlp.linear_fc1.layer_norm_", hidden))
        hidden = hidden + linear(layer, "mlp.linear_fc2", functional.gelu(inner, approximate="tanh"))
    return norm(tensors, "decoder.final_layernorm.", hidden) @ embedding.T


def _rms(values: torch.Tensor, weight: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    return weight * values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + sizes.eps)


def _attention(fused: torch.Tensor, sizes: Sizes, *, is_rotary: bool) -> torch.Tensor:
    """Return the attention of queries, keys and values that are joined by groups: the queries, a key, a value."""
    length = len(fused)
    groups = fused.view(length, sizes.groups, -1, sizes.dim)
    queries, keys, values = groups[:, :, :-2], groups[:, :, -2:-1], groups[:, :, -1:]
    if is_rotary:
        queries, keys = (_rotated(each, sizes) for each in (queries, keys))
    scores = torch.einsum("qghd,kgxd->ghqk", queries, keys) / sizes.dim**0.5
    later = torch.ones(length, length).triu(1).bool()
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    return torch.einsum("ghqk,kgxd->qghd", weights, values).reshape(length, -1)


def _rotated(values: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    steps = sizes.theta ** (-torch.arange(0, sizes.dim, 2) / sizes.dim)
    angles = torch.arange(len(values))[:, None] * steps
    cos, sin = (torch.cat([each, each], -1)[:, None, None] for each in (angles.cos(), angles.sin()))
    first, second = values.chunk(2, -1)
    return values * cos + torch.cat([-second, first], -1) * sin


def _gated(values: torch.Tensor, layer: Tensors, sizes: Sizes) -> torch.Tensor:
    return _swiglu(values, layer["mlp.linear_fc1.weight"], layer["mlp.linear_fc2.weight"])


def _swiglu(values: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    gate, up = (values @ first.T).chunk(2, -1)
    return (functional.silu(gate) * up) @ second.T


def _experts(values: torch.Tensor, layer: Tensors, sizes: Sizes) -> torch.Tensor:
    shares, chosen = (values @ layer["mlp.router.weight"].T).softmax(-1).topk(sizes.top_k)
    shares = shares / shares.sum(-1, keepdim=True)
    first, second = (layer[f"mlp.experts.experts.linear_fc{number}.weight"] for number in (1, 2))
    each = torch.stack([_swiglu(values, *pair) for pair in zip(first, second, strict=True)], 1)
    return (torch.gather(each, 1, chosen[..., None].expand(*chosen.shape, each.shape[-1])) * shares[..., None]).sum(1)
