import sys
from pathlib import Path

import pytest

from isogemm.core import env


@pytest.mark.parametrize(
    ("name", "field", "default"),
    [("ISOGEMM_DISABLE_TINY", "disable_tiny", False), ("ISOGEMM_LOG", "log", False), ("ISOGEMM_TUNED", "tuned", True)],
)
def test_flags(name, field, default, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    assert getattr(env.read(), field) is default
    monkeypatch.setenv(name, " ")
    assert getattr(env.read(), field) is default
    for value in ("1", "true", "On", " yes "):
        monkeypatch.setenv(name, value)
        assert getattr(env.read(), field) is True
    for value in ("0", "false", "OFF", "no"):
        monkeypatch.setenv(name, value)
        assert getattr(env.read(), field) is False


def test_bad_value_names_the_variable_and_what_is_accepted(monkeypatch):
    monkeypatch.setenv("ISOGEMM_LOG", "maybe")
    with pytest.raises(ValueError, match="ISOGEMM_LOG is 'maybe'; accepted: 1 or 0"):
        env.read()


@pytest.mark.parametrize(
    ("platform", "expected"), [("linux", "/home/me/.cache"), ("darwin", "/home/me/Library/Caches"), ("win32", "/local")]
)
def test_the_cache_folder(platform, expected, monkeypatch):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert env.read().cache == Path(expected)
    monkeypatch.setenv("XDG_CACHE_HOME", "~/given")
    assert env.read().cache == Path("/home/me/given")


@pytest.mark.parametrize("given", ["", "relative", "./cache", "~no-such-user/cache"])
def test_a_relative_cache_folder_is_ignored(given, monkeypatch):
    """Else each working directory had one of its own."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    assert env.read().cache == Path("/home/me/.cache")


def test_a_user_without_a_home(monkeypatch):
    """As in a container with a user that no one knows: the import works all the same."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert env.read().cache.name in (".cache", "Caches")
