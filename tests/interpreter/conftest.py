import os

from isogemm.testing import require_interpreter


def pytest_collect_file():
    require_interpreter(strict=bool(os.environ.get("CI")))
