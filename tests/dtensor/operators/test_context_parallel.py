"""`context_parallel`: attention over clients is attention over the whole sequence, forward and backward."""

import pytest
import torch
import torch.nn.functional as F
from support.states import CLIENTS_WITH_GPUS, MESH_MAKERS, cluster_mesh

import dtckpt
from dtckpt import abstract_mesh
from dtckpt.comm.torch_device import device_of
from dtckpt.dtensor.experimental import context_parallel, context_parallel_unshard
from dtckpt.dtensor.experimental.ring_attention import runs_of
from dtckpt.errors import LayoutError, LayoutTypeError, MeshError, OperatorError

BATCH, HEADS, FEATURES = 2, 4, 8


def inputs(length, heads=HEADS, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length)
    shapes = [(BATCH, HEADS, length, FEATURES), *([(BATCH, heads, length, FEATURES)] * 2)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def own_mesh(kind="CPU"):
    count = dtckpt.num_clients()
    return cluster_mesh({"cp": count}, count, dtckpt.client_id(), kind)


def attended(length, heads, dtype, options, kind="CPU"):
    """Attend in a ring; return results and gradients of the whole sequence, and whether buffers were restored."""
    mesh = own_mesh(kind)
    device = device_of(mesh.local_devices()[0])
    tensors = [one.to(device) for one in inputs(length, heads, dtype)]
    before = [one.clone() for one in tensors]
    memory = [one.data_ptr() for one in tensors]
    with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2, -2, 2], no_restore_buffers={tensors[1]}):
        parts = [one.detach().clone().requires_grad_() for one in tensors]
        out = F.scaled_dot_product_attention(*parts, **options)
        (out * (out.detach() + 1)).sum().backward()
        found = context_parallel_unshard(mesh, [out, *(one.grad for one in parts)], [2] * 4)
    restored = [torch.equal(one, old) for one, old in zip(tensors, before, strict=True)]
    kept = [one.data_ptr() == old for one, old in zip(tensors, memory, strict=True)]
    return [one.cpu() for one in found], restored, kept, tuple(tensors[1].shape), tuple(out.shape)


def whole(length, heads, dtype, options):
    parts = [one.requires_grad_() for one in inputs(length, heads, dtype)]
    out = F.scaled_dot_product_attention(*parts, **options)
    (out * (out.detach() + 1)).sum().backward()
    return [out.detach(), *(one.grad for one in parts)]


CASES = [
    (2, 16, HEADS, torch.float64, {"is_causal": True}),
    (2, 16, HEADS, torch.float64, {}),
    (3, 24, HEADS, torch.float32, {"is_causal": True, "scale": 0.3}),
    (3, 29, HEADS, torch.float64, {"is_causal": True}),
    (3, 5, HEADS, torch.float64, {"is_causal": True}),
    (3, 29, HEADS, torch.float64, {}),
    (2, 16, 2, torch.float64, {"is_causal": True, "enable_gqa": True}),
    (2, 16, HEADS, torch.bfloat16, {"is_causal": True}),
    (2, 2200, HEADS, torch.float32, {"is_causal": True}),
]


def validate_attention(pool, clients, length, heads, dtype, options, kind="CPU", backend="gloo"):
    expected = whole(length, heads, dtype, options)
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    how = {"clients": clients, "group": True, "backend": backend}
    found = pool.values(attended, length, heads, dtype, options, kind, **how)
    assert sum(shape[2] for *_, shape in found) == length
    for place, (made, restored, kept, stayed, _) in enumerate(found):
        for one, other in zip(made, expected, strict=True):
            torch.testing.assert_close(one, other, **close)
        assert restored == [True, False, True]
        assert kept == [True, False, True]
        assert stayed[2] == sum(stop - start for start, stop in runs_of(length, place, clients))


@pytest.mark.processes
@pytest.mark.parametrize(("clients", "length", "heads", "dtype", "options"), CASES)
def test_attention_is_that_of_the_whole_sequence(pool, clients, length, heads, dtype, options):
    validate_attention(pool, clients, length, heads, dtype, options)


