from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from figures import tables
from isogemm.bench.store import Row
from isogemm.bench.views import FamilyView

VIEW = FamilyView("tiny", "Tiny batched GEMM", ("m", "n", "k"))


@pytest.fixture
def rows(make_row: Callable[..., Row], ceiling_rows: list[Row]) -> list[Row]:
    cpu = {"isogemm": [30.0], "torch": [20.0]}
    return [
        *ceiling_rows,
        make_row(1024, (12, 12, 64), us=8.6016, ratio=8.0, cache="cold", cpu=cpu),
        make_row(256, (12, 12, 64), us=4.0, ratio=2.0, cache="cold"),
        make_row(1024, (64, 64, 64), us=100.0, ratio=0.5, cache="cold"),
        make_row(256, (8, 8, 8), us=2.0, ratio=3.0, cache="hot"),
    ]


def test_headline(rows: list[Row]) -> None:
    # 64x64x64 is bound by arithmetic under these ceilings, so it is no measure of bandwidth.
    assert tables.tables(rows, [VIEW])["tiny-headline"] == (
        "GPU X: torch 2.11.0, triton 3.6.0, driver 1.2, commit 0123456789ab, 2026-01-02.\n"
        "\n"
        "|  | points | geomean | min | max | of copy bandwidth, median (range) | CPU time per call |\n"
        "| :-- | --: | --: | --: | --: | --: | --: |\n"
        "| bmm, fp32 ieee, cold | 3 | 2.00x | 0.50x | 8.00x | 80% at batch 1024 | 1.50x at batch 1024 |\n"
        "| bmm, fp32 ieee, hot | 1 | 3.00x | 3.00x | 3.00x | 10% at batch 256 |  |\n"
    )


def test_speedup_by_shape_and_batch(rows: list[Row]) -> None:
    assert tables.tables(rows, [VIEW])["tiny-speedup"] == (
        "GPU X: torch 2.11.0, triton 3.6.0, driver 1.2, commit 0123456789ab, 2026-01-02.\n"
        "\n"
        "**bmm, fp32 ieee, cold**\n"
        "\n"
        "| m x n x k | batch 256 | batch 1024 |\n"
        "| :-- | --: | --: |\n"
        "| 12x12x64 | 2.00x | 8.00x |\n"
        "| 64x64x64 |  | 0.50x |\n"
        "\n"
        "**bmm, fp32 ieee, hot**\n"
        "\n"
        "| m x n x k | batch 256 |\n"
        "| :-- | --: |\n"
        "| 8x8x8 | 3.00x |\n"
    )


def test_ceilings(rows: list[Row]) -> None:
    assert tables.tables(rows)["ceilings"] == (
        "|  | copy, read + write | mm fp32 ieee |\n| :-- | --: | --: |\n| GPU X | 1000 GB/s | 10 TFLOP/s |\n"
    )


def test_devices_and_commits_are_told_apart(make_row: Callable[..., Row]) -> None:
    other = {"gpu": "GPU Y", "commit": "fedcba987654", "date": "2026-03-04T00:00:00Z"}
    rows = [make_row(), make_row(1024, env={"commit": "aaaaaaaaaaaa", "date": "2026-02-02T00:00:00Z"})]
    text = tables.tables([*rows, make_row(ratio=3.0, env=other)], [VIEW])["tiny-speedup"]
    assert "GPU X: torch 2.11.0, triton 3.6.0, driver 1.2, commit 0123456789ab and aaaaaaaaaaaa, " in text
    assert ", 2026-01-02 to 2026-02-02." in text
    assert "GPU Y: torch 2.11.0, triton 3.6.0, driver 1.2, commit fedcba987654, 2026-03-04." in text


def test_peers_stand_beside_isogemm(make_row: Callable[..., Row]) -> None:
    rows = [make_row(256, peer=0.5), make_row(1024, peer=0.125), make_row(256, cache="hot")]
    made = tables.tables(rows, [VIEW])
    assert made["tiny-headline"].endswith(
        "|  | points | geomean | min | max | fixed tile, geomean (min) |\n"
        "| :-- | --: | --: | --: | --: | --: |\n"
        "| bmm, fp32 ieee | 2 | 2.00x | 2.00x | 2.00x | 0.25x (0.12x) |\n"
        "| bmm, fp32 ieee, hot | 1 | 2.00x | 2.00x | 2.00x |  |\n"
    )
    assert made["tiny-fixed-tile"].endswith(
        "**bmm, fp32 ieee**\n\n"
        "| m x n x k | batch 256 | batch 1024 |\n| :-- | --: | --: |\n| 12x12x64 | 0.50x | 0.12x |\n"
    )


def test_errors_are_the_largest_of_a_group(make_row: Callable[..., Row]) -> None:
    rows = [make_row(256), replace(make_row(1024), error={"isogemm": 3e-7, "torch": 1e-7}), make_row(cache="hot")]
    assert tables.tables(rows, [VIEW])["tiny-errors"].endswith(
        "|  | isogemm | torch |\n| :-- | --: | --: |\n"
        "| bmm, fp32 ieee | 3.0e-07 | 2.5e-07 |\n"
        "| bmm, fp32 ieee, hot | 1.5e-07 | 2.5e-07 |\n"
    )


