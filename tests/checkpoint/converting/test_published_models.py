"""Models of transformers go from their files to dtckpt on 4 clients, through reshard, and back: not a bit changes."""

import shutil

import pytest
import torch

import dtckpt
from checkpoint.foreign import safetensors_cases

MAX_SHARD_NBYTES = 60_000


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=301,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def bert():
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, vocab_size=301
    )
    return BertModel(config)


@pytest.mark.share(1)
@pytest.mark.parametrize("make", [llama, bert])
def test_there_and_back(pool, tmp_path, monkeypatch, make):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    model = make().eval()
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.normal_(std=0.3)
    model.save_pretrained(tmp_path / "hf", max_shard_size=f"{MAX_SHARD_NBYTES // 1000}KB")
    files = list((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) >= 3
    places = {name: str(tmp_path / name) for name in ("hf", "saved", "resharded", "back", "direct")}

    answers = pool.run(
        safetensors_cases.restore_and_save, places["hf"], places["saved"], {"x": 2, "y": 2}, clients=4, group=True
    )
    names = answers[0].value
    assert [answer.value for answer in answers] == [names] * 4, answers
    # One of the tied weights only, as in the files.
    assert ("lm_head.weight" in names) is False
    dtckpt.reshard(places["saved"], places["resharded"], mesh=dtckpt.abstract_mesh({"y": 3}))
    report = dtckpt.convert(places["resharded"], places["back"], to="safetensors", max_shard_size=MAX_SHARD_NBYTES)
    assert len(report.files) == len(files) + 1
    # Without the config.json.
    dtckpt.convert(places["hf"], places["direct"], ignore_rest=True)
    contents = []
    for place in ("saved", "resharded", "back", "direct"):
        with dtckpt.open_checkpoint(places[place]) as checkpoint:
            contents.append({name: info.content_digest for name, info in checkpoint.tensors.items()})
    assert contents == [contents[0]] * 4
    assert None not in contents[0].values()

    shutil.copy(tmp_path / "hf" / "config.json", tmp_path / "back")
    loaded, info = type(model).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info.values()), info
    state = loaded.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    tokens = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        assert torch.equal(loaded.eval()(tokens)[0], model(tokens)[0])
