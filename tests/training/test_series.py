from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from isogemm.training.series import Series, SeriesError, cut, read_csv, synthetic, synthetic_rows
from isogemm_options import PRESETS

GOOD = (
    "date,load,oil temperature\n2016-07-01 00:00:00,5.5,30\n2016-07-01 01:00:00,-6e-1, 31.25\n2016-07-01 02:00:00,0,1\n"
)

Write = Callable[[str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str | bytes) -> Path:
        path = tmp_path / "series.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        GOOD.replace("\n", "\r\n"),
        "\ufeff" + GOOD,
        GOOD + "\n\n",
        GOOD.rstrip(),
        GOOD.replace(" 0", "T0"),
        GOOD.replace("2016-07-01 0", "2016/7/1 ").replace(":00:00", ":00"),
        GOOD.replace("load", '"load"').replace("5.5", '"5.5"'),
    ],
    ids=["plain", "crlf", "bom", "blank lines at the end", "no last newline", "T", "slashes", "quotes"],
)
def test_files_that_are_read(text, write):
    read = read_csv(write(text))
    assert read.channels == ("load", "oil temperature")
    assert read.values.tolist() == [[5.5, 30.0], [-0.6, 31.25], [0.0, 1.0]]


def changed(line: int, text: str) -> str:
    """The good file with another line, counted from 1."""
    lines = GOOD.splitlines()
    lines[line - 1] = text
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: empty"),
        ("\n" + GOOD, "line 1: empty"),
        ("date\n2016-07-01\n", "line 1: no channels"),
        (GOOD.replace(",", ";"), "line 1: no channels"),
        (changed(1, "date,load,load"), "line 1, column 3: 'load' is the name of another one too"),
        (changed(1, "date,load,"), "line 1, column 3: without a name"),
        (GOOD.partition("\n")[2], "line 1: numbers where the header is expected"),
        (GOOD.partition("\n")[0], "line 2: no rows"),
        (changed(3, "2016-07-01 01:00:00,5.5,"), "line 3, column 'oil temperature': is missing"),
        (changed(3, "2016-07-01 01:00:00,  ,30"), "line 3, column 'load': is missing"),
        (changed(4, "2016-07-01 02:00:00,NA,30"), "line 4, column 'load': is missing"),
        (changed(3, "2016-07-01 01:00:00,5.5,warm"), "line 3, column 'oil temperature': 'warm' is not a number"),
        (changed(3, "2016-07-01 01:00:00,1_0,30"), "line 3, column 'load': '1_0' is not a number"),
        (changed(3, "2016-07-01 01:00:00,nan,30"), "line 3, column 'load': 'nan' is not finite"),
        (changed(2, "2016-07-01 00:00:00,5.5,-inf"), "line 2, column 'oil temperature': '-inf' is not finite"),
        (changed(2, "2016-07-01 00:00:00,1e999,0"), "line 2, column 'load': '1e999' is not finite"),
        (changed(3, "2016-07-01 01:00:00,5.5"), "line 3: 2 columns; expected 3"),
        (changed(3, "2016-07-01 01:00:00,5.5,30,1"), "line 3: 4 columns; expected 3"),
        (changed(3, ""), "line 3: empty, though lines follow"),
        (changed(3, "yesterday,5.5,30"), "line 3, column 'date': 'yesterday' is no date"),
        (changed(3, ",5.5,30"), "line 3, column 'date': is missing"),
        (changed(3, "2016-07-01 00:00:00,5.5,30"), "line 3, column 'date': '2016-07-01 00:00:00' is the date of"),
        (changed(3, "2015-07-01 00:00:00,5.5,30"), "line 3, column 'date': '2015-07-01 00:00:00' is before"),
        (
            changed(3, "2016-07-01 01:00:00+02:00,5.5,30"),
            "line 3, column 'date': '2016-07-01 01:00:00+02:00': an offset",
        ),
        (changed(3, '2016-07-01 01:00:00,"5.5,30'), "line 3: unexpected end of data"),
        (changed(3, '2016-07-01 01:00:00,"cold\n",30'), "line 3, column 'load': 'cold' is not a number"),
        (GOOD.encode().replace(b"30", b"\xff30"), "line 2, column 'oil temperature': '\ufffd30' is not a number"),
    ],
)
def test_broken_files_name_line_and_column(text, message, write):
    path = write(text)
    with pytest.raises(SeriesError) as error:
        read_csv(path)
    assert str(error.value).startswith(f"{path}, {message}")


