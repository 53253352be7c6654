"""Results have the strides, the storage offsets and the aliases that plain tensors give, on every client."""

import math
import random

import pytest
import torch

from dtckpt import Shard, abstract_mesh
from dtckpt.dtensor import distribute_tensor
from dtckpt.errors import OperatorError

from .operator_checks import S0, S1, R
from .stride_cases import strides_on_clients, writes_through_views_on_clients

MESHES = (abstract_mesh({"x": 2}), abstract_mesh({"x": 1}), abstract_mesh({"x": 3}))


def pair(*shape, placement=S0, mesh=MESHES[0], dtype=torch.float64):
    """Return a plain tensor and a DTensor of the same values."""
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape).to(dtype).clone()
    return whole, distribute_tensor(whole, mesh, [placement])


def facts(tensor):
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.is_contiguous()


def assert_same(ours, plain):
    assert facts(ours) == facts(plain)
    assert torch.equal(ours.full_tensor(), plain)


PARTS = {
    "slice": lambda x: x[:, :2],
    "stepped slice": lambda x: x[::2, 1::2],
    "select": lambda x: x[:, 1],
    "narrow": lambda x: x.narrow(1, 1, 2),
    "chunk": lambda x: x.chunk(2, 1)[1],
    "split": lambda x: x.split([1, 3], 1)[0],
    "unbind": lambda x: x.unbind(1)[3],
    "diagonal": lambda x: x.diagonal(),
    "transposed": lambda x: x.t(),
    "unfold": lambda x: x.unfold(1, 2, 2)[:, 1],
}
COPIES = {
    "contiguous": lambda part: part.contiguous(),
    "reshape": lambda part: part.reshape(-1, 1),
    "flatten": lambda part: part.flatten(),
    "ravel": lambda part: part.ravel(),
    "clone": lambda part: part.clone(),
}


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh.size()} devices")
@pytest.mark.parametrize("placement", [S0, S1, R], ids=str)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("copied", COPIES)
def test_copies_of_parts_share_memory_where_plain_ones_do(mesh, placement, part, copied):
    whole, ours = pair(4, 4, placement=placement, mesh=mesh)
    for one in (whole, ours):
        one.part = PARTS[part](one)
        one.copied = COPIES[copied](one.part)
        one.copied.mul_(0.5)
    assert_same(ours.copied, whole.copied)
    assert_same(ours.part, whole.part)
    assert_same(ours, whole)
    for one in (whole, ours):
        one.add_(1)
    assert_same(ours.copied, whole.copied)


@pytest.mark.parametrize("placement", [S0, S1, R], ids=str)
def test_a_snapshot_of_a_part_does_not_follow(placement):
    whole, ours = pair(3, 4, placement=placement)
    parameter = torch.nn.Parameter(ours)
    snapshot = parameter.detach()[:, :3].contiguous()
    with torch.no_grad():
        parameter.mul_(0)
    assert torch.equal(snapshot.full_tensor(), whole[:, :3])


@pytest.mark.parametrize("placement", [S0, S1, R], ids=str)
def test_gradients_of_copies_of_parts(placement):
    gradients = []
    for one in pair(3, 4, placement=placement):
        leaf = one.detach().requires_grad_()
        part = leaf[:, :2].contiguous()
        part.mul_(3)
        (part.sum() + leaf.square().sum()).backward()
        gradients.append(leaf.grad)
    assert torch.equal(gradients[1].full_tensor(), gradients[0])


@pytest.mark.parametrize("placement", [S0, S1, R], ids=str)
def test_a_view_that_strides_do_not_allow_is_refused_as_for_plain_tensors(placement):
    for one in pair(4, 4, placement=placement):
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            one[:, :2].view(8)


@pytest.mark.processes
def test_clients_agree_on_strides(pool):
    """On some clients a component has one row, whose strides alone do not tell how the tensor lies in memory."""
    found = pool.values(strides_on_clients, clients=4, group=True)
    assert found == [found[0]] * 4
    assert found[0]["stride"] == (1, 5)
    assert not found[0]["is_contiguous"]
    assert found[0]["is_unchanged"]


