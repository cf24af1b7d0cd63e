"""A pytest plugin: `-p slicing --slice 2/5` runs every fifth test, from the second on."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--slice", default="1/1", metavar="I/N", help="run every N-th test, from the I-th on")


@pytest.hookimpl(trylast=True)  # of the tests that -m and -k leave
def pytest_collection_modifyitems(config, items):
    number, count = map(int, config.getoption("--slice").split("/"))
    if not 1 <= number <= count:
        raise pytest.UsageError(f"--slice is {number}/{count}; expected I/N with 1 <= I <= N")
    chosen = items[number - 1 :: count]
    left_out = [item for place, item in enumerate(items) if place % count != number - 1]
    config.hook.pytest_deselected(items=left_out)
    items[:] = chosen
