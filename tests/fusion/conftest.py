import pytest
import torch


@pytest.fixture
def fresh_dynamo():
    """Forget compiled code before the test, and check after it that no fusion pass is left installed."""
    from torch._inductor import config

    from isogemm.fusion.inductor import FusionPass

    torch._dynamo.reset()
    yield
    assert not isinstance(config.pre_grad_custom_pass, FusionPass)
