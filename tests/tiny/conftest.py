from dataclasses import replace

import pytest

from isogemm.core import env
from isogemm.core.eager import KnownCalls
from isogemm.core.plan import Cache
from isogemm.tiny import api, op


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """No earlier test's plans, calls and warnings, and the tiny path on."""
    monkeypatch.setattr(env, "settings", replace(env.settings, disable_tiny=False, log=False))
    monkeypatch.setattr(op, "served", Cache())
    monkeypatch.setattr(api, "_known", KnownCalls())
    monkeypatch.setattr(op, "_warned", set())
