"""A run of the suite is a function of the code: hypothesis draws the same examples every time."""

import hypothesis
import pytest

pytest.register_assert_rewrite(
    "deferring", "float16_range", "gradients", "graph_fusing", "layouts", "patchtst_models", "promises"
)

hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")
