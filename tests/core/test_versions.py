import tomllib
from pathlib import Path

import pytest

from isogemm.core import versions


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_bounds_of_the_package_are_the_tested_releases(package):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (bounds,) = (each for each in project["dependencies"] if each.startswith(package))
    tested = getattr(versions, package.upper())
    first, last = (version.split(".") for version in (tested[0], tested[-1]))
    assert bounds.partition(";")[0] == f"{package}>={first[0]}.{first[1]},<{last[0]}.{int(last[1]) + 1}"


@pytest.mark.parametrize(
    ("package", "version", "is_newer"),
    [
        ("torch", "2.11.0+cu130", False),
        ("torch", "2.15.0", False),
        ("torch", "2.15.9+cpu", False),
        ("torch", "2.16.0a0+git123", True),
        ("torch", "3.0", True),
        ("triton", "3.9.1", False),
        ("triton", "3.10.0", True),
        ("triton", "none", False),
    ],
)
def test_newer_releases_are_named(package, version, is_newer):
    said = versions.untested(package, version)
    assert bool(said) == is_newer
    assert not said or (said.startswith(f"{package} {version} is newer than ") and "isogemm verify" in said)
