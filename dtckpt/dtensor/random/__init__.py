"""Random numbers by global element index: every device makes its own part alone, and every layout gives one tensor.

Each random operation has a key, which all clients draw alike from torch's generator (`agreed_key`). An element's bits
are those that Philox4x64-10 gives for the key and the element's row-major index in the global tensor (`fill`), so they
depend neither on the layout nor on the device.
"""

from dtckpt.dtensor.random.distributions import KINDS, integer_bounds
from dtckpt.dtensor.random.fill import fill, permutation
from dtckpt.dtensor.random.keys import agreed_key, draw_key

__all__ = ["KINDS", "agreed_key", "draw_key", "fill", "integer_bounds", "permutation"]
