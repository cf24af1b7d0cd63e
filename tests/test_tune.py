"""The tuning command: what it would time, and the tables that it writes. Timing itself needs a GPU."""

from dataclasses import astuple, replace

import pytest

pytest.importorskip("triton")

import tune
from isogemm.core import tables
from isogemm.encoder import configs
from tuners import common, cost, encoder, gemm, tiny


def _options(*arguments):
    return tune._parser().parse_args(arguments)


@pytest.mark.parametrize(
    ("arguments", "count", "said"),
    [
        (
            ("gemm", "--kinds", "linear", "--weights", "1", "--tokens", "1", "64"),
            2,
            "linear half 64 tokens, weight 4096",
        ),
        (("gemm", "--kinds", "dw", "--weights", "0"), 6, "dw half 256 tokens, weight 12288 x 4096"),
        (("tiny", "--numbers", "half", "--layouts", "nn"), 372, "half nn 512 8 8 8"),
        (("encoder", "--launches", "project", "--widths", "64"), 3, "project tf32 64: 45 candidates"),
        (("encoder", "--launches", "attention_backward", "--numbers", "half"), 2, "attention_backward half 64: 54"),
    ],
)
def test_dry_run_lists_what_would_be_timed(arguments, count, said, capsys):
    tune.main([*arguments, "--dry-run", "--gpu", "NVIDIA H200"])
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == count
    assert any(line.startswith(said) for line in lines)
    assert last.startswith(f"{count} points, to ")
    assert last.endswith(f"benchmarks/tuning/h200/{arguments[0]}.jsonl")


@pytest.mark.parametrize("arguments", [(), ("fused",), ("tiny", "--layouts", "tt"), ("encoder", "--widths", "48")])
def test_other_arguments_are_refused(arguments):
    with pytest.raises(SystemExit, match="2"):
        _options(*arguments)


def test_a_table_is_written_and_read_back(tmp_path, monkeypatch, capsys):
    """For all the recorded times of a GPU: those of other GPUs and families do not count."""
    monkeypatch.setattr(common, "ROOT", tmp_path)
    for family in ("encoder", "encoder.attention"):
        common.table_path(family, "sm_90").parent.mkdir(parents=True)
    row = {"launch": "project", "number": "tf32", "width": 64, "now": [64, 64, 4, 1]}
    raw = tmp_path / "benchmarks" / "tuning"
    common.append(raw / "h200" / "encoder.jsonl", row | {"us": {"now": 20.0, "32 64 4 2": 10.0}})
    common.append(raw / "h200" / "encoder_2.jsonl", row | {"us": {"now": 20.0, "64 32 4 2": 10.0}})
    common.append(raw / "h200" / "gemm.jsonl", {"kind": "linear"})
    common.append(raw / "b200" / "encoder.jsonl", row | {"us": {"now": 20.0, "16 16 4 2": 10.0}})
    tune.main(["encoder", "--only", "write", "--gpu", "h200", "--arch", "sm_90"])
    assert "wrote src/isogemm/encoder/tables/sm_90.py" in capsys.readouterr().out
    before, written = dict(tables.load("encoder", "sm_90")), _read(common.table_path("encoder", "sm_90"))
    steps = dict(before["tf32", "project"]) | {64: (64, 32, 4, 2)}
    assert written == before | {("tf32", "project"): tuple(steps.items())}
    assert _read(common.table_path("encoder.attention", "sm_90")) == tables.load("encoder.attention", "sm_90")


def test_points_of_which_no_candidate_is_left_are_in_no_table():
    best, *others = gemm.candidates(gemm.Point("linear", "half", 64, 4096, 4096))[: cost.LEAST_TRIED]
    row = {"kind": "linear", "number": "half", "n": 4096, "k": 4096}
    tried = dict.fromkeys(map(str, others), 10.0)
    rows = [
        row | {"tokens": 64, "us": {"torch": 10.0, str(best): 9.0, "gone": 8.0} | tried},
        row | {"tokens": 32, "us": {"torch": 10.0, str(best): 9.0}},  # of which few were tried
        row | {"tokens": 512, "us": {"torch": 20.0, "gone": 8.0}},
    ]
    (table,) = gemm.tables(rows, "sm_90").values()
    assert table == {("half", "nt", 4096, 4096): ((64, astuple(best)),)}


def _read(path):
    made = {}
    exec(path.read_text(encoding="utf-8"), made)
    return made["TABLE"]


@pytest.mark.parametrize("family", ["encoder.attention", "encoder"])
def test_the_encoder_s_tables_are_as_the_tuner_writes_them(family):
    made = encoder.tables([], "sm_90")[family]
    assert common.source("encoder", "sm_90", made) == common.table_path(family, "sm_90").read_text(encoding="utf-8")


def test_a_candidate_replaces_what_it_clearly_beats():
    near, faster = {"now": 10.0, "16 16 4 1": 9.9}, {"now": 10.0, "32 32 4 1": 11.0, "16 16 4 1": 9.0}
    row = {"launch": "feedforward", "number": "ieee", "width": 128, "now": [16, 16, 8, 1]}
    before = tables.load("encoder", "sm_90")
    assert encoder.tables([row | {"us": near}], "sm_90")["encoder"] == before
    after = encoder.tables([row | {"us": faster}], "sm_90")["encoder"]
    assert dict(after["ieee", "feedforward"])[128] == (16, 16, 4, 1)
    assert {key for key in after if after[key] != before[key]} == {("ieee", "feedforward")}
    again = row | {"now": [16, 16, 4, 1], "us": {"now": 9.0, "32 32 4 1": 11.0}}
    assert encoder.tables([row | {"us": faster}, again], "sm_90")["encoder"] == after


