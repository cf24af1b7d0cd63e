"""The headline figures: a short list of speed-ups made from recorded GPU measurements.

The README shows them, and so does `isogemm demo` on a machine without a GPU, from the package's `headline.json`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from isogemm.bench import summary
from isogemm.bench.headline import COLUMNS, MEANING, Recorded
from isogemm.bench.store import Row, newest
from isogemm.bench.summary import markdown
from isogemm.bench.views import number_type
from isogemm.training import report, results
from isogemm.training.results import Record

Environment = Mapping[str, str]
Figure = list[str]  # a table line with COLUMNS


@dataclass(frozen=True)
class _Line:
    """Which points a figure is made of, and which two variants it compares."""

    what: str
    against: str
    family: str
    ops: Collection[str]
    numbers: Collection[str] = ()  # number types; any if empty
    rivals: Sequence[str] = ("torch",)  # variants; the first that a point has
    ours: str = "isogemm"
    params: Mapping[str, Collection[int | str]] = field(default_factory=dict)  # what a point's may be

    def points(self, rows: Iterable[Row]) -> list[Row]:
        return [
            row
            for row in rows
            if row.family == self.family
            and row.op in self.ops
            and (not self.numbers or number_type(row.params) in self.numbers)
            and all(row.params.get(name) in values for name, values in self.params.items())
            and self.ours in row.us
            and any(rival in row.us for rival in self.rivals)
        ]

    def figure(self, points: Sequence[Row]) -> Figure:
        rivals = (next(row.us[rival] for rival in self.rivals if rival in row.us) for row in points)
        ratios = [us / row.us[self.ours] for us, row in zip(rivals, points, strict=True)]
        return figure(self.what, self.against, ratios)


ATTENTION = "attention, causal, 1024 to 16384 tokens"
COMPILED = "torch.compile + CUDA graph"
LINES = (
    _Line("linear, bf16, tuned weights", "torch (cuBLAS)", "gemm", ["linear"], ["bf16"]),
    _Line("linear, bf16, other weights", "torch (cuBLAS)", "gemm", ["linear other"], ["bf16"]),
    _Line(
        "linear, bf16, other weights, 256 and 1024 tokens", "torch (cuBLAS)", "gemm", ["linear other"], ["bf16"],
        params={"m": [256, 1024]},
    ),
    _Line("linear, bf16", "batch-invariant kernel, one fixed tile", "gemm", ["linear"], ["bf16"], ["fixed tile"]),
    _Line("linear, fp32 without TF32", "torch (cuBLAS)", "gemm", ["linear"], ["fp32 ieee"]),
    _Line("weight gradient into an fp32 main_grad, bf16", "torch (cuBLAS)", "gemm", ["main_grad"], ["bf16"]),
    _Line(
        "linear + bias + relu or gelu, bf16", "torch eager", "fused", ["bias relu", "bias gelu_tanh", "bias gelu"],
        ["bf16"], ["eager", "torch"],  # where torch has a fused call, its eager operations are a variant of their own
    ),
    _Line("bmm of matrices up to 64 x 64", "torch.bmm", "tiny", ["bmm", "bmm random"], params={"cache": ["cold"]}),
    _Line(ATTENTION, "torch SDPA (flash)", "attention", ["attention"]),
    _Line(ATTENTION, "torch SDPA (cuDNN)", "attention", ["attention"], rivals=["cuDNN"]),
    _Line(
        "attention, heads of 256", "torch SDPA (flash)", "attention", ["attention other", "attention grad other"],
        params={"head": [256]},
    ),
    _Line("gradients of attention", "torch SDPA (flash)", "attention", ["attention grad"]),
    _Line("gradients of attention", "torch SDPA (cuDNN)", "attention", ["attention grad"], rivals=["cuDNN"]),
    _Line("encoder layers, d_model 16 to 768, training step", COMPILED, "encoder", ["training step"]),
    _Line("PatchTST, training step", COMPILED, "patchtst", ["whole training step"], ours="isogemm + compile"),
)  # fmt: skip


def figure(what: str, against: str, ratios: Sequence[float]) -> Figure:
    """Geometric mean and range of isogemm's speed-ups over something else."""
    span = f"{min(ratios):.2f}x to {max(ratios):.2f}x" if len(ratios) > 1 else ""
    return [what, against, f"{summary.geomean(ratios):.2f}x", span, str(len(ratios))]


def of_training(records: Iterable[Record]) -> list[tuple[Figure, Environment]]:
    """Headline figures: isogemm's speed in training over torch.compile's, with the run's environment."""
    made = []
    for preset, runs in report.by_preset(records).items():
        by_backend = {each["run"]["backend"]: each for each in reversed(runs)}
        ours, rival = (by_backend.get(name) for name in ("isogemm", "compile"))
        if ours is not None and rival is not None:
            what = f"PatchTST, training run of {len(ours['epochs'])} epochs ({preset})"
            made.append((figure(what, COMPILED, [results.speedup(ours, rival)]), ours["env"]))
    return made


def recorded(rows: Iterable[Row], more: Iterable[tuple[Figure, Environment]] = ()) -> list[Recorded]:
    """The figures of every GPU that was measured; of points measured more than once, the newest.

    more: figures made of something else than rows, with their environments. They come last.
    """
    more = list(more)
    made = []
    for gpu, mine in summary.by_gpu(newest(rows)).items():
        if gpu.startswith("CPU"):
            continue
        lines = [(line, points) for line in LINES if (points := line.points(mine))]
        others = [(each, env) for each, env in more if env["gpu"] == gpu]
        figures = [*(line.figure(points) for line, points in lines), *(each for each, _ in others)]
        environments = [*(row.env for _, points in lines for row in points), *(env for _, env in others)]
        if figures:
            made.append(Recorded(gpu, _source(gpu, environments), figures))
    return made


def _source(gpu: str, environments: Iterable[Environment]) -> str:
    """Text such as "NVIDIA H200, 2026-11-15 to 2026-11-16: torch 2.11.0, Triton 3.6.0, commits 0123456789ab." """
    by_date = sorted(environments, key=lambda env: env["date"])
    torch, triton = (" and ".join(sorted({env[name] for env in by_date})) for name in ("torch", "triton"))
    dates = " to ".join(dict.fromkeys(env["date"][:10] for env in (by_date[0], by_date[-1])))
    commits = list(dict.fromkeys(env["commit"] for env in by_date))
    of = "commit" if len(commits) == 1 else "commits"
    return f"{gpu}, {dates}: torch {torch}, Triton {triton}, {of} {', '.join(commits)}."


def table(measured: Iterable[Recorded]) -> str:
    """A table per GPU for a document, with its meaning and its source."""
    parts = [f"{markdown(COLUMNS, gpu.lines, texts=2)}\n{MEANING}\n{gpu.source}\n" for gpu in measured]
    return "\n".join(parts)


def dumps(measured: Iterable[Recorded]) -> str:
    """The content of headline.json."""
    return json.dumps([each._asdict() for each in measured], indent=1) + "\n"
