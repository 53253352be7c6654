"""Import what client processes need. The server that forks them imports this module; see `support.forkserver`."""

import gc

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint  # noqa: F401
from checkpoint import client_cases  # noqa: F401

gc.collect()
gc.freeze()  # the clients' collectors would look at what is imported again and again, and copy its pages
