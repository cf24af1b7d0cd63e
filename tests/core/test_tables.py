"""The loader of measured configurations: a new architecture is one new file per family."""

import importlib
import sys
from dataclasses import replace

import pytest

from isogemm.core import tables
from isogemm.encoder import configs as encoder
from isogemm.encoder.attention import configs as attention
from isogemm.gemm import configs as gemm
from isogemm.gemm import selection
from isogemm.tiny import configs as tiny

FAMILIES = ("encoder.attention", "encoder", "gemm", "tiny")
GEMM = gemm.Problem(64, 4096, 4096, "bfloat16", "bfloat16", "ieee", (4096, 1), (1, 4096), (4096, 1))
TINY = tiny.Problem(512, 8, 8, 8, "bfloat16", "ieee", (64, 8, 1), (64, 8, 1))
LAYER = encoder.Layer(
    3, 42, 128, 4, 256, "bfloat16", "bfloat16", "bfloat16", "", "layer_norm", True, "gelu", False, "", (0, 0), True,
    wgmma=True,
)  # fmt: skip
ATTENTION = attention.Attention(3, 42, 4, 32, "bfloat16", "ieee", (384, 384, 384))


def clear():
    for cached in (tables.architectures, tables.load, selection._tables, selection._menu, selection._modelled):
        cached.cache_clear()


@pytest.fixture
def add_table(tmp_path, monkeypatch):
    """Adds a module <arch>.py to a family's tables, as a file in the package would be."""
    added = []

    def add(family, arch, table):
        package = importlib.import_module(f"isogemm.{family}.tables")
        folder = tmp_path / family
        folder.mkdir(exist_ok=True)
        (folder / f"{arch}.py").write_text(f"TABLE = {dict(table)!r}\n")
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
        added.append(f"isogemm.{family}.tables.{arch}")
        importlib.invalidate_caches()
        clear()

    yield add
    monkeypatch.undo()
    for name in added:
        sys.modules.pop(name, None)
    clear()


def changed(family, key, config):
    """sm_90's table with one config at every step of a key."""
    table = dict(tables.load(family, "sm_90"))
    return table | {key: tuple((most, config) for most, _ in table[key])}


def choices(arch):
    of_layer, of_attention = replace(LAYER, arch=arch), replace(ATTENTION, arch=arch)
    return {
        "gemm": selection.choose(replace(GEMM, arch=arch)).config,
        "tiny": tiny.gate(replace(TINY, arch=arch)),
        "encoder": (encoder.choose(of_layer), encoder.choose_warpgroup(of_layer)),
        "encoder.attention": attention.choose(of_attention),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_architecture_is_one_new_file(family, add_table):
    before, known = choices("sm_95"), choices("sm_90")
    key, config = {
        "gemm": (("half", "nt", 4096, 4096), (64, 32, 64, 4, 3, "pointer", True)),
        "tiny": (("half", "nn", 8, 8, 8), "dot"),
        "encoder": (("half", "input_grad"), (16, 16, 4, 3)),
        "encoder.attention": (("half", "forward"), (16, 16, 32, 16, 8, 3)),
    }[family]
    add_table(family, "sm_95", changed(family, key, config))
    after = choices("sm_95")
    expected = {
        "gemm": lambda: gemm.Config(*config),
        "tiny": lambda: config,
        "encoder": lambda: (replace(known["encoder"][0], input_grad=encoder.RowConfig(*config)), known["encoder"][1]),
        "encoder.attention": lambda: attention.DotConfig(*config),
    }[family]()
    assert after == before | {family: expected}
    assert after[family] != before[family]
    assert choices("sm_90") == known
    assert tables.measured(family, "sm_95")


@pytest.mark.parametrize(
    ("arch", "nearest"),
    [
        ("sm_90", "sm_90"),
        ("sm_80", "sm_80"),
        ("sm_86", "sm_80"),
        ("sm_89", "sm_90"),
        ("sm_100", "sm_90"),
        ("sm_120", "sm_90"),
        ("gfx942", "gfx90a"),
        ("gfx950", "gfx90a"),
        ("cpu", "sm_80"),  # no vendor: any table will do
    ],
)
def test_the_nearest_architecture_of_the_vendor_serves(arch, nearest, add_table):
    for name in ("sm_80", "gfx90a"):
        add_table("encoder", name, {("table", name): ((1, (1,)),)})
    assert tables.architectures("encoder") == ("gfx90a", "sm_80", "sm_90")
    found = tables.load("encoder", arch)
    assert found is tables.load("encoder", nearest)
    assert not tables.measured("encoder", "sm_86")


def test_another_vendor_s_table_serves_where_there_is_no_other():
    for family in FAMILIES:
        assert tables.load(family, "gfx942") is tables.load(family, "sm_90")


def test_gemm_takes_defaults_where_nothing_was_measured():
    assert selection.choose(replace(GEMM, arch="sm_100")).source == "default"
    assert selection.choose(GEMM).source == "table"


@pytest.mark.parametrize("family", FAMILIES)
def test_tables_have_the_stated_format(family):
    for arch in tables.architectures(family):
        for key, steps in tables.load(family, arch).items():
            assert all(isinstance(each, (str, int)) for each in key)
            sizes = [most for most, _ in steps]
            assert sizes
            assert sizes == sorted(set(sizes))


def test_at_takes_the_next_larger_step():
    steps = ((8, "a"), (16, "b"))
    assert [tables.at(steps, size) for size in (1, 8, 9, 16)] == ["a", "a", "b", "b"]
    with pytest.raises(LookupError, match="size 17 is past the last step, 16"):
        tables.at(steps, 17)
