"""Training steps and evaluations that need nothing from the host while they run: CUDA graphs can replay them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from isogemm.training.series import Part, Windows

_WARMUPS = 3  # steps before a capture: compilation, libraries' workspaces, the optimizer's state


class Objective(nn.Module):
    """Loss of a batch of windows: the mean squared error, or sums of errors."""

    def __init__(self, model: nn.Module, windows: Windows, autocast: torch.dtype | None = None) -> None:
        super().__init__()
        self.model = model
        self.inputs, self.horizon = windows.inputs, windows.horizon
        self.autocast = autocast

    def forward(self, values: Tensor, batches: Tensor, position: Tensor, summed: bool = False) -> Tensor:
        """values [channels, rows], batches [batches, batch]: the rows at which their windows begin, position [1].

        Returns the mean squared error; with `summed` the sums of squared and absolute errors in float64, without the
        windows whose row is below 0.
        """
        starts = batches.index_select(0, position)[0]
        windows = values.unfold(1, self.inputs + self.horizon, 1).transpose(0, 1)
        batch = windows.index_select(0, starts.clamp(min=0) if summed else starts)
        x, y = batch[..., : self.inputs], batch[..., self.inputs :]
        with torch.autocast(values.device.type, self.autocast, enabled=self.autocast is not None):
            forecast = self.model(x)
        if not summed:
            return functional.mse_loss(forecast.float(), y)
        errors = (forecast.float() - y).double() * (starts >= 0)[:, None, None]
        return torch.stack((errors.square().sum(), errors.abs().sum()))


class Training:
    """The steps of an epoch, with batches, losses and a step counter on the device."""

    def __init__(
        self, objective: nn.Module, optimizer: torch.optim.Optimizer, values: Tensor, shape: tuple[int, int]
    ) -> None:
        self._objective, self._optimizer, self._values = objective, optimizer, values
        self.steps = shape[0]
        self._batches = torch.zeros(shape, dtype=torch.int64, device=values.device)
        self._losses = torch.zeros(shape[0], device=values.device)
        self._position = torch.zeros(1, dtype=torch.int64, device=values.device)
        self._launches: list[tuple[int, Callable[[], object]]] = [(1, self._step)]

    def begin(self, batches: Tensor, losses: Tensor) -> None:
        """Start an epoch. batches [steps, batch]: first rows of the windows; losses: of the steps that are done."""
        self._batches.copy_(batches)
        self._losses.zero_()
        self._losses[: len(losses)] = losses.to(self._losses)
        self._position.fill_(len(losses))

    def advance(self, most: int) -> int:
        """Launch one step, or as many as a graph has, at most `most`; return how many."""
        count, launch = next(each for each in self._launches if each[0] <= most)
        launch()
        return count

    def losses(self, done: int) -> Tensor:
        """Return the losses of the epoch's first `done` steps."""
        return self._losses[:done]

    def prepare(self, model: nn.Module, graph_steps: int = 0) -> None:
        """Compile without changing the model. With graph_steps, capture graphs of that many steps and of one."""
        changed = [*model.parameters(), *model.buffers(), self._losses, self._position]
        with unchanged(changed, self._optimizer, self._values.device):
            if not graph_steps:
                self._step()
                return
            warm_up(self._step, self._position)
            single = captured(self._step)
            self._launches = [(1, single.replay)]
            if graph_steps > 1:
                several = captured(self._step, graph_steps, single.pool())
                self._launches.insert(0, (graph_steps, several.replay))

    def _step(self) -> None:
        loss = self._objective(self._values, self._batches, self._position)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._losses.index_copy_(0, self._position, loss.detach()[None])
        self._position += 1


class Evaluation:
    """Sums of errors over all windows of a part; the last batch is padded and masked."""

    def __init__(
        self, objective: nn.Module, windows: Windows, part: Part, batch: int, rank: int = 0, of: int = 1
    ) -> None:
        """rank, of: process number and number of processes; each takes every `of`-th batch."""
        self._objective, self._values = objective, windows.values
        batches = math.ceil(part.count / batch)
        starts = torch.full((math.ceil(batches / of) * of * batch,), -1)
        starts[: part.count] = torch.arange(part.first, part.first + part.count)
        self._batches = starts.view(-1, of, batch)[:, rank].contiguous().to(self._values.device)
        self._position = torch.zeros(1, dtype=torch.int64, device=self._values.device)
        self._sums = torch.zeros(2, dtype=torch.float64, device=self._values.device)
        self._launch: Callable[[], object] = self._step
        self.terms = part.count * windows.values.shape[0] * windows.horizon

    def sums(self) -> Tensor:
        """The sums of squared and of absolute errors; `terms` of each, over all processes."""
        self._position.zero_()
        self._sums.zero_()
        for _ in range(len(self._batches)):
            self._launch()
        return self._sums

    def prepare(self, graph: bool = False) -> None:
        """Compile; with `graph`, replay one."""
        if graph:
            warm_up(self._step, self._position)
            self._launch = captured(self._step).replay
        else:
            self._step()

    @torch.no_grad()
    def _step(self) -> None:
        self._sums += self._objective(self._values, self._batches, self._position, summed=True)
        self._position += 1


def warm_up(step: Callable[[], object], position: Tensor) -> None:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARMUPS):
            position.zero_()
            step()
    torch.cuda.current_stream().wait_stream(stream)


def captured(step: Callable[[], object], times: int = 1, pool: Any = None) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for _ in range(times):
            step()
    return graph


@contextmanager
def unchanged(tensors: Iterable[Tensor], optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[None]:
    """Restore the tensors, the optimizer's state and the generators after the block, in the same memory."""

    def state() -> list[Tensor]:
        return [each for one in optimizer.state.values() for each in one.values() if isinstance(each, Tensor)]

    before = {id(each): (each, each.detach().clone()) for each in (*tensors, *state())}
    random = random_state(device)
    yield
    with torch.no_grad():
        for each, value in before.values():
            each.copy_(value)
        for each in state():
            if id(each) not in before:  # made inside: zeros at first
                each.zero_()
    set_random_state(random, device)


def random_state(device: torch.device) -> list[Tensor]:
    """Return the states of the generators that a step may draw from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def set_random_state(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