@pytest.mark.processes
@pytest.mark.parametrize("clients", [2, 3])
def test_writes_through_views_that_some_clients_copy(pool, clients):
    assert pool.values(writes_through_views_on_clients, clients=clients, group=True) == [[]] * clients


WRITES = {
    "select of a view": lambda x: x.view(2, 4).t()[1].mul_(4),
    "window": lambda x: x.unfold(0, 2, 2)[1].mul_(4),
    "overlapping window": lambda x: x.unfold(0, 2, 1)[1].mul_(4),
    "as_strided": lambda x: x[1:].as_strided((2, 2), (1, 2)).mul_(4),
    "as_strided with offset": lambda x: x[1:].as_strided((2, 2), (1, 2), 3).mul_(4),
    "unsafe_chunk": lambda x: x.unsafe_chunk(2)[1].mul_(4),
    "real": lambda x: torch.view_as_complex(x).imag.mul_(4),
    "bits": lambda x: x.view(torch.int64)[1:, :1].zero_(),
    "conjugate": lambda x: torch.view_as_complex(x).conj()[1:].mul_(2j),
}


@pytest.mark.parametrize("placement", [S0, S1, R], ids=str)
@pytest.mark.parametrize("write", WRITES)
def test_writes_through_views_of_views(write, placement):
    whole, ours = pair(4, 2, placement=placement)
    for one in (whole, ours):
        WRITES[write](one)
    assert torch.equal(ours.full_tensor(), whole)


def test_as_strided_reads_no_elements_of_others():
    _, ours = pair(4, 2)
    with pytest.raises(OperatorError, match=r"storage offset 0, expected a view of elements of the DTensor"):
        ours[1:].as_strided((2, 2), (1, 2), 0)


@pytest.mark.parametrize("placement", [S0, S1, R], ids=str)
@pytest.mark.parametrize("offset", [None, 4])
def test_as_strided_scatter(placement, offset):
    whole, ours = (
        torch.as_strided_scatter(one[1:], one[:2] * 0, (2, 2), (1, 2), offset)
        for one in pair(4, 2, placement=placement)
    )
    assert_same(ours, whole)


def test_a_view_of_other_elements_may_not_begin_within_one():
    _, ours = pair(3, 3, dtype=torch.float32)
    with pytest.raises(OperatorError, match="begins 12 bytes into its storage, expected a multiple of 8"):
        ours[1:].view(-1)[:2].view(torch.float64)


# --- changes of shape in place ------------------------------------------------------------------------------------

RESHAPES = {
    "transpose_": lambda x: x.transpose_(0, 1),
    "t_": lambda x: x.t_(),
    "swapaxes_": lambda x: x.swapaxes_(0, 1),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "squeeze_": lambda x: x.unsqueeze(0).squeeze_(0) if x.is_leaf else x.squeeze_(),
    "as_strided_": lambda x: x.as_strided_((9,), (1,)),
}


@pytest.mark.parametrize("reshape", ["transpose_", "t_", "swapaxes_", "unsqueeze_", "as_strided_"])
def test_a_base_of_differentiable_views_keeps_its_shape(reshape):
    """Autograd would make the view again from the base in its new shape, and take the gradient of other elements."""
    _, leaf = pair(3, 3)
    base = leaf.requires_grad_() * 1
    view = base.view(-1)
    with pytest.raises(OperatorError, match=r"differentiable view of shape \(9,\) depends"):
        RESHAPES[reshape](base)
    (view * view.detach()).sum().backward()
    assert torch.equal(leaf.grad.full_tensor(), leaf.full_tensor().detach())


