"""What a call has the GPU do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]


def device_work(call: Callable[[], object]) -> list[str]:
    """The names of all that the device did, kernels, copies and fills alike, as torch's profiler saw it."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == DeviceType.CUDA]
    return [event.name for event in events if not event.is_user_annotation]  # such as a compiled region's
