"""Placements, where ``torch.distributed.tensor.placement_types`` has them."""

from dtckpt.layout.placement import Partial, Placement, Replicate, Shard, _StridedShard

__all__ = ["Partial", "Placement", "Replicate", "Shard", "_StridedShard"]
