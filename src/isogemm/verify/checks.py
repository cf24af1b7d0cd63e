"""Properties that `isogemm verify` checks on the user's own machine, by trials made from seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from isogemm.core import device as devices
from isogemm.core.problems import usable
from isogemm.verify import trials
from isogemm.verify.compare import BitDiff
from isogemm.verify.parallel import run_in_processes
from isogemm.verify.poison import poisoned_allocations

NO_TILES = "there are no tiles to choose from on the CPU"


@dataclass(frozen=True)
class CheckResult:
    """Result of a check. A skipped check neither passed nor failed."""

    name: str
    trials: int  # run
    failures: int  # trials that failed
    differing: int  # differing elements in all trials
    detail: str = ""  # the first failure in words, or what was covered
    skipped: str = ""  # the reason

    @property
    def passed(self) -> bool:
        return not self.skipped and self.trials > 0 and self.failures == 0


@dataclass(frozen=True)
class Check:
    """A property, one trial of it, and what the trials cover."""

    setting: Callable[[int, torch.device], Any]  # (seed, device) -> what a trial takes
    name: str
    what: str  # the property, one sentence
    trial: Callable[[Any], Iterator[BitDiff]]
    covered: str
    gpu_only: str = ""  # the reason
    cpu_only: str = ""

    def run(self, device: torch.device, count: int) -> CheckResult:
        """Run the trials of the first `count` seeds. One fails when a comparison is unequal or when it raises."""
        gpu = device.type == "cuda"
        reason = usable(devices.facts(device).arch) or self.cpu_only if gpu else self.gpu_only
        if reason:
            return CheckResult(self.name, 0, 0, 0, skipped=reason)
        covered = self.covered.format(most=(trials.GPU if gpu else trials.CPU).most)
        if not gpu:
            threads = sorted({self.setting(seed, device).threads for seed in range(count)})
            covered += f"; {', '.join(map(str, threads))} threads"
        failures = differing = 0
        first_failure = ""
        for seed in range(count):
            problem = ""
            try:
                for diff in self._diffs(self.setting(seed, device)):
                    if not diff.equal:
                        differing += diff.count
                        problem = problem or str(diff)
            except Exception as error:  # a check reports what went wrong, whatever it is
                problem = problem or f"{type(error).__name__}: {error}"
            if problem:
                failures += 1
                first_failure = first_failure or f"trial {seed}: {problem}"
        return CheckResult(self.name, count, failures, differing, detail=first_failure or covered)

    def _diffs(self, each: Any) -> Iterator[BitDiff]:
        before = torch.get_num_threads()
        if each.device.type == "cpu":
            torch.set_num_threads(each.threads)
        try:
            with poisoned_allocations():
                yield from self.trial(each)
        finally:
            torch.set_num_threads(before)


def compile_ahead(module: ModuleType, device: torch.device, count: int) -> None:
    """Compile, on all cores, the kernels that so many trials of the module's CHECKS launch."""
    if not usable(devices.facts(device).arch):
        places = [place for place, each in enumerate(module.CHECKS) if not each.cpu_only]
        jobs = [(module.__name__, seed, place) for seed in range(count) for place in places]
        run_in_processes(_rehearse, device, jobs)


def _rehearse(device: str, job: tuple[str, int, int]) -> None:
    name, seed, place = job
    check = import_module(name).CHECKS[place]
    for _ in check.trial(check.setting(seed, torch.device(device))):
        pass