@pytest.mark.parametrize("reshape", ["transpose_", "t_", "swapaxes_", "unsqueeze_", "squeeze_"])
def test_a_view_may_get_another_shape_until_somebody_writes(reshape):
    weights, gradients = pair(3, 3, placement=R)[0], []
    for one in pair(3, 3):
        leaf = one.requires_grad_()
        view = (leaf * 1)[:, :]
        RESHAPES[reshape](view)
        factors = weights if one.layout is torch.strided else distribute_tensor(weights, MESHES[0], [R])
        (view * factors).sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(gradients[1].full_tensor(), gradients[0])


@pytest.mark.parametrize("writer", ["view", "base", "other view"])
def test_after_a_view_got_another_shape_writes_are_refused(writer):
    _, leaf = pair(3, 3)
    base = leaf.requires_grad_() * 1
    view, other = base[:, :], base[0]
    view.t_()
    before = base.full_tensor().detach().clone()
    with pytest.raises(OperatorError, match="that got another shape in place"):
        {"view": view, "base": base, "other view": other}[writer].mul_(2)
    assert torch.equal(base.full_tensor().detach(), before)
    del view
    base.detach().mul_(2)
    assert torch.equal(base.full_tensor().detach(), 2 * before)


def test_views_that_become_differentiable_keep_their_gradients():
    """A write of values that require a gradient, and ``requires_grad_``, make views differentiable afterwards."""
    _, base = pair(3, 3)
    _, factors = pair(3, 3)
    view = base[0]
    base.t_()
    with pytest.raises(OperatorError, match="that got another shape in place"):
        base.mul_(factors.requires_grad_())
    for require in (base.requires_grad_, lambda: setattr(base, "requires_grad", True)):
        with pytest.raises(OperatorError, match=r"requires_grad: got a DTensor of shape \(3, 3\)"):
            require()
    base.mul_(factors.detach())
    assert view.shape == (3,)
    del view
    base.mul_(factors)
    assert base.requires_grad


def test_without_gradient_mode_a_differentiable_view_keeps_its_shape():
    _, leaf = pair(3, 3)
    view = leaf.requires_grad_()[:, :]
    with torch.no_grad(), pytest.raises(OperatorError, match="differentiable view"):
        view.t_()
    view.sum().backward()
    assert torch.equal(leaf.grad.full_tensor(), torch.ones(3, 3, dtype=torch.float64))


@pytest.mark.parametrize("placement", [S0, S1, R], ids=str)
@pytest.mark.parametrize(
    "copied",
    [
        lambda z: z.conj().resolve_conj(),
        lambda z: z.conj().conj().resolve_conj(),
        lambda z: z.conj()[1:].resolve_conj(),
        lambda z: z.mH.resolve_conj(),
        lambda z: z.conj().imag.resolve_neg(),
        lambda z: z.conj().real.resolve_neg(),
        lambda z: z.imag.resolve_neg(),
        lambda z: z.conj().unsafe_split(2)[0],
        lambda z: z.conj().imag.unsafe_split_with_sizes([2, 1])[1],
        lambda z: z.conj().real.unsafe_chunk(2)[0],
        lambda z: z.imag.unsafe_chunk(2)[0],
    ],
)
def test_lazy_views_are_copied_where_plain_ones_are(copied, placement):
    whole = torch.complex(torch.arange(6.0).reshape(3, 2), torch.ones(3, 2))
    ours = distribute_tensor(whole.clone(), MESHES[0], [placement])
    for one in (whole, ours):
        copied(one).mul_(2)
    assert torch.equal(ours.full_tensor(), whole)


def test_a_tensor_without_views_that_need_it_may_get_another_shape():
    whole, ours = pair(3, 4)
    for one in (whole, ours):
        one.view_ = one.view(-1)  # no gradient
        one.t_()
        one.add_(1)
    assert_same(ours, whole)
    assert_same(ours.view_, whole.view_)
    leaf = pair(3, 4)[1].requires_grad_()
    base = leaf * 1
    del whole
    base.view(-1)  # gone at once
    base.t_().square().sum().backward()
    assert torch.equal(leaf.grad.full_tensor(), 2 * leaf.full_tensor().detach())


# --- copies of tensors --------------------------------------------------------------------------------------------


