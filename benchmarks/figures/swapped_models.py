"""Recorded times of whole models, stock and after `isogemm.nn.swap`: benchmarks/swap_causal_lm.py measures them."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from figures.tables import source
from isogemm.bench.summary import markdown

_MEASURED = (("train", "wall", "training step"), ("decode", "host", "decoded token, host"))


def tables(results: Path) -> dict[str, str]:
    """`swapped-models`: median times of every model recorded below a folder of results, by GPU."""
    by_gpu: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(results.glob("*/swap/*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        by_gpu.setdefault(record["environment"]["gpu"], []).append(record)
    made = [
        f"{source(gpu, [each['environment'] for each in records])}\n\n{_table(records)}"
        for gpu, records in by_gpu.items()
    ]
    return {"swapped-models": "\n".join(made)} if made else {}


def _table(records: list[dict[str, Any]]) -> str:
    head = [""]
    for *_, label in _MEASURED:
        head += [f"{label}: stock, ms", "swapped, ms", "speed-up"]
    body = []
    for record in records:
        line = [record["model"]]
        for kind, part, _ in _MEASURED:
            stock, swapped = (
                median(each[part] for each in record["ms"][f"{kind} {model}"]) for model in ("stock", "swapped")
            )
            line += [f"{stock:.1f}", f"{swapped:.1f}", f"{stock / swapped:.2f}x"]
        body.append(line)
    return markdown(head, body)
