"""Random tensors that are the same in every layout; each device computes its own component alone.

Each random operation has a key, which all clients draw alike from torch's generator (`agreed_key`). The random bits of
an element are those that Philox4x64-10 gives for the key and the element's row-major index in the global tensor
(`fill`). So they depend neither on the layout nor on the device.
"""

from dtckpt.dtensor.random.distributions import DISTRIBUTIONS, integer_bounds
from dtckpt.dtensor.random.fill_component import fill, permutation
from dtckpt.dtensor.random.keys import agreed_key, draw_key

__all__ = ["DISTRIBUTIONS", "agreed_key", "draw_key", "fill", "integer_bounds", "permutation"]
