import os

import pytest

from isogemm.testing import require_interpreter


def pytest_collect_file():
    require_interpreter(strict=bool(os.environ.get("CI")))


@pytest.fixture
def interpreted_schedules(monkeypatch):
    """A fused layer's launches one after another in the interpreter."""
    from isogemm.encoder import schedule

    def run(self, addresses, *groups):
        tensors = [each for group in groups for each in group]
        assert addresses == schedule.addresses_of(tensors)
        for step, places in zip(self._steps, self._places, strict=True):
            step.describe().run(*self._arguments(step, places, tensors))

    monkeypatch.setattr(schedule.Schedule, "run", run)
