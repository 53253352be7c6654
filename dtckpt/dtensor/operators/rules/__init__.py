"""The rules of PyTorch's operators, one module per family. Importing this package fills the tables of `registry`.

===================================  =======================================================================
operators on elements                `pointwise` (copies too) `random` (dropout too) `foreach`
products                             `linalg` `convolution` (pooling too) `attention`
reductions                           `reductions` `softmax`
normalization and losses             `normalization` `batch_norm` `losses`
views, and other arrangements        `view` `slicing` (``cat`` and padding too)
indices, sorting                     `indexing` (embedding too) `sorting`
memory                               `memory` (`as_strided` too)
where PyTorch's decomposition fails  `before_autograd`
===================================  =======================================================================
"""

from dtckpt.dtensor.operators.rules import (  # noqa: F401  (to fill the tables)
    attention,
    batch_norm,
    before_autograd,
    convolution,
    foreach,
    indexing,
    linalg,
    losses,
    memory,
    normalization,
    pointwise,
    random,
    reductions,
    slicing,
    softmax,
    sorting,
    view,
)
