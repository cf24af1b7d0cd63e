"""isogemm's calls through its registered operators."""

from torch.utils._python_dispatch import TorchDispatchMode


class ThroughOperators(TorchDispatchMode):
    """A mode that changes nothing: under any mode calls go through the dispatcher."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class RecordOperators(TorchDispatchMode):
    """A mode that keeps the calls of isogemm's operators: (operator, args, kwargs)."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "isogemm":
            self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))
