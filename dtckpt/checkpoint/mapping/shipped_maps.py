"""The maps that dtckpt knows by name, from Megatron-Core's names and shapes to the names and shapes of transformers.

Megatron stacks its layers, ``decoder.layers.self_attention…``, or names each, ``decoder.layers.3.self_attention…``.
With Transformer Engine a norm belongs to the linear layer behind it. The rules for stacked layers with Transformer
Engine come first, so the inverse map makes these.
"""

from __future__ import annotations

from typing import Any

Rule = dict[str, Any]

_MEGATRON = "*decoder.layers"


def _rename(old: str, new: str, *, optional: bool = False) -> Rule:
    return {"from": f"*{old}", "to": f"*{new}", "optional": optional}


def _layers(old: str, view: str, new: dict[str, str]) -> list[Rule]:
    """Return the rules for tensors of layers, stacked and not.

    Args:
        old: Megatron's name below a layer.
        view: The view of one layer's tensor.
        new: The views of transformers' tensors, by name.
    """
    to = {f"*{name}": each for name, each in new.items()}
    return [
        {"from": {f"{_MEGATRON}.{old}": f"layers {view}".strip()}, "to": to, "optional": True},
        {"from": {f"{_MEGATRON}.{{layers}}.{old}": view}, "to": to, "optional": True},
    ]


def _qkv(layer: str, part: str, end: str) -> list[Rule]:
    """Return the rules for queries, keys and values, which Megatron joins by groups of heads."""
    ranges = {"q": "[:-2]", "k": "[-2:-1]", "v": "[-1:]"}
    new = {f"{layer}.self_attn.{name}_proj.{part}": f"(groups each{each} dim){end}" for name, each in ranges.items()}
    return _layers(f"self_attention.linear_qkv.{part}", f"(groups each dim){end}", new)


def _norms(layer: str, first: str, second: str, part: str = "weight") -> list[Rule]:
    old = {
        first: (f"self_attention.linear_qkv.layer_norm_{part}", f"input_layernorm.{part}"),
        second: (f"mlp.linear_fc1.layer_norm_{part}", f"pre_mlp_layernorm.{part}"),
    }
    return [
        rule
        for new, names in old.items()
        for name in names
        for rule in _layers(name, "hidden", {f"{layer}.{new}.{part}": "hidden"})
    ]


_LLAMA_LAYER = "model.layers.{layers}"

_LLAMA_SHARED = [
    _rename("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    _rename("output_layer.weight", "lm_head.weight", optional=True),
    _rename("decoder.final_layernorm.weight", "model.norm.weight"),
    *_qkv(_LLAMA_LAYER, "weight", " hidden"),
    *_qkv(_LLAMA_LAYER, "bias", ""),
    *_layers("self_attention.linear_proj.weight", "out in", {f"{_LLAMA_LAYER}.self_attn.o_proj.weight": "out in"}),
    *_norms(_LLAMA_LAYER, "input_layernorm", "post_attention_layernorm"),
]

_LLAMA = [
    *_LLAMA_SHARED,
    *_layers(
        "mlp.linear_fc1.weight",
        "(parts ffn) hidden",
        {
            f"{_LLAMA_LAYER}.mlp.gate_proj.weight": "(parts[:1] ffn) hidden",
            f"{_LLAMA_LAYER}.mlp.up_proj.weight": "(parts[1:2] ffn) hidden",
        },
    ),
    *_layers("mlp.linear_fc2.weight", "hidden ffn", {f"{_LLAMA_LAYER}.mlp.down_proj.weight": "hidden ffn"}),
]

_EXPERTS = f"{_LLAMA_LAYER}.block_sparse_moe.experts.{{experts}}"


def _experts(old: str, view: str, new: dict[str, str]) -> list[Rule]:
    """Return the rules for the tensors of experts, stacked, of stacked layers and of others."""
    return [
        *_layers(f"mlp.experts.experts.{old}", f"experts {view}", new),
        *_layers(f"mlp.experts.experts.{{experts}}.{old}", view, new),
    ]


_MIXTRAL = [
    *_LLAMA_SHARED,
    *_layers("mlp.router.weight", "experts hidden", {f"{_LLAMA_LAYER}.block_sparse_moe.gate.weight": "experts hidden"}),
    *_experts(
        "linear_fc1.weight",
        "(parts ffn) hidden",
        {f"{_EXPERTS}.w1.weight": "(parts[:1] ffn) hidden", f"{_EXPERTS}.w3.weight": "(parts[1:2] ffn) hidden"},
    ),
    *_experts("linear_fc2.weight", "hidden ffn", {f"{_EXPERTS}.w2.weight": "hidden ffn"}),
]

_GPT2_LAYER = "transformer.h.{layers}"

_GPT2 = [
    _rename("embedding.word_embeddings.weight", "transformer.wte.weight"),
    _rename("embedding.position_embeddings.weight", "transformer.wpe.weight"),
    _rename("output_layer.weight", "lm_head.weight", optional=True),
    *(_rename(f"decoder.final_layernorm.{part}", f"transformer.ln_f.{part}") for part in ("weight", "bias")),
    *_layers(
        "self_attention.linear_qkv.weight",
        "(groups parts dim) hidden",
        {f"{_GPT2_LAYER}.attn.c_attn.weight": "hidden (parts groups dim)"},
    ),
    *_layers(
        "self_attention.linear_qkv.bias",
        "(groups parts dim)",
        {f"{_GPT2_LAYER}.attn.c_attn.bias": "(parts groups dim)"},
    ),
    *(
        rule
        for old, new in (
            ("self_attention.linear_proj", "attn.c_proj"),
            ("mlp.linear_fc1", "mlp.c_fc"),
            ("mlp.linear_fc2", "mlp.c_proj"),
        )
        for rule in (
            *_layers(f"{old}.weight", "out in", {f"{_GPT2_LAYER}.{new}.weight": "in out"}),
            *_layers(f"{old}.bias", "out", {f"{_GPT2_LAYER}.{new}.bias": "out"}),
        )
    ),
    *(rule for part in ("weight", "bias") for rule in _norms(_GPT2_LAYER, "ln_1", "ln_2", part)),
]

SHIPPED: dict[str, dict[str, Any]] = {
    "megatron-llama": {"rules": _LLAMA},
    "megatron-gpt2": {"rules": _GPT2},
    "megatron-mixtral": {"rules": _MIXTRAL},
}
"""Maps by name."""
