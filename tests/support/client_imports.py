"""Import what client processes need. The server that forks them imports this module; see `support.forkserver`."""

import tensorstore  # noqa: F401
import torch.distributed  # noqa: F401

import dtckpt.checkpoint.managing.manager
import dtckpt.coordination.grpc_client
import dtckpt.coordination.torch_store  # noqa: F401