def test_a_column_other_than_the_batch(make_row: Callable[..., Row], ceiling_rows: list[Row]) -> None:
    view = FamilyView("tiny", "GEMM", ("n", "k"), column="m")
    rows = [make_row(1, (m, 64, 32), cpu={"isogemm": [30.0], "torch": [20.0 + m]}) for m in (10, 2)]
    made = tables.tables([*ceiling_rows, *rows], [view])
    assert "| n x k | m 2 | m 10 |\n| :-- | --: | --: |\n| 64x32 | 2.00x | 2.00x |" in made["tiny-speedup"]
    assert " at m 10 | 1.36x at m 2 |" in made["tiny-headline"]


@pytest.fixture
def fused_rows(make_row: Callable[..., Row]) -> list[Row]:
    """Two epilogues, an mlp with its memory, and what deferring costs."""

    def row(op: str, m: int, info: dict[str, str], cpu: dict[str, list[float]] | None = None, **us: float) -> Row:
        named = {name.replace("_", " "): [each] for name, each in us.items()}
        params = {"m": m, "n": 64, "k": 32, "dtype": "bfloat16"}
        made = replace(make_row(), family="fused", op=op, params=params, info=info, times_us=named)
        return replace(made, cpu_us=cpu or {})

    fused_call = {"torch call": "_addmm_activation"}
    host = {"isogemm": [60.0], "torch": [45.0], "fused calls": [30.0]}
    return [
        row("bias relu", 512, fused_call, isogemm=10.0, torch=10.0, eager=20.0, plain=9.5),
        row("bias relu", 1, fused_call, isogemm=10.0, torch=40.0, eager=5.0),
        row("mlp gelu", 512, {"isogemm peak MiB": "300", "torch peak MiB": "400"}, isogemm=10.0, torch=12.0),
        row("autofuse", 1, {"torch call": "relu", "deferred": "6"}, host, isogemm=4.0, torch=8.0, fused_calls=4.0),
    ]


FUSED = FamilyView("fused", "Fused epilogues", ("m", "n", "k"), column="m", against=True)


def test_rivals_are_what_isogemm_is_measured_against(fused_rows: list[Row]) -> None:
    made = tables.tables(fused_rows, [FUSED])
    assert made["fused-headline"].endswith(
        "|  | torch's call | points | geomean | min | max | over eager, geomean (min) | over plain, geomean (min) "
        "| over fused calls, geomean (min) | peak memory | CPU time per call |\n"
        "| :-- | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: |\n"
        "| bias relu, bf16 | _addmm_activation | 2 | 2.00x | 1.00x | 4.00x | 1.00x (0.50x) | 0.95x (0.95x) |  |  |  |\n"
        "| mlp gelu, bf16 |  | 1 | 1.20x | 1.20x | 1.20x |  |  |  | 0.75x |  |\n"
        "| autofuse, bf16 | relu | 1 | 2.00x | 2.00x | 2.00x |  |  | 1.00x (1.00x) |  | 1.33x at m 1 |\n"
    )
    assert (
        "**bias relu, bf16**\n\n"
        "| m x n x k | over torch | over eager | over plain |\n"
        "| :-- | --: | --: | --: |\n"
        "| 512x64x32 | 1.00x | 2.00x | 0.95x |\n"
        "| 1x64x32 | 4.00x | 0.50x |  |\n"
    ) in made["fused-speedup"]
    assert not {"fused-eager", "fused-plain"} & made.keys()


def test_what_deferring_costs(fused_rows: list[Row]) -> None:
    assert tables.tables(fused_rows, [FUSED])["fused-deferred"].endswith(
        "| relu, bf16 | 60.0 us | 45.0 us | 30.0 us | 2.5 us | 5.0 us |\n"
    )
    on_a_cpu = [replace(row, cpu_us={}) for row in fused_rows]  # where a call ends when its work does
    assert tables.tables(on_a_cpu, [FUSED])["fused-deferred"].endswith(
        "| relu, bf16 | 4.0 us | 8.0 us | 4.0 us | -0.7 us | 0.0 us |\n"
    )
    assert "fused-deferred" not in tables.tables(fused_rows[:3], [FUSED])


STEPS = FamilyView("encoder", "Encoder layer", ("layers", "tokens"), against=True, steps=True)


def test_training_steps_have_times_memory_and_their_arithmetic(step_rows: list[Row], ceiling_rows: list[Row]) -> None:
    assert tables.tables([*step_rows, *ceiling_rows], [STEPS])["encoder-steps"].endswith(
        "**training step, fp32 ieee**\n\n"
        "| layers x tokens | isogemm, ms | isogemm eager, ms | torch.compile + graph, ms | torch eager, ms "
        "| over torch.compile + graph | isogemm eager over torch.compile + graph | over torch eager "
        "| peak MiB | of torch.compile + graph's | of torch eager's | kept, bytes a token and layer "
        "| arithmetic, ms | times its arithmetic |\n"
        "| :-- | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: | --: |\n"
        "| 2x5 | 1.00 | 2.00 | 4.00 | 8.00 | 4.00x | 2.00x | 8.00x | 30 | 0.50x | 0.25x | 512 | 0.500 | 2.0x |\n"
        "| 3x5 | 1.00 |  | 1.50 |  | 1.50x |  |  |  |  |  |  | 0.500 | 2.0x |\n"
    )


def test_steps_without_ceilings_have_no_arithmetic(step_rows: list[Row]) -> None:
    assert "arithmetic" not in tables.tables(step_rows, [STEPS])["encoder-steps"]
    assert not {"encoder-torch-eager", "encoder-deferred"} & tables.tables(step_rows, [STEPS]).keys()
