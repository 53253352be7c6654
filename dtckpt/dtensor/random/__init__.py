"""Random tensors with equal values in every layout; each device computes its own component alone.

Each random operation has a key, which is equal on all clients and comes from torch's generator (`agreed_key`).
Philox4x64-10 computes the random bits of an element from the key and the element's row-major index in the global tensor
(`fill`). So they depend neither on the layout nor on the device.
"""

from dtckpt.dtensor.random.distributions import DISTRIBUTIONS, integer_bounds
from dtckpt.dtensor.random.fill_component import fill, permutation
from dtckpt.dtensor.random.keys import agreed_key, draw_key

__all__ = ["DISTRIBUTIONS", "agreed_key", "draw_key", "fill", "integer_bounds", "permutation"]
