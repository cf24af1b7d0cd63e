from dataclasses import replace

import pytest

from isogemm.core import env, tuned


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setattr(env, "settings", replace(env.settings, tuned=True, cache=tmp_path / "cache"))
    tuned._tables.cache_clear()
    yield tmp_path / "cache"
    tuned._tables.cache_clear()
