import pytest

from dtckpt.cli import arguments, options
from dtckpt.cli.arguments import LayoutRule, parse_dtype, parse_mesh, read_rules
from dtckpt.cli.options import parse_size
from dtckpt.cli.output import format_layout
from dtckpt.errors import ConfigError, LayoutError, MeshError
from dtckpt.format.manifest import KVSTORES
from dtckpt.layout.create_mesh import abstract_mesh

MESH = abstract_mesh({"x": 2, "y": 2})


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("4096", 4096),
        ("512KiB", 512 << 10),
        ("1GiB", 1 << 30),
        ("2GB", 2_000_000_000),
        ("1.5 gib", 3 << 29),
        ("7b", 7),
        ("1PiB", 1 << 50),
    ],
)
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "0.2", "1G", "GiB", "1e9", "1 2", "nan", "inf", "1,5GiB", "٣KiB", "9" * 400, "1GiB\n1"]
)
def test_what_is_no_size(text):
    with pytest.raises(ConfigError, match="expected bytes or a number"):
        parse_size(text)


def test_meshes():
    assert parse_mesh("data=2, model=4").axis_sizes == {"data": 2, "model": 4}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "expected AXIS=SIZE"),
        ("data", "expected AXIS=SIZE"),
        ("data=2,", "expected AXIS=SIZE"),
        ("=2", "expected AXIS=SIZE"),
        ("data=0", "size of 1 or more"),
        ("data=-2", "size of 1 or more"),
        ("data=two", "size of 1 or more"),
        ("data=2,data=2", "twice"),
        ("a=b=2", "axis name"),
        ("a+b=2", "axis name"),
        ("unsharded=2", "reserved"),
        ("x=262145", "too large"),
        ("x=999999999999,y=999999999999", "too large"),
    ],
)
def test_what_is_no_mesh(text, reason):
    with pytest.raises(MeshError, match=reason):
        parse_mesh(text)


@pytest.mark.parametrize(
    ("text", "pattern", "specs"),
    [
        ("w=x,unsharded", "w", ["x", "unsharded"]),
        ("*/w = x+y , unsharded", "*/w", [("x", "y"), "unsharded"]),
        ("scale=", "scale", []),
        ("optim/a=b=y", "optim/a=b", ["y"]),
    ],
)
def test_rules(text, pattern, specs):
    rule = LayoutRule.parse(text, MESH)
    assert (rule.pattern, rule.layout.sharding_specs) == (pattern, specs)
    assert format_layout(rule.layout) == ",".join("+".join(s) if isinstance(s, tuple) else s for s in specs) or "scalar"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("w", "expected PATTERN=SPEC"),
        ("=x", "expected PATTERN=SPEC"),
        ("w=z", "got 'z', expected an axis of"),
        ("w=x,x", "x more than once"),
        ("w=x+x", "x more than once"),
        ("w=x,", "got ''"),
        ("w=x+", "got ''"),
        ("w=match", "got 'match'"),
        ("w=any", "'any'"),
    ],
)
def test_what_is_no_rule(text, reason):
    with pytest.raises(LayoutError, match=reason) as caught:
        LayoutRule.parse(text, MESH)
    assert repr(text) in str(caught.value)


def test_layout_file(tmp_path):
    file = tmp_path / "layouts"
    file.write_text("# all of it\n\n  */w=x,y  # the = of a=b is none\nodd#name=x\r\n")
    assert list(read_rules(file)) == ["*/w=x,y", "odd#name=x"]


def test_layout_files_that_cannot_be_read(tmp_path, monkeypatch):
    (tmp_path / "latin").write_bytes(b"caf\xe9=x\n")
    (tmp_path / "large").write_text("w=x\n" * 100)
    monkeypatch.setattr(arguments, "MAX_LAYOUT_FILE_NBYTES", 100)
    for name, reason in (
        ("latin", "cannot be read"),
        ("none", "No such file"),
        ("large", "too large"),
        (".", "Is a dir"),
    ):
        with pytest.raises(ConfigError, match=reason):
            list(read_rules(tmp_path / name))


@pytest.mark.parametrize("text", ["int32", "float", "torch.float32", "", "__class__"])
def test_what_is_no_dtype(text):
    with pytest.raises(ConfigError, match="expected one of float16, "):
        parse_dtype(text)


def test_the_formats_are_those_of_the_manifest():
    assert options.KVSTORES == KVSTORES
