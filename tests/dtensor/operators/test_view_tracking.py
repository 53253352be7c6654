"""A view whose values had to move follows its source, and the source follows the view."""

import pytest
import torch

from .operator_checks import S0, S1, P, R, distributed


def test_views_stay_what_they_are_when_their_source_is_turned_in_place():
    whole = torch.arange(24.0).reshape(4, 6)
    ours = distributed(whole, S0)
    for one in (whole, ours):
        one.row = one[1]
        one.part = one[1:3]
        one.t_()
        one.add_(1)
        one.unsqueeze_(0)
        one.row.mul_(2)
        one.part[0].sub_(1)
    assert ours.shape == whole.shape
    assert torch.equal(ours.full_tensor(), whole)
    assert torch.equal(ours.row.full_tensor(), whole.row)
    assert torch.equal(ours.part.full_tensor(), whole.part)


def test_views_reshaped_in_place_go_on_following():
    whole = torch.arange(24.0).reshape(4, 6)
    ours = distributed(whole, S0)
    for one in (whole, ours):
        one.view_ = one[1:3]
        one.view_.t_()
        one.view_.squeeze_()
        one.add_(1)
        one.view_[0].zero_()
    assert torch.equal(ours.view_.full_tensor(), whole.view_)
    assert torch.equal(ours.full_tensor(), whole)


def test_tensors_without_elements_go_on_waiting():
    assert distributed(torch.zeros(0, 3), P).detach().placements == (P,)


def test_writes_to_views_reach_their_source_in_inference_mode_too():
    with torch.inference_mode():
        whole = torch.arange(24.0).reshape(4, 6)
        ours = distributed(whole, S0)
        for one in (whole, ours):
            one[1].add_(5)
        assert torch.equal(ours.full_tensor(), whole)


@pytest.mark.parametrize("placement", [R, S0, S1, P], ids=str)
def test_views_in_inference_mode(placement):
    """Views are inference tensors where their source is one, as with plain tensors."""
    plain = torch.arange(24.0).reshape(6, 4)
    whole, ours = torch.nn.Parameter(plain.clone()), torch.nn.Parameter(distributed(plain, placement))
    with torch.inference_mode():
        for view in (lambda x: x[1:4], lambda x: x.t(), lambda x: x.view(-1), lambda x: x.chunk(2)[1], torch.detach):
            found, wanted = view(ours), view(whole)
            assert torch.equal(found.full_tensor(), wanted)
            assert (found.is_inference(), found.requires_grad) == (wanted.is_inference(), wanted.requires_grad)
            assert view(ours * 2).is_inference()
        assert torch.equal((ours.t() @ ours).full_tensor(), whole.t() @ whole)
        for one in (whole, ours):
            one[1:3].add_(1)
    assert torch.equal(ours.full_tensor(), whole)
    for one in (whole, ours):
        one[2:].square().sum().backward()
    assert torch.equal(ours.grad.full_tensor(), whole.grad)
