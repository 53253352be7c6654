"""``one_hot``: PyTorch compares the classes of a DTensor, and the result is contiguous as where it writes ones."""

from __future__ import annotations

from typing import Any

import torch

from dtckpt.dtensor.operators.call import Operator
from dtckpt.dtensor.operators.pre_autograd import before_autograd


@before_autograd(torch.ops.aten.one_hot.default)
def _one_hot(operator: Operator, keys: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    del keys
    result: torch.Tensor = operator.decompose(*args, **kwargs).contiguous()
    return result
