"""Programs on several clients whose components have other strides than the global tensor."""

from __future__ import annotations

from typing import Any

import torch
from support.states import cluster_mesh

import dtckpt
from dtckpt import Shard
from dtckpt.dtensor import DTensor, distribute_tensor


def _over_clients(whole: torch.Tensor, dim: int = 0) -> DTensor:
    mesh = cluster_mesh({"x": dtckpt.num_clients()}, dtckpt.num_clients(), dtckpt.client_id())
    return distribute_tensor(whole, mesh, [Shard(dim)])


def strides_on_clients() -> dict[str, Any]:
    """Return what a client finds of a transposed tensor, and whether a write to a contiguous copy leaves it alone."""
    turned = _over_clients(torch.arange(20.0).reshape(4, 5), 1).t() * 2
    before = turned.full_tensor().clone()
    found = {"stride": turned.stride(), "is_contiguous": turned.is_contiguous()}
    turned.contiguous().add_(1)
    return {**found, "is_unchanged": torch.equal(turned.full_tensor(), before)}


def writes_through_views_on_clients() -> list[str]:
    """Write through views, of which some clients hold copies and others memory of the source; return the faults."""
    wrong = []
    views = {
        "bits": lambda x: x.view(torch.int32),
        "flat": lambda x: x.view(-1),
        "real": lambda x: torch.view_as_real(torch.view_as_complex(x)),
        "conjugate": lambda x: torch.view_as_complex(x).conj(),
        "diagonal": lambda x: x.diagonal(),
    }
    for name, view in views.items():
        for is_turned in (False, True):
            whole = torch.arange(10.0).reshape(5, 2).clone()
            ours = _over_clients(whole.clone())
            if is_turned:  # dense, with dims in another order in memory
                whole, ours = whole.t().contiguous().t(), _over_clients(whole.t().contiguous(), 1).t()
            try:
                view(whole).mul_(2)
            except RuntimeError:  # strides that do not allow the view
                continue
            view(ours).mul_(2)
            if not torch.equal(ours.full_tensor(), whole) or ours.stride() != whole.stride():
                wrong.append(f"{name}, turned: {is_turned}")
    return wrong
