import math

import ml_dtypes
import numpy as np
import pytest
import torch
from support.states import packed, tensor_of

import dtckpt
from dtckpt import Layout, SaveOptions, abstract_mesh
from dtckpt.checkpoint.reading.checkpoint import Checkpoint
from dtckpt.format.dtypes import DTYPES, numbers_of

WHOLE = torch.arange(5000, dtype=torch.int32).reshape(50, 100)
SPECIAL = torch.tensor([1.5, float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -2.5, 1e30])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("cat") / "c"
    mesh = abstract_mesh({"x": 5})
    tree = {
        "model": {
            "w": packed(WHOLE, Layout(["x", "unsharded"], mesh)),
            "odd[0]": torch.ones(2),
            "third": torch.tensor(1 / 3),
        },
        "dtypes": {dtype: tensor_of(dtype, (3, 4), dtype) for dtype in DTYPES},
        "special": SPECIAL,
        "step": 7,
        "note": "n" * 200,
        "empty": torch.ones(0, 3),
    }
    dtckpt.save(path, tree)
    return path


@pytest.mark.parametrize("text", ["0", "3:5, -1", "..., 7", "::-7, ::33", "4, 5", "2:2", "10:30:3, 98:", "..."])
def test_slices(run, path, text):
    expected = WHOLE.numpy()[eval(f"np.s_[{text}]")]
    (event,) = run("cat", path, f"model/w[{text}]", "--json").events
    assert event.pop("values") == expected.tolist()
    assert event == {
        "event": "tensor",
        "path": str(path),
        "name": "model/w",
        "dtype": "int32",
        "stored_dtype": "int32",
        "tensor_shape": [50, 100],
        "slice": text,
        "shape": list(expected.shape),
    }
    result = run("cat", path, f"model/w[{text}]", "--all")
    assert (result.code, result.err) == (0, "")
    numbers = [int(number) for number in result.out.replace("[", " ").replace("]", " ").split()]
    assert numbers == expected.reshape(-1).tolist()
    assert result.out.count("\n") == max(1, math.prod(expected.shape[:-1]))


def test_only_the_chunks_that_are_needed_are_read(run, path, monkeypatch):
    read = []
    read_all = Checkpoint.read_all

    def counted(self, requests, **options):
        nbytes = read_all(self, requests, **options)
        read.append(nbytes)
        return nbytes

    monkeypatch.setattr(Checkpoint, "read_all", counted)
    run("cat", path, "model/w[12, 3]")
    assert sum(read) == 10 * 100 * 4
    read.clear()
    run("cat", path, "model/w[9:11]")
    assert sum(read) == 2 * 10 * 100 * 4
    read.clear()
    # Of a large one, the edges.
    shown = run("cat", path, "model/w").out
    assert sum(read) <= 4 * 10 * 100 * 4
    assert shown.split("\n")[3].strip() == "..."
    assert shown.startswith("[[   0    1    2 ...   97   98   99]\n")
    assert shown.endswith("[4900 4901 4902 ... 4997 4998 4999]]\n")


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_dtype(run, path, dtype):
    """The output gives the elements back."""
    result = run("cat", path, f"dtypes/{dtype}", "--json")
    elements = np.frombuffer(
        tensor_of(dtype, (3, 4), dtype).reshape(-1).view(torch.uint8).numpy().tobytes(), DTYPES[dtype]
    )
    expected = numbers_of(elements.reshape(3, 4), dtype)
    shown = np.array([decoded(each) for each in flat(result.events[0]["values"])], expected.dtype)
    np.testing.assert_array_equal(shown.reshape(expected.shape), expected)
    if expected.dtype.kind in "iuf":
        text = run("cat", path, f"dtypes/{dtype}").out.replace("[", " ").replace("]", " ")
        kind = float if expected.dtype.kind == "f" else int
        shown = np.array([kind(each) for each in text.split()], expected.dtype)
        np.testing.assert_array_equal(shown.reshape(expected.shape), expected)


def flat(values):
    return [each for value in values for each in flat(value)] if isinstance(values, list) else [values]


def decoded(value):
    if isinstance(value, dict):
        ((kind, content),) = value.items()
        return float(content) if kind == "float" else complex(*map(float, content))
    return value


def test_one_element(run, path):
    assert run("cat", path, "model/third").out == "0.33333334\n"
    assert run("cat", path, "model/w[3, 4]").out == "304\n"
    assert run("cat", path, "special[1]").out == "nan\n"
    assert run("cat", path, "empty").out == "[]\n"
    # Brackets may be part of a name.
    assert run("cat", path, "model/odd[0]").out == "[1. 1.]\n"
    assert run("cat", path, "model/odd[0][1]").out == "1.0\n"


