import pytest

from isogemm.verify import trials


@pytest.fixture(autouse=True)
def trials_on_one_thread(monkeypatch):
    """Checks on the CPU: more threads than cores are free mostly wait. Tests of the CPU backends have them all."""
    monkeypatch.setattr(trials, "THREADS", (1,) * len(trials.THREADS))