@pytest.mark.parametrize(("rows", "inputs", "horizon"), [(100, 12, 5), (101, 30, 10), (60, 1, 1)])
def test_windows_are_those_of_a_loop(rows, inputs, horizon):
    series = synthetic(rows, 3)
    made = cut(series, inputs, horizon)
    train, test = int(rows * 0.7), int(rows * 0.2)
    first, last = series.values[:train], rows - test
    scaled = ((series.values - first.mean(0)) / first.std(0, unbiased=False)).float()
    spans = {"train": (0, train), "val": (train - inputs, last), "test": (last - inputs, rows)}
    for name, (begin, end) in spans.items():
        expected = [scaled[at : at + inputs + horizon].T for at in range(begin, end - inputs - horizon + 1)]
        part = getattr(made, name)
        found = made.all[part.first : part.first + part.count]
        assert torch.equal(found, torch.stack(expected))


def test_the_shortest_series_and_one_row_less():
    made = cut(synthetic(50, 1), inputs=24, horizon=5)
    assert (made.train.count, made.val.count, made.test.count) == (7, 1, 6)
    with pytest.raises(SeriesError, match=r"its 40 rows leave no window of 4 \+ 5 rows in the val part; 41 rows"):
        cut(synthetic(40, 1), inputs=4, horizon=5)
    with pytest.raises(SeriesError, match=r"its 3 rows leave no window .* train part; 42 rows"):
        cut(synthetic(3, 1), inputs=24, horizon=5)


@pytest.mark.parametrize("value", [0.0, 0.1, -1e6])
def test_a_constant_channel_becomes_zeros(value):
    made = cut(Series("flat", ("a",), torch.full((100, 1), value, dtype=torch.float64)), 4, 2)
    assert not made.values.abs().max() > 1e-6


@pytest.mark.parametrize("value", [1e20, 1e30, -1e300])
def test_a_large_constant_channel_becomes_zeros(value):
    """A mean of many values has a rounding, which of these is large itself."""
    series = Series("large", ("flat",), torch.full((300, 1), value, dtype=torch.float64))
    assert not cut(series, 8, 4).values.any()


@pytest.mark.parametrize("size", [1e-200, 1e-300, 1e153, 1e200])
def test_channels_of_any_size_are_scaled_alike(size):
    """Where squares under- or overflow, too."""
    values = torch.randn(300, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    right, found = (cut(Series("s", ("a", "b"), values * each), 8, 4) for each in (1.0, size))
    torch.testing.assert_close(found.values, right.values, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.std / size, right.std, rtol=1e-12, atol=0)


@pytest.mark.parametrize("value", [1e10, -1e20, 1e100, 1e154, -1e155, 1e200])
def test_a_value_beside_which_nothing_is_left_is_named(value):
    values = torch.randn(300, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    values[20, 1] = value
    with pytest.raises(SeriesError, match=r"s, row 21, column 'b': .* is so far from .* cannot tell those apart"):
        cut(Series("s", ("a", "b"), values), 8, 4)
    values[120, 1] = value  # twice
    with pytest.raises(SeriesError, match=r"s, row (21|121), column 'b': .* is so far from "):
        cut(Series("s", ("a", "b"), values), 8, 4)
    values[20, 1] = values[120, 1] = 1e6  # large, and something is
    assert len(cut(Series("s", ("a", "b"), values), 8, 4).values[1, :200].unique()) > 100


@pytest.mark.parametrize("rare", [[1.0], [1.0, 1e-9], [3.2, 1e-12], [1e30], [1e-30]])
def test_channels_of_few_values_are_trained_on(rare):
    """Flags, mostly 0: what is lost beside 1 is little."""
    values = torch.zeros(300, 1, dtype=torch.float64)
    values[50 : 50 + len(rare), 0] = torch.tensor(rare, dtype=torch.float64)
    assert cut(Series("s", ("flag",), values), 8, 4).values.unique().numel() >= 2


def test_values_whose_differences_overflow_are_named():
    values = torch.tensor([1.7e308, -1.7e308], dtype=torch.float64).repeat(150)[:, None]
    with pytest.raises(SeriesError, match=r"'a': -?1\.7e\+308 is too large"):
        cut(Series("s", ("a",), values), 8, 4)


def test_what_float32_cannot_hold_is_named():
    values = synthetic(100, 2).values
    values[90, 1] = 1e300
    with pytest.raises(SeriesError, match=r"row 91, column 'b': 1e\+300 is out of range"):
        cut(Series("wild", ("a", "b"), values), 4, 2)


def test_synthetic_series_are_reproducible_and_their_own():
    one, again, other = synthetic(50, 3), synthetic(50, 3), synthetic(50, 3, seed=1)
    assert one.fingerprint == again.fingerprint != other.fingerprint
    assert torch.equal(one.values, again.values)


@pytest.mark.parametrize(("train_windows", "window"), [(28_000, 48), (1, 2), (999, 432)])
def test_rows_for_so_many_windows(train_windows, window):
    rows = synthetic_rows(train_windows, window)
    assert rows * 7 // 10 - window + 1 == train_windows


def test_the_reference_has_as_many_windows_as_it_says():
    reference = PRESETS["reference"]
    assert reference.rows == synthetic_rows(28_000, reference.config.model.inputs + reference.config.model.horizon)
