"""Attention, sharded over batch and heads."""

import copy
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from dtckpt import abstract_mesh
from dtckpt.dtensor import DTensor, distribute_module, distribute_tensor
from dtckpt.dtensor.operators import dispatch

from .operator_checks import S0, S1, S2, P, R, check, distributed

QUERY, KEY, VALUE = (4, 4, 6, 8), (4, 4, 5, 8), (4, 4, 5, 8)


def tensors(*shapes):
    return [torch.randn(shape) for shape in shapes]


@pytest.mark.parametrize(
    ("placed", "expected"),
    [((S0,) * 3, S0), ((S1,) * 3, S1), (((S0, S1),) * 3, (S0, S1)), (((S1, S0),) * 3, (S1, S0)), ((R,) * 3, R)],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"scale": 0.5}], ids=str)
def test_batch_and_heads(placed, expected, options):
    check(
        lambda *given: scaled_dot_product_attention(*given, **options),
        tensors(QUERY, KEY, VALUE),
        placed,
        expected,
        most=0,
    )


def test_causal():
    given = tensors((4, 4, 6, 8), (4, 4, 6, 8), (4, 4, 6, 8))
    for placed in (S0, S1, (S0, S1)):
        check(lambda *x: scaled_dot_product_attention(*x, is_causal=True), given, (placed,) * 3, placed, most=0)
    check(lambda *x: scaled_dot_product_attention(*x, is_causal=True), given, (S2,) * 3)


def test_queries_may_be_split_where_each_sees_all_keys():
    given = tensors((4, 4, 8, 8), KEY, VALUE)
    check(scaled_dot_product_attention, given, (S2, R, R), S2, most=0, has_gradients=False)
    check(scaled_dot_product_attention, given, (S2, R, R))
    check(scaled_dot_product_attention, given, (P, R, R))


@pytest.mark.parametrize("shape", [(6, 5), (4, 4, 6, 5), (4, 1, 6, 5), (1, 1, 1, 5)], ids=str)
@pytest.mark.parametrize("placed", [S0, S1, (S0, S1)], ids=str)
def test_masks(shape, placed):
    mask = torch.randn(shape)

    def attend(query, key, value):
        own = mask if type(query) is torch.Tensor else distributed(mask, R if placed in {S0, S1} else (R, R))
        return scaled_dot_product_attention(query, key, value, attn_mask=own)

    check(attend, tensors(QUERY, KEY, VALUE), (placed,) * 3, placed)


@pytest.mark.parametrize("placed", [S0, (S0, S1), (S1, R)], ids=str)
def test_heads_of_keys_for_several_of_queries(placed):
    given = tensors(QUERY, (4, 2, 5, 8), (4, 2, 5, 8))
    attend = lambda *x: scaled_dot_product_attention(*x, enable_gqa=True)  # noqa: E731
    check(attend, given, (placed,) * 3, placed, most=0)


def test_uneven_and_empty_pieces():
    given = tensors((4, 6, 6, 8), (4, 6, 5, 8), (4, 6, 5, 8))
    check(scaled_dot_product_attention, given, ((S1, S0),) * 3, (S1, S0))
    given = tensors((2, 7, 6, 8), (2, 7, 5, 8), (2, 7, 5, 8))
    check(scaled_dot_product_attention, given, (S1,) * 3, S1, most=0)
    check(scaled_dot_product_attention, given, (S0,) * 3)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("_scaled_dot_product_flash_attention", ()),
        ("_scaled_dot_product_efficient_attention", (None, True)),
        ("_scaled_dot_product_cudnn_attention", (None, True)),
    ],
)
@pytest.mark.parametrize("placed", [S0, S1, (S0, S1)], ids=str)
def test_kernels_of_other_devices_follow_the_same_rule(name, options, placed):
    query = distributed(torch.randn(4, 4, 32, 8).to("meta"), placed)
    dispatch.clear()
    out, total, *_ = getattr(torch.ops.aten, name)(query.requires_grad_(), query, query, *options)
    (gradient,) = torch.autograd.grad(out.sum(), query)
    assert gradient.placements == query.placements
    assert out.placements == total.placements == query.placements
    assert out.shape == query.shape
    assert [tuple(one.shape) for one in out.components] == [tuple(one.shape) for one in query.components]
    assert all(one.shape[:2] == other.shape[:2] for one, other in zip(total.components, out.components, strict=True))
    assert "replication" not in {route for _, route in dispatch.counts()}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("_scaled_dot_product_flash_attention", (0.4, True)),
        ("_scaled_dot_product_efficient_attention", (None, True, 0.4, True)),
        ("_scaled_dot_product_cudnn_attention", (None, True, 0.4, True)),
    ],
)
def test_dropout_of_other_devices_does_not_depend_on_the_layout(name, options):
    """Made of matrix products on any device; expected is PyTorch's own formula with the mask that was drawn."""
    values, grad = torch.randn(3, 4, 4, 6, 8), torch.randn(4, 4, 6, 8)
    found = []
    for placed in (R, S0, S1, (S0, S1)):
        given = [distributed(one, placed).requires_grad_() for one in values]
        torch.manual_seed(3)
        out = getattr(torch.ops.aten, name)(*given, *options)[0]
        gradients = torch.autograd.grad(out, given, distributed(grad, placed))
        found.append([one.detach().full_tensor() for one in (out, *gradients)])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
    query, key, value = (one.clone().requires_grad_() for one in values)
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    weights = torch.softmax((query @ key.mT / 8**0.5).masked_fill(hidden, -torch.inf), -1)
    torch.manual_seed(3)
    kept = torch.empty_like(distributed(weights, R)).bernoulli_(0.6).full_tensor() / 0.6
    out = (weights * kept) @ value
    expected = (out, *torch.autograd.grad(out, (query, key, value), grad))
    for one, other in zip(found[0], expected, strict=True):
        torch.testing.assert_close(one, other.detach(), rtol=1e-4, atol=1e-5)