def test_values(run, path):
    assert run("cat", path, "step").out == "7\n"
    assert run("cat", path, "note").out == f"'{'n' * 200}'\n"
    assert run("cat", path, "step", "--json").events == [
        {"event": "value", "path": str(path), "name": "step", "value": 7}
    ]
    run("cat", path, "step[0]").fails(2, "is a plain value")
    run("cat", path, "step", "--stats").fails(2, "is a plain value")


def test_statistics(run, path):
    (event,) = run("cat", path, "special", "--stats", "--json").events
    finite = SPECIAL[SPECIAL.isfinite()].double()
    assert {key: event[key] for key in ("event", "count", "min", "max", "nan", "inf", "zeros")} == {
        "event": "statistics",
        "count": 8,
        "min": -2.5,
        "max": pytest.approx(1e30, rel=1e-6),
        "nan": 1,
        "inf": 2,
        "zeros": 2,
    }
    assert event["mean"] == pytest.approx(float(finite.mean()))
    assert event["std"] == pytest.approx(float(finite.std(correction=0)))
    part = WHOLE[5:45:7].flip(1)[:, ::3].double()
    lines = dict(line.split() for line in run("cat", path, "model/w[5:45:7, ::-3]", "--stats").out.splitlines())
    assert (lines["shape"], lines["dtype"], lines["count"]) == ("6x34", "int32", "204")
    assert (int(lines["min"]), int(lines["max"])) == (part.min(), part.max())
    assert float(lines["mean"]) == pytest.approx(float(part.mean()))
    assert float(lines["std"]) == pytest.approx(float(part.std(correction=0)))
    lines = dict(line.split() for line in run("cat", path, "empty", "--stats").out.splitlines())
    assert (lines["count"], lines["min"], lines["mean"]) == ("0", "none", "none")


@pytest.mark.parametrize("codec", [None, "zstd"])
def test_statistics_read_each_chunk_once(run, tmp_path, codec, monkeypatch):
    whole = torch.arange(4 << 20, dtype=torch.float32).reshape(2048, 2048)
    layout = Layout(["unsharded", "y"], abstract_mesh({"y": 4}))
    dtckpt.save(tmp_path / "s", {"w": packed(whole, layout)}, options=SaveOptions(codec=codec))
    read = []
    read_all = Checkpoint.read_all

    def counted(self, requests, **options):
        nbytes = read_all(self, requests, **options)
        read.append(nbytes)
        return nbytes

    monkeypatch.setattr(Checkpoint, "read_all", counted)
    (event,) = run("cat", tmp_path / "s", "w", "--stats", "--json").events
    assert sum(read) == whole.nbytes
    assert (event["min"], event["max"], event["zeros"]) == (0.0, float(whole.max()), 1)


def test_what_is_not_there(run, path, tmp_path):
    run("cat", path, "modl/w").fails(3, "has no tensor or value 'modl/w'; did you mean 'model/w'")
    run("cat", path, "third").fails(3, "did you mean 'model/third'?")
    run("cat", path, "model.w[0]").fails(3, "has no tensor or value 'model.w'; did you mean 'model/w'?")
    run("cat", path, "~~~~").fails(3, "it has 'dtypes/bfloat16'", " more")
    run("cat", path, "model/w[50]").fails(2, "index 50 is out of bounds for dim 0 of size 50")
    run("cat", path, "model/w[0, 0, 0]").fails(2, "too many indices")
    run("cat", path, "model/w[]").fails(2, "expected what NumPy takes")
    run("cat", tmp_path, "w").fails(3)
    run("cat", path, "model/w", "--stats", "--max-memory", "1KiB").fails(2, "--max-memory is too small")


def test_too_many_elements(run, tmp_path):
    dtckpt.save(tmp_path / "s", {"w": torch.zeros(2, 600_000, dtype=torch.int8)})
    for args in (("--json",), ("--all",)):
        run("cat", tmp_path / "s", "w", *args).fails(2, "1200000 elements would be printed", "--stats")
    assert run("cat", tmp_path / "s", "w").out == "[[0 0 0 ... 0 0 0]\n [0 0 0 ... 0 0 0]]\n"


def test_bits_of_low_precision_are_shown_as_they_are(run, tmp_path):
    values = np.array([0.1, 448, 2**-9, -1.75])
    dtckpt.save(
        tmp_path / "s", {"b": torch.tensor(values).bfloat16(), "f": torch.tensor(values).to(torch.float8_e4m3fn)}
    )
    assert run("cat", tmp_path / "s", "b").out == "[ 1.00097656e-01  4.48000000e+02  1.95312500e-03 -1.75000000e+00]\n"
    shown = [float(each) for each in run("cat", tmp_path / "s", "f").out.strip("[]\n").split()]
    assert shown == values.astype(ml_dtypes.float8_e4m3fn).astype(float).tolist()
