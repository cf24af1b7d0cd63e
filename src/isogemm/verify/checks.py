"""Properties that `isogemm verify` checks on the user's own machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from isogemm.verify.compare import BitDiff


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
    """A property, and a function that tries it on a device."""

    name: str
    what: str  # the property, one sentence
    run: Callable[[torch.device, int], CheckResult]  # (device, trials)


def skip(name: str, reason: str) -> CheckResult:
    return CheckResult(name=name, trials=0, failures=0, differing=0, skipped=reason)


def run_trials(
    name: str, trials: int, trial: Callable[[int], Iterable[BitDiff] | None], *, covered: str = ""
) -> CheckResult:
    """Call `trial(0)`, `trial(1)`, ...: the argument serves as the seed.

    A trial returns (or yields) its bitwise comparisons; it fails when one is unequal or when it raises, and
    the rest still run. `covered` is the detail of a check without failure.
    """
    failures = differing = 0
    first_failure = ""
    for seed in range(trials):
        problem = ""
        try:
            for diff in trial(seed) or ():
                if not diff.equal:
                    differing += diff.count
                    problem = problem or str(diff)
        except Exception as error:  # a check reports what went wrong, whatever it is
            problem = problem or f"{type(error).__name__}: {error}"
        if problem:
            failures += 1
            first_failure = first_failure or f"trial {seed}: {problem}"
    return CheckResult(name, trials, failures, differing, detail=first_failure or covered)
