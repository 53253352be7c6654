import pytest

from dtckpt.errors import did_you_mean

NAMES = ["model/layers.0.weight", "model/embed/weight", "optim/embed/weight", "step"]


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("model.layers.0.weight", "; did you mean 'model/layers.0.weight'?"),
        ("embed.weight", "; did you mean 'model/embed/weight' or 'optim/embed/weight'?"),
        ("/step", "; did you mean 'step'?"),
        (
            "model/embd/weight",
            "; did you mean 'model/embed/weight' or 'optim/embed/weight' or 'model/layers.0.weight'?",
        ),
        ("modle", "; did you mean 'model'?"),
        ("optim/embde/weight/moments/first/of/all", "; did you mean 'optim/embed'?"),
        ("zzz", ""),
        ("", ""),
    ],
)
def test_suggestions(name, suggestion):
    assert did_you_mean(name, NAMES) == suggestion
    assert did_you_mean(name, []) == ""
