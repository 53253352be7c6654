"""Hosts keep near copies of exactly what their clients have and clients of other hosts save."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dtckpt.checkpoint.saving.plan import CopyRule, TensorSpec, copies_of, holdings_of, plan_save
from dtckpt.checkpoint.saving.staging import written_regions
from dtckpt.checkpoint.tiers.near_copies import near_copies
from dtckpt.layout.create_mesh import abstract_mesh
from dtckpt.layout.layout import Layout


@st.composite
def plans(draw):
    replicas, shards = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    mesh = abstract_mesh({"r": replicas, "s": shards})
    specs = []
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
        dims = draw(
            st.sampled_from([("s", "unsharded"), ("unsharded", "s"), ("r", "s"), ("unsharded", "unsharded"), None])
        )
        layout = None if dims is None else Layout(dims, mesh)
        clients = tuple(range(replicas * shards))
        boxes = copies_of(clients, shape) if layout is None else holdings_of(layout, shape)
        copies = draw(st.sampled_from(CopyRule))
        specs.append(TensorSpec(f"w{number}", shape, "float32", "float32", boxes, layout, copies=copies))
    numbers = draw(st.permutations(range(replicas * shards)))
    cuts = sorted(draw(st.sets(st.integers(1, len(numbers)), max_size=3)) | {len(numbers)})
    hosts = [tuple(sorted(numbers[a:b])) for a, b in zip([0, *cuts], cuts, strict=False) if a < b]
    return plan_save(specs, draw(st.sampled_from([16, 64, 1 << 20]))), hosts


def elements(name, region):
    return {
        (name, i, j) for i in range(region.offset[0], region.stop[0]) for j in range(region.offset[1], region.stop[1])
    }


@given(plans())
def test_a_host_has_everything_that_its_clients_have(case):
    plan, hosts = case
    given_by = {c: [(t.name, r) for t in plan.tensors for r in written_regions(t, c)] for host in hosts for c in host}
    all_regions = {each for regions in given_by.values() for each in regions}
    for host in hosts:
        own = set().union(*(elements(*each) for c in host for each in given_by[c]))
        near = [
            (name, region) for c in host for name, regions in near_copies(plan, c, host).items() for region in regions
        ]
        assert all_regions.issuperset(near), "near copies are of pieces, as they lie in parts"
        listed = [element for each in near for element in elements(*each)]
        assert len(listed) == len(set(listed)), "one of each"
        assert own.isdisjoint(listed), "none of what the host has anyway"
        held = {
            element
            for tensor in plan.tensors
            # What may differ is wanted as it was saved, not as this host has it.
            if tensor.spec.copies is CopyRule.EQUAL
            for holding in tensor.spec.holdings
            if set(holding.clients) & set(host)
            for element in elements(tensor.name, holding.region)
        }
        assert held | own == own | set(listed)
        for c in host:
            for name, regions in near_copies(plan, c, host).items():
                boxes = next(t.spec.holdings for t in plan.tensors if t.name == name)
                assert all(any(b.region.contains(r) and c in b.clients for b in boxes) for r in regions)
