import pytest

from .preloaded_clients import PreloadedPool

MODULES = (
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "lightning.pytorch",
    "transformers.trainer",
    "transformers.models.llama.modeling_llama",
    "accelerate",
)


@pytest.fixture(scope="session")
def framework_pool():
    """Client processes that have imported the frameworks, which takes ten seconds of the processor."""
    with PreloadedPool(MODULES, clients=4) as started:
        yield started
