"""The content digest of a tensor is the same, whether its chunks are digested one by one or put together first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtckpt.checkpoint.saving import digests
from dtckpt.checkpoint.saving.digests import chunk_digester
from dtckpt.checkpoint.saving.plan import TensorSpec, holdings_of, plan_save
from dtckpt.format.content import content_share
from dtckpt.layout.create_mesh import abstract_mesh
from dtckpt.layout.layout import Layout
from dtckpt.layout.region import Region


@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=4),
    parts=st.integers(1, 4),
    dtype=st.sampled_from(["float32", "bfloat16", "int8"]),
    bound=st.sampled_from([0, 200, digests.GATHERED_NBYTES]),
    is_dropped=st.booleans(),
)
def test_shares_of_gathered_chunks(shapes, parts, dtype, bound, is_dropped):
    layout = Layout(["unsharded", "x", "unsharded"], abstract_mesh({"x": parts}))
    specs = [TensorSpec(f"w{i}", shape, dtype, dtype, holdings_of(layout, shape)) for i, shape in enumerate(shapes)]
    plan = plan_save(specs, 64)
    expected = {}
    with pytest.MonkeyPatch.context() as patch, chunk_digester(has_threads=False, with_content=True) as digester:
        patch.setattr(digests, "GATHERED_NBYTES", bound)
        for position, tensor in enumerate(plan.tensors):
            itemsize = digests.DTYPES[dtype].itemsize
            whole = np.arange(np.prod(tensor.grid.shape) * itemsize).astype(np.uint8)
            whole = whole.view(digests.DTYPES[dtype]).reshape(tensor.grid.shape)
            # Another client may write some of the chunks.
            numbers = list(range(tensor.grid.num_chunks))[is_dropped:] or [0]
            for number in numbers:
                region = tensor.grid.chunk(number)[1]
                digester.add(position, tensor, number, whole[region.slices()])
                share = content_share(np.ascontiguousarray(whole[region.slices()]), tensor.grid.shape, region)
                expected[position] = expected.get(position, 0) ^ share
            if len(numbers) == tensor.grid.num_chunks:
                assert expected[position] == content_share(whole, tensor.grid.shape, Region.full(tensor.grid.shape))
        assert {position: result.content for position, result in digester.results().items()} == expected
