"""The rules of PyTorch's operators, one module per family. Importing this package fills the tables of `registry`.

===================================  =======================================================================
operators on elements                `pointwise` `copy_fill` `dropout` `random` `foreach`
products                             `matmul` `convolution` `attention` `attention_dropout` `linalg` `fft`
reductions                           `reductions` `minmax` `softmax` `variance_norm` `foreach_norm` `comparison`
normalization and losses             `normalization` `batch_norm` `losses` `nll_loss` `chunked_cross_entropy`
views, and other arrangements        `view` `slicing` `concat_pad` `flip_roll` `triangular`
indices, sorting                     `indexing` `embedding` `scan_sort` `expanded_writes`
images                               `pooling` `vision`
where PyTorch's decomposition fails  `kept_composites` `zero_gradients`
===================================  =======================================================================
"""

from dtckpt.dtensor.operators.rules import (
    as_strided as as_strided,
)
from dtckpt.dtensor.operators.rules import (
    attention as attention,
)
from dtckpt.dtensor.operators.rules import (
    attention_dropout as attention_dropout,
)
from dtckpt.dtensor.operators.rules import (
    batch_norm as batch_norm,
)
from dtckpt.dtensor.operators.rules import (
    chunked_cross_entropy as chunked_cross_entropy,
)
from dtckpt.dtensor.operators.rules import (
    comparison as comparison,
)
from dtckpt.dtensor.operators.rules import (
    concat_pad as concat_pad,
)
from dtckpt.dtensor.operators.rules import (
    convolution as convolution,
)
from dtckpt.dtensor.operators.rules import (
    copy_fill as copy_fill,
)
from dtckpt.dtensor.operators.rules import (
    dropout as dropout,
)
from dtckpt.dtensor.operators.rules import (
    embedding as embedding,
)
from dtckpt.dtensor.operators.rules import (
    expanded_writes as expanded_writes,
)
from dtckpt.dtensor.operators.rules import (
    fft as fft,
)
from dtckpt.dtensor.operators.rules import (
    flip_roll as flip_roll,
)
from dtckpt.dtensor.operators.rules import (
    foreach as foreach,
)
from dtckpt.dtensor.operators.rules import (
    foreach_norm as foreach_norm,
)
from dtckpt.dtensor.operators.rules import (
    indexing as indexing,
)
from dtckpt.dtensor.operators.rules import (
    kept_composites as kept_composites,
)
from dtckpt.dtensor.operators.rules import (
    lazy_copies as lazy_copies,
)
from dtckpt.dtensor.operators.rules import (
    linalg as linalg,
)
from dtckpt.dtensor.operators.rules import (
    losses as losses,
)
from dtckpt.dtensor.operators.rules import (
    matmul as matmul,
)
from dtckpt.dtensor.operators.rules import (
    memory as memory,
)
from dtckpt.dtensor.operators.rules import (
    minmax as minmax,
)
from dtckpt.dtensor.operators.rules import (
    nll_loss as nll_loss,
)
from dtckpt.dtensor.operators.rules import (
    normalization as normalization,
)
from dtckpt.dtensor.operators.rules import (
    pointwise as pointwise,
)
from dtckpt.dtensor.operators.rules import (
    pooling as pooling,
)
from dtckpt.dtensor.operators.rules import (
    random as random,
)
from dtckpt.dtensor.operators.rules import (
    reductions as reductions,
)
from dtckpt.dtensor.operators.rules import (
    scan_sort as scan_sort,
)
from dtckpt.dtensor.operators.rules import (
    slicing as slicing,
)
from dtckpt.dtensor.operators.rules import (
    softmax as softmax,
)
from dtckpt.dtensor.operators.rules import (
    triangular as triangular,
)
from dtckpt.dtensor.operators.rules import (
    variance_norm as variance_norm,
)
from dtckpt.dtensor.operators.rules import (
    view as view,
)
from dtckpt.dtensor.operators.rules import (
    vision as vision,
)
from dtckpt.dtensor.operators.rules import (
    zero_gradients as zero_gradients,
)