@pytest.mark.processes
@pytest.mark.parametrize(("clients", "backend"), CLIENTS_WITH_GPUS)
def test_attention_of_clients_with_gpus(pool, clients, backend):
    for _, *case in CASES:
        validate_attention(pool, clients, *case, "GPU", backend)


@pytest.mark.parametrize("make_mesh", MESH_MAKERS)
def test_one_client_is_a_ring_too(make_mesh):
    mesh = make_mesh({"cp": 1})
    query, key, value = (one.to(device_of(mesh.local_devices()[0])) for one in inputs(6))
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    with context_parallel(mesh):
        torch.testing.assert_close(F.scaled_dot_product_attention(query, key, value, is_causal=True), expected)
        mixed = F.scaled_dot_product_attention(query, key[:1, :1], value[:1, :1])
    torch.testing.assert_close(mixed, F.scaled_dot_product_attention(query, key[:1, :1], value[:1, :1]))


def test_runs_cover_a_sequence_and_share_causal_work():
    for length, count in ((0, 2), (5, 3), (16, 4), (29, 3)):
        every = sorted(run for place in range(count) for run in runs_of(length, place, count))
        assert [position for run in every for position in range(*run)] == list(range(length))
    work = [sum(position for run in runs_of(64, place, 4) for position in range(*run)) for place in range(4)]
    assert len(set(work)) == 1


def broken_block(length):
    tensors = inputs(length)
    before = tensors[0].clone()
    try:
        with context_parallel(own_mesh(), buffers=tensors, buffer_seq_dims=[2, 2, 2]):
            tensors[0].zero_()
            raise KeyError("a failure of this client alone" if dtckpt.client_id() else "another")
    except KeyError:
        return torch.equal(tensors[0], before)


@pytest.mark.processes
def test_buffers_are_back_after_a_failure(pool):
    assert pool.values(broken_block, 16, clients=2, group=True) == [True, True]


TENSOR = torch.zeros(2, 4)
REFUSED = [
    (LayoutError, "2 buffers and 1 dims", {"buffers": [TENSOR, TENSOR], "buffer_seq_dims": [0]}),
    (LayoutError, "dim 2 for a buffer", {"buffers": [TENSOR], "buffer_seq_dims": [2]}),
    (LayoutError, "not among the buffers", {"no_restore_buffers": {TENSOR}}),
    (LayoutError, "requires grad", {"buffers": [torch.zeros(2, requires_grad=True)], "buffer_seq_dims": [0]}),
    (LayoutTypeError, "buffer that is list", {"buffers": [[1.0]], "buffer_seq_dims": [0]}),
]


@pytest.mark.parametrize(("error", "words", "options"), REFUSED)
def test_what_does_not_fit_is_refused(error, words, options):
    with pytest.raises(error, match=words), context_parallel(abstract_mesh({"cp": 1}), **options):
        pass


def test_meshes_that_are_no_ring_are_refused():
    with pytest.raises(MeshError, match="one device per client"), context_parallel(abstract_mesh({"cp": 2})):
        pass
    with pytest.raises(MeshError, match="one axis"), context_parallel(abstract_mesh({"cp": 1, "dp": 1})):
        pass


ATTENTION = [
    ("mask or dropout", {"dropout_p": 0.5}),
    ("mask or dropout", {"attn_mask": torch.ones(6, 6, dtype=torch.bool)}),
    ("different lengths", {"is_causal": True, "key": inputs(4)[1], "value": inputs(4)[2]}),
    ("expected .batch, heads", {"query": torch.zeros(2, 3, 4)}),
]


@pytest.mark.parametrize(("words", "options"), ATTENTION)
def test_other_attention_is_refused(words, options):
    query, key, value = inputs(6)
    with context_parallel(abstract_mesh({"cp": 1})), pytest.raises(OperatorError, match=words):
        F.scaled_dot_product_attention(**{"query": query, "key": key, "value": value, **options})