# --- modules of attention in eval mode, which take other paths than in training ---------------------------------------

LINE = abstract_mesh({"x": 4})
SEQUENCES = torch.randn(8, 5, 16)
PADDING = torch.arange(5) >= torch.tensor([5, 3, 4, 1, 5, 2, 3, 5])[:, None]
GAPS = PADDING.flip(1) & (torch.arange(5) != 4)
MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad]


def check_module(plain, call, placement, mode):
    """Compare a module of DTensors with the same of plain tensors; ``call`` gets the module and a way to distribute."""
    plain = plain.eval()
    module = distribute_module(copy.deepcopy(plain), LINE)
    with mode():
        made = call(module, lambda tensor: distribute_tensor(tensor, LINE, [placement]))
        wanted = call(plain, lambda tensor: tensor)
    for one, other in zip(*(each if isinstance(each, tuple) else (each,) for each in (made, wanted)), strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            assert isinstance(one, DTensor)
            torch.testing.assert_close(one.full_tensor(), other, rtol=1e-4, atol=1e-5)


def encoder(*, is_nested=True, norm=None, **options):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, norm=norm, enable_nested_tensor=is_nested)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("placement", [S0, S1, R], ids=str)
@pytest.mark.parametrize("padding", [PADDING, GAPS, PADDING.float() * float("-1e9")], ids=["left", "gaps", "float"])
def test_encoders_of_padded_sequences(mode, placement, padding):
    """PyTorch makes nested tensors of the sequences, in which the padding is zero afterwards."""
    for one in (encoder(), encoder(is_nested=False), encoder(norm=nn.LayerNorm(16))):
        check_module(one, lambda m, d: m(d(SEQUENCES), src_key_padding_mask=d(padding)), placement, mode)
        check_module(one, lambda m, d: m(d(SEQUENCES), src_key_padding_mask=padding), placement, mode)
    check_module(encoder(), lambda m, _: m(SEQUENCES, src_key_padding_mask=padding), placement, mode)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("placement", [S0, R], ids=str)
def test_layers_and_decoders_of_padded_sequences(mode, placement):
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    check_module(layer, lambda m, d: m(d(SEQUENCES)), placement, mode)
    check_module(layer, lambda m, d: m(d(SEQUENCES), src_key_padding_mask=d(PADDING)), placement, mode)
    check_module(layer, lambda m, d: m(d(SEQUENCES), src_mask=causal, is_causal=True), placement, mode)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, batch_first=True), 1)
    masks = {"memory_key_padding_mask": PADDING, "tgt_key_padding_mask": PADDING}
    check_module(
        decoder,
        lambda m, d: m(d(SEQUENCES), d(SEQUENCES * 2), **{name: d(mask) for name, mask in masks.items()}),
        placement,
        mode,
    )
    both = nn.Transformer(16, 4, 1, 1, 32, batch_first=True)
    check_module(both, lambda m, d: m(d(SEQUENCES), d(SEQUENCES), src_key_padding_mask=d(PADDING)), placement, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("placement", [S0, R], ids=str)
def test_attention_of_padded_sequences(mode, placement):
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    for has_weights, is_averaged in product((True, False), repeat=2):
        options = {"need_weights": has_weights, "average_attn_weights": is_averaged}

        def call(module, place, options=options):
            given = place(SEQUENCES)
            return module(given, given, given, key_padding_mask=place(PADDING), **options)

        check_module(attention, call, placement, mode)


def test_encoders_of_plain_sequences_are_compiled_whole():
    plain = encoder(is_nested=False).eval()
    compiled = torch.compile(plain, fullgraph=True, backend="eager")
    given = SEQUENCES, None, PADDING
    torch.testing.assert_close(compiled(*given), plain(*given))
