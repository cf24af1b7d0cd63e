"""Triton's key of itself: its own, computed once per installation and not once per process."""

import functools
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from isogemm.core import compiler_key, env


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setattr(env, "settings", replace(env.settings, cache=tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def process(tmp_path):
    """process(): a new process's module of one Triton's cache, whose key has not been computed yet."""
    root = tmp_path / "triton"
    for name in ("runtime/cache.py", "language/core.py", "_C/libtriton.so", "backends/nvidia/bin/ptxas"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)

    def start():
        module = ModuleType("cache")
        module.__file__ = str(root / "runtime/cache.py")
        module.computed = 0

        def triton_key():
            module.computed += 1
            return f"key of {(root / '_C/libtriton.so').read_text()}"

        module.triton_key = functools.lru_cache(triton_key)
        return module

    return start


def key(module):
    compiler_key.keep(module)
    compiler_key.keep(module)
    return module.triton_key()


def test_it_is_computed_once(process):
    first, second = process(), process()
    assert key(first) == key(second) == "key of _C/libtriton.so"
    assert (first.computed, second.computed) == (1, 0)


def test_another_library_has_another_key(process):
    before, after = process(), process()
    key(before)
    Path(before.__file__, "../../_C/libtriton.so").resolve().write_text("a rebuilt library")
    assert key(after) == "key of a rebuilt library"
    assert after.computed == 1


def test_a_backend_behind_a_link_is_watched(process, tmp_path):
    """An editable Triton links its backends' folders."""
    source = tmp_path / "third_party/backend"
    source.mkdir(parents=True)
    (source / "compiler.py").write_text("first")
    (source / "above").symlink_to(source)
    before, same, after = process(), process(), process()
    Path(before.__file__, "../../backends/linked").resolve().symlink_to(source)
    key(before)
    key(same)
    (source / "compiler.py").write_text("changed")
    key(after)
    assert (before.computed, same.computed, after.computed) == (1, 0, 1)


def test_a_link_to_nothing_is_no_failure(process, folder):
    module = process()
    Path(module.__file__, "../../language/.#core.py").resolve().symlink_to("someone@host")
    assert key(module) == "key of _C/libtriton.so"
    assert not folder.exists()


@pytest.mark.parametrize("damage", [lambda content: content[:-3], lambda content: content.replace(b"key", b"yek")])
def test_a_damaged_file_is_replaced(process, folder, damage):
    key(process())
    (file,) = folder.rglob("*.txt")
    file.write_bytes(damage(file.read_bytes()))
    again, later = process(), process()
    assert key(again) == key(later) == "key of _C/libtriton.so"
    assert (again.computed, later.computed) == (1, 0)


def test_a_folder_that_cannot_be_written(process, folder, monkeypatch):
    folder.write_text("a file")
    assert key(process()) == "key of _C/libtriton.so"
    monkeypatch.setattr(env, "settings", replace(env.settings, cache=Path("~/.cache")))
    monkeypatch.chdir(folder.parent)
    assert key(process()) == "key of _C/libtriton.so"
    assert not Path("~").exists()


def test_what_is_known_already_is_left_alone(process, folder):
    module = process()
    module.triton_key()
    compiler_key.keep(module)
    other = process()
    other.triton_key = lambda: "of another kind"
    assert key(other) == "of another kind"
    assert not folder.exists()


def test_the_installed_triton_s_key_is_its_own():
    cache = pytest.importorskip("triton.runtime.cache")
    modules = []
    for _ in range(2):
        module = ModuleType("cache")
        module.__file__, module.triton_key = cache.__file__, functools.lru_cache(cache.triton_key)
        modules.append(module)
    assert hasattr(cache.triton_key, "cache_info")
    assert key(modules[0]) == key(modules[1]) == cache.triton_key()
    assert modules[0].triton_key.cache_info().misses == 1
    assert not hasattr(modules[1].triton_key, "cache_info")
