"""The rules of PyTorch's operators, one module per family. Importing this package fills the tables of `registry`.

===================================  =======================================================================
operators on elements                `pointwise` (copies too) `random` (dropout too) `foreach`
products                             `linalg` `convolution` `attention`
reductions                           `reductions` `softmax` `variance_norm`
normalization and losses             `normalization` `batch_norm` `losses`
views, and other arrangements        `view` `slicing` `concat_pad`
indices, sorting                     `indexing` (embedding too) `sorting`
images                               `pooling`
memory                               `memory` (`as_strided` too)
where PyTorch's decomposition fails  `before_autograd`
===================================  =======================================================================
"""

from dtckpt.dtensor.operators.rules import (  # noqa: F401  (to fill the tables)
    attention,
    batch_norm,
    before_autograd,
    concat_pad,
    convolution,
    foreach,
    indexing,
    linalg,
    losses,
    memory,
    normalization,
    pointwise,
    pooling,
    random,
    reductions,
    slicing,
    softmax,
    sorting,
    variance_norm,
    view,
)
