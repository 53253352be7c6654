"""The maps that dtckpt ships: the same tokens give the same logits in transformers and by Megatron's tensors."""

import json
import shutil

import pytest
import torch

import dtckpt

from .megatron_models import Sizes, gpt2_logits, llama_logits

TOKENS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
SMALL = {"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = SMALL | {"intermediate_size": 24, "num_key_value_heads": 2, "initializer_range": 0.4}
CONFIGS = {
    "megatron-llama": ("Llama", LLAMA),
    "megatron-mixtral": ("Mixtral", LLAMA | {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "megatron-gpt2": (
        "GPT2",
        {"vocab_size": 12, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16, "initializer_range": 0.4},
    ),
}


def logits_of(model):
    with torch.no_grad():
        return model(TOKENS[None]).logits[0]


@pytest.mark.share(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits(name, tmp_path):
    import transformers

    family, config = CONFIGS[name]
    kind = getattr(transformers, f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")
    torch.manual_seed(0)
    model = kind(getattr(transformers, f"{family}Config")(**config)).eval()
    for each in model.parameters():  # no norm or bias may be one or zero
        torch.nn.init.normal_(each, std=0.4)
    wanted = logits_of(model)
    model.save_pretrained(tmp_path / "theirs")
    # The sizes of heads stand in config.json.
    dtckpt.convert(tmp_path / "theirs", tmp_path / "megatron", map=dtckpt.TensorMap.load(name).inverse())
    tensors = dtckpt.restore(tmp_path / "megatron")
    heads = {"groups": 4 if family == "GPT2" else 2, "dim": 4}
    assert tensors["decoder.layers.self_attention.linear_qkv.weight"].shape == (2, 48 if family == "GPT2" else 32, 16)
    theta = getattr(model.config, "rope_parameters", None) or {}
    eps = model.config.layer_norm_epsilon if family == "GPT2" else model.config.rms_norm_eps
    sizes = Sizes(**heads, theta=theta.get("rope_theta", 0.0), eps=eps)
    found = (gpt2_logits if family == "GPT2" else llama_logits)(tensors, TOKENS, sizes)
    assert wanted.std() > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    # And back; the sizes stand in Megatron's arguments, or are passed.
    back = dtckpt.TensorMap.load(name, heads)
    dtckpt.convert(tmp_path / "megatron", tmp_path / "back", to="safetensors", map=back)
    shutil.copy(tmp_path / "theirs" / "config.json", tmp_path / "back")
    assert torch.equal(logits_of(kind.from_pretrained(tmp_path / "back").eval()), wanted)
    first, second = (dtckpt.restore(tmp_path / each) for each in ("theirs", "back"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[each], second[each]) for each in first)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["model_type"] == family.lower()