def test_operators_on_lists_that_write_twice():
    mesh = MESHES[0]
    plain = torch.ones(3)
    ours = distribute_tensor(plain, mesh, [R]).redistribute(placements=[Shard(0)])
    other = distribute_tensor(torch.full((3,), 2.0), mesh, [R])
    for one, two in ((plain, torch.full((3,), 2.0)), (ours, other)):
        torch._foreach_mul_([one, one, one.view(3)], [two, two, two])
    assert torch.equal(ours.full_tensor(), plain)


def test_operators_on_lists_write_through_views_with_memory_of_their_own():
    whole = torch.arange(1.0, 33.0).reshape(4, 4, 2)
    ours = distribute_tensor(whole.clone(), abstract_mesh({"x": 3}), [S1])
    for one in (whole, ours):
        torch._foreach_mul_([one.view(4, 2, 1, 4), one], -2.0)
    assert torch.equal(ours.full_tensor(), whole)


@pytest.mark.parametrize("placement", [S0, R], ids=str)
def test_operators_on_lists_that_fail_have_written_on_all_devices(placement):
    """PyTorch writes to the tensors before the tensor that fails."""
    (whole, ours), (integers, other) = pair(3, placement=placement), pair(3, dtype=torch.int64)
    for first, second in ((whole, integers), (ours, other)):
        with pytest.raises(RuntimeError, match="can't be cast"):
            torch._foreach_mul_([first, second], 0.5)
    for component, region in zip(ours.components, map(ours.layout.region, (0, 1), [(3,)] * 2), strict=True):
        assert torch.equal(component, whole[region.slices()])
    assert torch.equal(other.full_tensor(), integers)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bfloat16])
@pytest.mark.parametrize("count", [None, 0, 1, 3])
@pytest.mark.parametrize("increasing", [False, True])
def test_vander(dtype, count, increasing):
    whole, ours = pair(4, dtype=dtype)
    assert_same(torch.vander(ours, count, increasing), torch.vander(whole, count, increasing))


@pytest.mark.parametrize("shape", [(2, 4, 3, 3), (2, 4, 1, 3), (2, 1, 3, 4), (1, 3, 2, 4), (2, 3, 1, 1)], ids=str)
@pytest.mark.parametrize("placement", [R, S0, S1], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64], ids=str)
def test_rolled_images(dtype, placement, shape):
    plain = torch.arange(math.prod(shape)).to(dtype).reshape(shape).to(memory_format=torch.channels_last)
    image = distribute_tensor(plain, MESHES[0], [placement]).to(memory_format=torch.channels_last)
    for arguments in ((1, 0), (0, 0), (1, 1), (1, -1), ((1, 1), (0, 3)), ((0, 1), (1, 2)), (3,)):
        rolled, expected = torch.roll(image, *arguments), torch.roll(plain, *arguments)
        assert rolled.stride() == expected.stride(), arguments
        assert torch.equal(rolled.full_tensor(), expected)


def test_one_hot():
    whole, ours = pair(2, 3, dtype=torch.int64)
    assert_same(torch.nn.functional.one_hot(ours.t(), 6), torch.nn.functional.one_hot(whole.t(), 6))


def test_sparse_results_have_no_strides():
    whole, ours = pair(3, 4)
    assert torch.equal(ours.to_sparse().full_tensor().to_dense(), whole)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize("placement", [S0, S1, R], ids=str)
def test_padded_images_with_channels_last(mode, placement):
    image = torch.arange(64.0).reshape(2, 4, 4, 2)
    ours = distribute_tensor(image, MESHES[0], [placement])
    whole, made = (
        torch.nn.functional.pad(each.clone(memory_format=torch.channels_last), (1, 1, 1, 1, 0, 0), mode=mode)
        for each in (image, ours)
    )
    assert made.stride() == whole.stride()
    assert torch.equal(made.full_tensor(), whole)


