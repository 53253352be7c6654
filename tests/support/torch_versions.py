"""Marks of tests that ask more of PyTorch than checkpoints do."""

from __future__ import annotations

import pytest
import torch

needs_tested_dtensors = pytest.mark.skipif(
    torch.torch_version.TorchVersion(torch.__version__) < "2.11",
    reason="PyTorch before 2.11 has DTensors and meshes that do otherwise; checkpoints alone are tested there",
)
