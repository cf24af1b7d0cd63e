from __future__ import annotations

import json
from pathlib import Path

from figures import tables


def record(model: str, date: str) -> str:
    """Times of which the medians are 80 and 64 ms a step, 9 and 12 a token's on the host."""
    medians = {"train stock": 80.0, "train swapped": 64.0, "decode stock": 9.0, "decode swapped": 12.0}
    times = {
        name: [
            {"host": each / 10, "wall": each} if "train" in name else {"host": each, "wall": 2 * each} for each in raw
        ]
        for name, middle in medians.items()
        for raw in [(middle + 40, middle, middle - 1)]
    }
    env = {"gpu": "GPU", "torch": "2.11", "triton": "3.6", "driver": "580", "commit": "abc", "date": date}
    return json.dumps({"model": model, "environment": env, "ms": times})


def test_medians_and_their_ratios(tmp_path: Path) -> None:
    assert tables.swapped_models(tmp_path) == {}
    folder = tmp_path / "gpu" / "swap"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text(record("one", "2026-11-16T17:45:01Z"))
    (folder / "b.json").write_text(record("two", "2026-11-18T17:45:01Z"))
    made = tables.swapped_models(tmp_path)["swapped-models"].splitlines()
    assert made[0] == "GPU: torch 2.11, triton 3.6, driver 580, commit abc, 2026-11-16 to 2026-11-18."
    assert made[-2:] == [f"| {name} | 80.0 | 64.0 | 1.25x | 9.0 | 12.0 | 0.75x |" for name in ("one", "two")]
