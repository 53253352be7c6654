"""The union of what clients describe, without processes."""

from dataclasses import replace

import pytest
from support.states import cluster_mesh

from dtckpt.checkpoint.saving.plan import CopyRule, Holding, TensorSpec, copies_of, holdings_of, plan_save
from dtckpt.checkpoint.saving.union import Description, described, passed_by_all, unite
from dtckpt.errors import ComponentError, SaveDisagreementError
from dtckpt.layout.layout import UNSHARDED, Layout
from dtckpt.layout.region import Region

SHAPE = (8, 6)


def on_mesh(name, specs, mesh, shape=SHAPE):
    layout = Layout(specs, mesh)
    return TensorSpec(name, shape, "float32", "float32", holdings_of(layout, shape), layout)


def plain(name, clients=(0, 1, 2, 3), shape=SHAPE, dtype="float32"):
    return TensorSpec(name, shape, dtype, dtype, copies_of(clients, shape))


def holders(spec):
    return {holding.region.offset: holding.clients for holding in spec.holdings}


def test_another_client_reads_the_same_description():
    mesh = cluster_mesh({"x": 2, "y": 2}, 4, 1)
    specs = (on_mesh("a", ["x", ("y",)], mesh), on_mesh("b", [("y", "x"), UNSHARDED], mesh), plain("c"), plain("d", ()))
    data, _ = described(specs, ("v/lr",))
    described_with_roles = Description((replace(plain("e"), copies=CopyRule.NOTED, is_parameter=True),), ()).to_bytes()
    (role,) = Description.from_bytes(described_with_roles).specs
    assert (role.copies, role.is_parameter) == (CopyRule.NOTED, True)
    again = Description.from_bytes(data)
    assert again.to_bytes() == data
    assert again.values == ("v/lr",)
    for spec, read in zip(specs, again.specs, strict=True):
        facts = "name", "shape", "dtype", "stored_dtype", "holdings", "layout", "codec"
        assert [getattr(read, fact) for fact in facts] == [getattr(spec, fact) for fact in facts]
    # Another client sees its own devices, and describes the same.
    other = cluster_mesh({"x": 2, "y": 2}, 4, 3)
    theirs = (on_mesh("a", ["x", "y"], other), on_mesh("b", [("y", "x"), UNSHARDED], other), plain("c"), plain("d", ()))
    assert described(theirs, ("v/lr",)) == described(specs, ("v/lr",))


def test_stages_hold_their_own():
    stage = cluster_mesh({"pp": 2, "dp": 2}, 4, 0)
    shared = plain("shared")
    first = Description((on_mesh("a", ["dp", UNSHARDED], stage), shared), ())
    second = Description((shared, plain("b")), ())
    a, both, b = unite({(0, 1): first, (2, 3): second})
    assert (a.name, both.name, b.name) == ("a", "shared", "b")
    assert holders(a) == {(0, 0): (0,), (4, 0): (1,)}
    assert holders(both) == {(0, 0): (0, 1, 2, 3)}
    assert holders(b) == {(0, 0): (2, 3)}
    assert a.layout.mesh.axis_sizes == {"pp": 2, "dp": 2}
    assert set(plan_save([a, both, b], 1 << 20).owners.tolist()) <= {0, 1, 2, 3}


def test_copies_may_differ_if_all_clients_say_so():
    noted, free = (replace(plain("w"), copies=copies) for copies in (CopyRule.NOTED, CopyRule.FREE))
    for other, expected in ((noted, CopyRule.NOTED), (free, CopyRule.NOTED), (plain("w"), CopyRule.EQUAL)):
        (w,) = unite({(0, 2): Description((noted,), ()), (1, 3): Description((other,), ())})
        assert w.copies is expected
        # Small chunks: by the rule for equal copies, each client would write some.
        owners = plan_save([w], 32).owners.tolist()
        assert owners == [0] * len(owners) if expected is CopyRule.NOTED else {*owners} == {0, 1, 2, 3}


def test_families_on_meshes_of_their_own():
    """Meshes that are no slices of one known mesh; each client names only its own."""

    def family(clients):
        region = [Region((0, 0), (4, 6)), Region((4, 0), (4, 6))]
        held = tuple(Holding(box, (client,)) for box, client in zip(region, clients, strict=True))
        return Description((TensorSpec("w", SHAPE, "float32", "float32", held),), ())

    (w,) = unite({(0, 2): family((0, 2)), (1, 3): family((1, 3))})
    assert holders(w) == {(0, 0): (0, 1), (4, 0): (2, 3)}


@pytest.mark.parametrize(
    ("other", "error", "text"),
    [
        (plain("w", shape=(8, 5)), ComponentError, r"got shape \(8, 6\) float32 and shape \(8, 5\) float32"),
        (plain("w", dtype="float64"), ComponentError, "disagree on tensor 'w'"),
        (plain("w"), ComponentError, "which overlap"),
        (plain("v"), SaveDisagreementError, "'w' would be missing: in the layout that clients 0, 1 pass, .* client 2"),
    ],
)
def test_what_does_not_fit(other, error, text):
    mesh = cluster_mesh({"x": 4}, 4, 0)
    descriptions = {(0, 1): Description((on_mesh("w", ["x", UNSHARDED], mesh),), ()), (2, 3): Description((other,), ())}
    with pytest.raises(error, match=text):
        unite(descriptions)


def test_many_boxes_are_compared():
    boxes = tuple(Holding(Region((row, 0), (1, 6)), (row % 2,)) for row in range(3000))
    late = (*boxes[:-1], Holding(Region((2999, 0), (1, 3)), (1,)), Holding(Region((2999, 3), (1, 3)), (1,)))
    specs = [TensorSpec("w", (3000, 6), "int8", "int8", held) for held in (boxes, late)]
    with pytest.raises(ComponentError, match="which overlap"):
        unite({(0,): Description((specs[0],), ()), (1,): Description(tuple(specs), ())})


def test_what_all_pass_is_kept_unless_a_part_is_elsewhere():
    mesh = cluster_mesh({"x": 2, "y": 2}, 4, 0)
    specs = (on_mesh("w", ["x", UNSHARDED], mesh), plain("c"))
    assert passed_by_all(specs, (0, 1, 2, 3)) is specs
    narrowed = passed_by_all(specs, (0, 2))
    assert [holders(spec) for spec in narrowed] == [{(0, 0): (0,), (4, 0): (2,)}, {(0, 0): (0, 2)}]
    assert passed_by_all(specs, (0, 2)) is narrowed
    with pytest.raises(SaveDisagreementError, match="on clients 2, 3"):
        passed_by_all(specs, (0, 1))
