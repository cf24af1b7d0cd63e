"""Change one thing in the source, run the tests that should notice, and say which changes nobody noticed.

    python tests/mutants                    # all
    python tests/mutants gemm fusion        # of some families
    python tests/mutants -k padding         # of some names

Each family has a list, tests/mutants/<family>.toml. The source is changed in a copy.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
COPIED = (
    "src",
    "tests",
    "benchmarks",
    "docs",
    "examples",
    "pyproject.toml",
    "README.md",
    "Makefile",
    "constraints.txt",
)
LONGEST = 300  # seconds


class Mutant(NamedTuple):
    family: str
    name: str
    file: str  # below src/isogemm
    old: str
    new: str
    tests: tuple[str, ...]  # pytest's arguments, below tests
    interpreted: bool = False  # by Triton's interpreter

    def apply(self, root: Path) -> str:
        """Change the file below `root`; its text before."""
        path = root / "src/isogemm" / self.file
        before = path.read_text(encoding="utf-8")
        if before.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: {self.old!r} occurs {before.count(self.old)} times in {self.file}; once wanted"
            )
        path.write_text(before.replace(self.old, self.new), encoding="utf-8")
        return before


def read(families: list[str] | None = None) -> list[Mutant]:
    found = []
    for path in sorted(HERE.glob("*.toml")):
        if not families or path.stem in families:
            for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]:
                entry["tests"] = tuple(entry["tests"])
                found.append(Mutant(path.stem, **entry))
    return found


def is_green(root: Path, tests: tuple[str, ...], interpreted: bool) -> bool:
    """Whether the tests pass there; stuck ones do not."""
    environment = os.environ | {"PYTHONPATH": str(root / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        *(f"tests/{each}" for each in tests),
    ]
    try:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        return False
    if done.returncode > 2:  # neither tests that failed nor a source that cannot be imported
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "families", nargs="*", help=f"of {', '.join(path.stem for path in sorted(HERE.glob('*.toml')))}"
    )
    parser.add_argument("-k", dest="name", default="", help="only mutants with this in their names")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    mutants = [mutant for mutant in read(options.families) if options.name in mutant.name]
    if not mutants:
        parser.error("no such mutant")
    with tempfile.TemporaryDirectory() as folder:
        roots: SimpleQueue[Path] = SimpleQueue()
        for job in range(options.jobs):
            root = Path(folder) / str(job)
            root.mkdir()
            for name in COPIED:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / name, root / name)
            roots.put(root)

        def judge(mutant: Mutant | None, tests: tuple[str, ...], interpreted: bool) -> bool:
            root = roots.get()
            try:
                before = mutant.apply(root) if mutant else ""
                begun = time.monotonic()
                green = is_green(root, tests, interpreted)
                if mutant:
                    (root / "src/isogemm" / mutant.file).write_text(before, encoding="utf-8")
                    verdict = "ALIVE" if green else "caught"
                    print(f"{verdict}  {time.monotonic() - begun:5.1f} s  {mutant.family}: {mutant.name}", flush=True)
                return green
            finally:
                roots.put(root)

        with ThreadPoolExecutor(options.jobs) as pool:
            runs = sorted({(mutant.tests, mutant.interpreted) for mutant in mutants})
            healthy = list(pool.map(lambda run: judge(None, *run), runs))
            for run, green in zip(runs, healthy, strict=True):
                if not green:
                    print(f"not green without a mutant: {' '.join(run[0])}", file=sys.stderr)
            if not all(healthy):
                return 2
            greens = pool.map(lambda mutant: judge(mutant, mutant.tests, mutant.interpreted), mutants)
            alive = [mutant for mutant, green in zip(mutants, greens, strict=True) if green]
    print(f"{len(mutants) - len(alive)} of {len(mutants)} mutants caught")
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main())