def test_attention_s_blocks_have_their_own_table():
    row = {"launch": "attention_backward", "number": "half", "width": 64, "now": [32, 64, 64, 64, 4, 1]}
    made = encoder.tables([row | {"us": {"now": 9.0, "16 64 64 64 4 1": 8.0}}], "sm_90")
    assert made["encoder"] == tables.load("encoder", "sm_90")
    assert dict(made["encoder.attention"]["half", "backward"])[64] == (16, 64, 64, 64, 4, 1)


@pytest.mark.parametrize(
    ("number", "width", "count", "launches"),
    [("tf32", 64, 0, 0), ("half", 128, 0, 0), ("half", 128, 1, 1), ("half", 64, 2, 2)],
)
def test_the_formulation_says_which_kernels_are_by_warpgroups(number, width, count, launches):
    of = {"number": number, "width": width}
    rows = [
        of | {"launch": "formulation", "now": [9], "us": {"now": 9.0, str(count): 8.0}},
        of | {"launch": "feedforward warpgroup", "now": [4, 32, 2], "us": {"now": 8.0, "8 64 1": 7.0}},
    ]
    made = encoder.tables(rows, "sm_90")["encoder"]
    found = [dict(made.get((number, launch), ())).get(width) for launch in encoder.GROUPS]
    assert [each is not None for each in found] == [place < launches for place in range(4)]
    if launches == 2:
        assert found[1] == (8, 64, 1)
    other = 64 if width == 128 else 128
    now = tables.load("encoder", "sm_90")
    for launch in encoder.GROUPS:
        assert dict(made.get((number, launch), ())).get(other) == dict(now.get((number, launch), ())).get(other)


ALL = encoder.points(_options("encoder", "--arch", "sm_90"))


def test_warpgroups_are_timed_where_there_are_instructions_for_them():
    other = {point.launch for point in encoder.points(_options("encoder", "--arch", "sm_100"))}
    assert {point.launch for point in ALL} == set(encoder.LAUNCHES)
    assert other == {*encoder.ROWS, "weight_grads", *encoder.ATTENTION}


def test_every_entry_of_the_tables_is_a_candidate():
    """So that a sweep of sm_90 may end with the table that it began with."""
    reached = set()
    for point in ALL:
        layer = point.layer("sm_90")
        assert encoder.values_now(point, layer) in encoder.candidates(point), str(point)
        family = "encoder.attention" if point.launch in encoder.ATTENTION else "encoder"
        reached.add((family, point.number, encoder._PASS.get(point.launch, point.launch)))
    for family in ("encoder", "encoder.attention"):
        assert {(family, *key) for key in tables.load(family, "sm_90")} <= reached


@pytest.mark.parametrize("launch", encoder.LAUNCHES)
def test_a_candidate_changes_its_own_launch_alone(launch):
    point = next(each for each in ALL if each.launch == launch and each.width in (64, 128))
    layer = point.layer("sm_90")
    now = encoder.variant(point, layer)
    for values in encoder.candidates(point):
        made = encoder.variant(point, layer, values)
        if launch == encoder.FORMULATION:
            assert made.tiles == now.tiles
            assert sum(getattr(made.groups, name) is not None for name in encoder.ROWS) == values[0]
            continue
        name = launch.removesuffix(" warpgroup")
        if launch in encoder.ATTENTION:
            assert replace(made, **{name: None}) == now
        else:
            part = "groups" if launch in encoder.GROUPS else "tiles"
            back = replace(getattr(made, part), **{name: getattr(getattr(now, part), name)})
            assert replace(made, **{part: back}) == now


def test_tiles_are_timed_by_layers_that_they_serve():
    for point in ALL:
        layer = point.layer("sm_90")
        assert not configs.unserved(layer.tokens, layer.d_model, layer.nhead, layer.operand), str(point)
        assert not layer.fragments, str(point)
        if point.launch in encoder.ATTENTION:
            assert layer.head == point.width
        else:
            assert layer.padded == point.width
        if point.launch in (*encoder.GROUPS, encoder.FORMULATION):
            assert configs.choose_warpgroup(layer).project is not None


def test_the_tiny_model_is_fitted_to_what_is_recorded():
    fitted = tiny.model(_rows_of_tiny(), "sm_90")
    known = tables.load("tiny", "sm_90", "MODEL")
    assert {number: [entry for entry, *_ in menu] for number, menu in fitted.items()} == {
        number: ["torch", *entries] for number, entries in tiny.ENTRIES.items()
    }
    for number, menu in known.items():
        for (_, _, _, found), (_, _, _, expected) in zip(fitted[number], menu, strict=True):
            assert found == pytest.approx(expected, rel=0.01)


def test_nothing_is_fitted_to_the_shapes_that_check_the_model():
    fitted = {(place.m, place.n, place.k) for place, _ in tiny.fitted_samples(_rows_of_tiny(), "sm_90")}
    assert not fitted & {(20, 20, 20), (17, 50, 33), (48, 57, 35)}
    assert {(3, 5, 7), (64, 64, 64)} <= fitted
    assert not {key[2:] for key in tables.load("tiny", "sm_90")} & {(20, 20, 20), (17, 50, 33), (48, 57, 35)}


def test_shapes_left_out_of_the_fit_are_served_well():
    """torch's time over the chosen entry's: at least 0.9, and near the best on average."""
    said = [line for line in tiny.report(_rows_of_tiny(), "sm_90").splitlines() if " all " in line]
    for line, (nearest, least) in zip(said, ((0.88, 0.9), (0.95, 1.0), (0.91, 0.99)), strict=True):
        assert float(line.split("(")[1].split(")")[0]) >= nearest, line
        assert float(line.split()[-1].rstrip("x")) >= least, line


def _rows_of_tiny():
    return common.read(common.raw_files("tiny", "h200"))