@pytest.mark.parametrize("placement", [S0, S1, R], ids=str)
def test_filled_indices_of_a_diagonal(placement):
    whole, ours = pair(3, 2, 2, placement=placement)
    made, expected = (each.diagonal(-1, -3, 2).index_fill(-1, torch.tensor([0]), 1) for each in (ours, whole))
    assert made.stride() == expected.stride()
    assert torch.equal(made.full_tensor(), expected)


@pytest.mark.parametrize("dims", [(0, 2), (1, 2), (1, 3), (2, 3)])
@pytest.mark.parametrize("shape", [(2, 2, 1, 1), (1, 3, 2, 1), (4, 1, 1, 3), (2, 3, 2, 1)])
def test_batch_norm_of_images_whose_dims_were_swapped(shape, dims):
    whole, tensor = pair(*shape)
    ours = torch.nn.functional.batch_norm(tensor.swapdims(*dims), None, None, training=True)
    plain = torch.nn.functional.batch_norm(whole.swapdims(*dims), None, None, training=True)
    steps = [[step for step, size in zip(each.stride(), each.shape, strict=True) if size > 1] for each in (ours, plain)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("placement", [R, S1])
def test_operators_that_fail_in_place_have_written_on_all_devices(placement):
    numbers = torch.tensor([[2, 1, 4, 0], [2, 1, 4, 0]], dtype=torch.int32)
    tensor = distribute_tensor(numbers, MESHES[0], [placement])
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        tensor[0].fmod_(tensor[0] * 1)
    first, *others = tensor.components
    if placement == R:
        assert all(each.equal(first) for each in others)


@pytest.mark.parametrize("placement", [S0, R], ids=str)
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0)])
def test_a_lazy_view_without_elements_is_copied(shape, placement):
    whole = torch.ones(shape, dtype=torch.complex64)
    for tensor in (whole, distribute_tensor(whole, MESHES[0], [placement])):
        view = tensor.conj()
        copy = view.resolve_conj()
        view.detach().add_(1)
        assert (view._version, copy._version) == (1, 0)


@pytest.mark.parametrize("seed", range(40))
def test_indexed_tensors_with_dims_of_size_one(seed):
    rng = random.Random(seed)
    rank = rng.randint(1, 4)
    whole, tensor = pair(*(rng.choice([1, 1, 2, 3]) for _ in range(rank)), placement=rng.choice([S0, R]))
    order = rng.sample(range(rank), rank)
    index: list = [slice(None, None, rng.choice([1, 2])) for _ in range(rank)]
    shape = rng.choice([(2,), (1,), (2, 3), (1, 2), (3, 1)])
    for dim in rng.sample(range(rank), rng.randint(1, min(2, rank))):
        picked = torch.zeros(shape, dtype=torch.long)
        index[dim] = picked.t().contiguous().t() if picked.ndim == 2 and rng.random() < 0.5 else picked
    assert_same(tensor.permute(order)[tuple(index)], whole.permute(order)[tuple(index)])


@pytest.mark.parametrize("placement", [S0, R], ids=str)
def test_plain_operands_keep_their_strides(placement):
    whole, tensor = pair(3, 1, placement=placement)
    plain = torch.arange(6.0, dtype=torch.float64).reshape(2, 3).t()
    for operand in (plain, plain[:, :1].expand(3, 2), plain[:, ::2]):
        for operator in (torch.add, lambda one, other: torch.where(other > 0, one, other)):
            assert_same(operator(tensor, operand), operator(whole, operand))
            assert_same(operator(operand, tensor), operator(operand, whole))


def test_a_lazily_negated_view_that_is_squeezed_leaves_its_source():
    """On plain tensors PyTorch 2.13 changes the source."""
    whole = torch.tensor([[[[1 - 2j], [1 + 3j]]]])
    tensor = distribute_tensor(whole, MESHES[1], [R])
    view = tensor.conj().imag
    view.squeeze_(0)
    assert torch.equal(tensor.full_tensor(), whole)
    assert torch.equal(view.full_tensor(), torch.tensor([[[2.0], [-3.0]]]))
