import pytest

from isogemm.core import env


@pytest.mark.parametrize(("name", "field"), [("ISOGEMM_DISABLE_TINY", "disable_tiny"), ("ISOGEMM_LOG", "log")])
def test_flags(name, field, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    assert not getattr(env.read(), field)
    for value in ("1", "true", "On", " yes "):
        monkeypatch.setenv(name, value)
        assert getattr(env.read(), field)
    for value in ("0", "false", "OFF", "no", ""):
        monkeypatch.setenv(name, value)
        assert not getattr(env.read(), field)


def test_bad_value_names_the_variable_and_what_is_accepted(monkeypatch):
    monkeypatch.setenv("ISOGEMM_LOG", "maybe")
    with pytest.raises(ValueError, match="ISOGEMM_LOG is 'maybe'; accepted: 1 or 0"):
        env.read()
