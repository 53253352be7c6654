"""Tensor names: valid ones get distinct, safe paths; the others are refused."""

import re
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtckpt.errors import TensorNameError
from dtckpt.format import names
from dtckpt.format.names import MAX_NAME_BYTES, MAX_SEGMENT_BYTES, SELF_SEGMENT, array_paths, groups, validate_name

HOSTILE = {
    "empty": "",
    "absolute": "/x",
    "trailing": "x/",
    "empty segment": "a//b",
    "here": ".",
    "up": "..",
    "escaping": "../x",
    "inner up": "a/../../b",
    "inner here": "a/./b",
    "NUL": "a\0b",
    "newline": "a\nb",
    "DEL": "a\x7f",
    "4 kB": "x/" * 2047 + "xx",
    "too long in UTF-8": "é/" * 400,
    "long segment": "x" * (MAX_SEGMENT_BYTES + 1),
    "long encoded segment": "é" * (MAX_SEGMENT_BYTES // 6 + 1),
    "surrogate": "\ud800",
}

# What the format itself keeps in the directory, or TensorStore's file driver keeps to itself.
TAKEN = re.compile(r"dtckpt\.manifest|manifest\.ocdbt|d|client_\d+|zarr\.json|__.*|.*\.__lock|\.\.?|")

NASTY = ["w", "m", "c", "0", "d", "zarr.json", "manifest.ocdbt", "dtckpt.manifest", "client_0", "client_٣", "__w"]
NASTY += [
    "%self",
    "%25self",
    "%",
    "%2F",
    "...",
    "..x",
    ".w",
    "w.__lock",
    ".__lock",
    "edges",
    "a b",
    "a\\b",
    "é",
    "*?[]",
]
nasty_segments = st.sampled_from(NASTY)
plain_segments = st.text(st.characters(codec="utf-8", exclude_categories=("C",), exclude_characters="/"), max_size=20)
segments = (nasty_segments | plain_segments).filter(lambda segment: segment not in ("", ".", ".."))
tensor_names = st.lists(segments, min_size=1, max_size=4).map("/".join)


def decode_path(path):
    """Return the name of an array path, as a reader of the format finds it."""
    return "/".join(unquote(segment) for segment in path.split("/") if segment != SELF_SEGMENT)


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_hostile_names_are_refused(name):
    with pytest.raises(TensorNameError) as caught:
        validate_name(name)
    assert "tensor name" in str(caught.value)
    assert len(str(caught.value)) < 500
    with pytest.raises(TensorNameError):
        array_paths([name])


@pytest.mark.parametrize("name", [None, 5, b"w", ("w",)])
def test_names_are_text(name):
    with pytest.raises(TensorNameError, match=f"got {type(name).__name__}"):
        validate_name(name)


def test_the_longest_names_are_fine():
    validate_name("x" * MAX_SEGMENT_BYTES)
    validate_name("/".join(["x" * 127] * 8))
    with pytest.raises(TensorNameError, match=f"got {MAX_NAME_BYTES + 1} bytes, expected at most {MAX_NAME_BYTES}"):
        validate_name("/".join(["x" * 127] * 8) + "xx")


@given(st.from_regex(names._COMMON, fullmatch=True) | tensor_names)
def test_common_names_need_no_other_look(name):
    """Most names are recognised by one pattern, which must not let through what segments are looked at for."""
    if names._is_common(name):
        assert len(name.encode()) <= MAX_NAME_BYTES
        for segment in name.split("/"):
            assert segment not in ("", ".", "..")
            assert len(segment) <= MAX_SEGMENT_BYTES
            assert names.encode_segment(segment) == segment
            assert not names._CONTROL.search(segment)


@pytest.mark.parametrize("name", ["w", "model.layers.0.weight", "model/layers/0/weight", "d1", "exp_avg", "x/d.0"])
def test_usual_names_are_common(name):
    assert names._is_common(name)


@given(tensor_names)
def test_encoding_is_reversible_and_safe(name):
    path = array_paths([name])[name]
    assert decode_path(path) == name
    for segment in path.split("/"):
        assert not TAKEN.fullmatch(segment)
        assert segment != names.SELF_SEGMENT
        assert segment.isascii()
        assert segment.isprintable()
        assert "\\" not in segment
        assert len(segment) <= MAX_SEGMENT_BYTES


@given(st.lists(tensor_names, max_size=8, unique=True))
def test_arrays_never_meet(listed):
    paths = array_paths(listed)
    assert list(paths) == listed
    assert len(set(paths.values())) == len(listed)
    assert [decode_path(path) for path in paths.values()] == listed
    for one in paths.values():
        for other in paths.values():
            assert not other.startswith(f"{one}/"), "Zarr forbids arrays inside arrays"
    assert not set(groups(paths.values())) & set(paths.values())


def test_a_name_that_is_a_folder_of_others():
    assert array_paths(["w", "w/m", "x"]) == {"w": "w/%self", "w/m": "w/m", "x": "x"}
    assert groups(["w/%self", "w/m", "a/b/c"]) == ["", "a", "a/b", "w"]


def test_reserved_names_move_out_of_the_way():
    paths = array_paths(["d", "client_7", "zarr.json", "__x", "manifest.ocdbt/w", "dtckpt.manifest"])
    assert paths["d"] == "%64"
    assert paths["client_7"] == "%63lient_7"
    assert paths["manifest.ocdbt/w"] == "%6Danifest.ocdbt/w"


def test_names_are_used_once():
    with pytest.raises(TensorNameError, match="more than once: 'b'"):
        array_paths(["a", "b", "b"])
