"""A run of the suite is a function of the code: hypothesis draws the same examples every time."""

import gc

import hypothesis
import pytest

pytest.register_assert_rewrite(
    "attention_cases", "attention_oracle", "attention_parity", "attention_promises", "deferring", "encoder_oracle",
    "encoder_variants", "float16_range", "fused_gpu_cases", "gemm_jobs", "gradients", "graph_fusing", "layouts",
    "loss_cases", "norm_cases", "official_patchtst", "patchtst_models", "promises",
)  # fmt: skip

hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")


def pytest_collection_finish():
    """Take what imports made out of garbage collection: a test that collects then takes a tenth of the time."""
    gc.collect()
    gc.freeze()
