"""A training run: epochs, an evaluation after each, and checkpoints that resume it to the same bits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from isogemm.core.files import AnyPath
from isogemm.integrations import patchtst
from isogemm.training import checkpoints
from isogemm.training.checkpoints import CheckpointError, Every
from isogemm.training.folder import BEST, CHECKPOINT
from isogemm.training.model import Forecaster
from isogemm.training.series import Series, SeriesError, cut
from isogemm.training.steps import Evaluation, Objective, Training, random_state, set_random_state
from isogemm.training.world import World
from isogemm.verify.precision import fp32_precision
from isogemm_options import Architecture, Config, require_positive

Progress = Callable[[int, int, str], None]  # steps done, steps in all, what was reached

_SHOWN_CHANNELS = 4
_PROGRESS_S = 0.1


class Stopped(Exception):
    """The run was asked to stop."""


class Diverged(ArithmeticError):
    """A loss that is not finite."""


@dataclass(frozen=True)
class Plan:
    """Length of a run, and its checkpoints. Does not affect the bits of the weights."""

    epochs: int = 10
    patience: int | None = None  # stop after so many epochs without a lower validation error
    folder: AnyPath | None = None  # of the checkpoints; None: none are written
    checkpoint_epochs: int = 1  # epochs between checkpoints
    checkpoint_steps: int | None = None  # steps between checkpoints inside an epoch

    def __post_init__(self) -> None:
        require_positive(self, "epochs", "patience", "checkpoint_epochs", "checkpoint_steps")


@dataclass(frozen=True)
class Epoch:
    train_mse: float
    val_mse: float
    val_mae: float
    train_s: float
    val_s: float

    def __str__(self) -> str:
        return f"train MSE {self.train_mse:.4f}, val MSE {self.val_mse:.4f}, MAE {self.val_mae:.4f}"


@dataclass(frozen=True)
class Forecast:
    """A test window in the data's own units, a list per channel."""

    channels: list[str]
    history: list[list[float]]
    truth: list[list[float]]
    forecast: list[list[float]]


@dataclass(frozen=True)
class Outcome:
    epochs: list[Epoch]
    best_epoch: int  # counted from 1; test figures and the forecast are of its weights
    test_mse: float
    test_mae: float
    setup_s: float  # compilation and capture
    total_s: float  # of all epochs, checkpoints included; of a resumed run also before it was stopped
    samples_per_s: float  # windows, in training
    peak_bytes: int | None  # of device memory
    forecast: Forecast


class Run:
    """A model in training and its progress."""

    def __init__(self, config: Config, series: Series, world: World) -> None:
        self.config, self.world, self.series = config, world, series
        self._allocated = torch.cuda.memory_allocated(world.device) if self._on_gpu else 0
        self.windows = cut(series, config.model.inputs, config.model.horizon).to(world.device)
        self.steps = self.windows.train.count // config.batch
        if not self.steps:
            raise SeriesError(
                f"{series.name}: {self.windows.train.count} training windows, fewer than a batch of {config.batch}"
            )
        if config.batch % world.size:
            raise ValueError(f"batch is {config.batch}, which {world.size} processes cannot share evenly")
        if config.graph and not self.captured:
            raise ValueError(f"graph is True; expected one process with a GPU, not {world.size} on {world.device.type}")
        torch.manual_seed(config.seed)
        self.model = Forecaster(config.model)
        if config.backend == "isogemm":
            report = patchtst.accelerate(self.model)
            if report.kept or not report.swapped:
                raise ValueError(f"isogemm does not serve this model: {' '.join(str(report).split())}")
        self.model.to(world.device)
        torch.manual_seed(config.seed + world.rank)
        self._random = random_state(world.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), config.lr, weight_decay=config.weight_decay, fused=True, capturable=self._on_gpu
        )
        self.epochs: list[Epoch] = []
        self._losses = torch.zeros(0)  # of the steps done in this epoch
        self._spent_s = 0.0  # time of these steps
        self._total_s = 0.0  # time before the run was resumed
        self._begun = 0.0  # start time of an equally long run without stops
        self._best: dict[str, Any] = {}  # epoch, and model
        self._best_written = 0

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that the bits of the weights depend on."""
        options = self.config.flat()
        del options["graph"], options["graph_steps"]
        data = {"data": self.series.fingerprint, "device": self.world.device.type, "processes": self.world.size}
        return options | data

    @property
    def captured(self) -> bool:
        """Whether a step is a CUDA graph: never with several processes, which wait for each other."""
        return self.config.captures(self.world.device.type) and self.world.size == 1

    def resume(self, path: AnyPath) -> None:
        """Continue from a checkpoint of this run; CheckpointError for any other file."""
        state = self._loaded(path)
        self.model.load_state_dict(state["model"])
        groups = self.optimizer.state_dict()["param_groups"]  # options, which `identity` has
        self.optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": groups})
        self._random = state["random"][self.world.rank]
        self.epochs = [Epoch(**each) for each in state["epochs"]]
        self._losses, self._spent_s, self._best = state["losses"], state["spent_s"], state["best"]
        self._total_s = state["total_s"]

    def fit(
        self, plan: Plan, progress: Progress = lambda *_: None, stop: Callable[[], bool] = lambda: False
    ) -> Outcome:
        """Train to the plan's end. Once `stop` returns True, write a checkpoint between two steps and raise Stopped."""
        world, windows = self.world, self.windows
        own = self.config.precision in ("ieee", "tf32") and self._on_gpu
        with fp32_precision(self.config.precision if own else ""):
            progress(len(self.epochs) * self.steps + len(self._losses), plan.epochs * self.steps, "preparing")
            started = time.perf_counter()
            set_random_state(self._random, world.device)
            objective, training, validation = self._prepared()
            if self._on_gpu:
                torch.cuda.synchronize(world.device)
            prepared = time.perf_counter()
            self._begun = prepared - self._total_s
            while not self.ended(plan):
                self._epoch(training, validation, plan, progress, stop)
            if stop():
                raise Stopped(f"after epoch {len(self.epochs)}, the last one, before its test")
            self._total_s = time.perf_counter() - self._begun
            last = self._weights()
            self.model.load_state_dict(self._best["model"])
            test = Evaluation(objective, windows, windows.test, self.config.batch, world.rank, world.size)
            mse, mae = self._errors(test)
            if not math.isfinite(mse):
                raise Diverged("the test error is not finite; a lower learning rate may help")
            forecast = self._forecast()
            self.model.load_state_dict(last)
        trained = len(self.epochs) * self.steps * self.config.batch
        speed = trained / sum(epoch.train_s for epoch in self.epochs)
        peak = torch.cuda.max_memory_allocated(world.device) - self._allocated if self._on_gpu else None
        setup_s, best = prepared - started, self._best["epoch"]
        return Outcome(self.epochs, best, mse, mae, setup_s, self._total_s, speed, peak, forecast)

    @property
    def _on_gpu(self) -> bool:
        return self.world.device.type == "cuda"

    @property
    def _autocast(self) -> torch.dtype | None:
        return torch.bfloat16 if self.config.precision == "bf16" else None

    def _prepared(self) -> tuple[nn.Module, Training, Evaluation]:
        """The objective, training and validation, compiled and captured."""
        config, windows, world = self.config, self.windows, self.world
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(world.device)
        objective: nn.Module = Objective(self.model, windows, self._autocast)
        if config.compiles:
            objective = torch.compile(objective, fullgraph=True, dynamic=False)  # type: ignore[assignment]
        trained = DistributedDataParallel(objective) if world.size > 1 else objective
        training = Training(trained, self.optimizer, windows.values, (self.steps, config.batch // world.size))
        validation = Evaluation(objective, windows, windows.val, config.batch, world.rank, world.size)
        self.model.train()
        training.prepare(self.model, config.graph_steps if self.captured else 0)
        self.model.eval()
        validation.prepare(self.captured)
        return objective, training, validation

    def ended(self, plan: Plan) -> bool:
        """Whether no epoch of the plan is left."""
        done = len(self.epochs)
        in_vain = done - self._best["epoch"] if self._best else 0
        return done >= plan.epochs or (plan.patience is not None and in_vain >= plan.patience)

    def _epoch(
        self, training: Training, validation: Evaluation, plan: Plan, progress: Progress, stop: Callable[[], bool]
    ) -> None:
        number = len(self.epochs) + 1
        self._train(training, plan, progress, stop)
        begun = time.perf_counter()
        mse, mae = self._errors(validation)
        train_mse = self._losses.double().mean().item()
        if not math.isfinite(train_mse + mse):
            raise Diverged(f"the loss is not finite in epoch {number}; a lower learning rate may help")
        self.epochs.append(Epoch(train_mse, mse, mae, self._spent_s, time.perf_counter() - begun))
        self._losses, self._spent_s = torch.zeros(0), 0.0
        if not self._best or mse < self.epochs[self._best["epoch"] - 1].val_mse:
            self._best = {"epoch": number, "model": self._weights()}
        if self.ended(plan) or number % plan.checkpoint_epochs == 0:
            self._save(plan)

    def _train(self, training: Training, plan: Plan, progress: Progress, stop: Callable[[], bool]) -> None:
        """Run the epoch's remaining steps; wait for the device only at checkpoints and at the end."""
        done, before = len(self._losses), len(self.epochs)
        text = f"epoch {before + 1}/{plan.epochs}{f', {self.epochs[-1]}' if before else ''}"
        due = plan.checkpoint_steps or self.steps
        self.model.train()
        begun, shown = time.perf_counter(), 0.0
        training.begin(self.world.share(self._batches(before + 1)), self._losses)
        while done < self.steps:
            if time.perf_counter() - shown > _PROGRESS_S:
                progress(before * self.steps + done, plan.epochs * self.steps, text)
                shown = time.perf_counter()
            done += training.advance(min(self.steps, (done // due + 1) * due) - done)
            stopping = stop()
            if stopping or done % due == 0 or done == self.steps:
                self._losses = self.world.mean(training.losses(done)).cpu()
                self._spent_s += time.perf_counter() - begun
                if done < self.steps:
                    self._save(plan)
                    if stopping:
                        raise Stopped(f"after step {done} of epoch {before + 1}")
                begun = time.perf_counter()

    def _batches(self, epoch: int) -> Tensor:
        """First rows of the windows [steps, batch], in an order that depends only on the seed and the epoch."""
        of_epoch = torch.randint(2**32, (epoch,), generator=torch.Generator().manual_seed(self.config.seed))[-1]
        generator = torch.Generator().manual_seed(int(of_epoch))
        part = self.windows.train
        order = torch.randperm(part.count, generator=generator)[: self.steps * self.config.batch]
        return (part.first + order).view(self.steps, self.config.batch)

    def _errors(self, evaluation: Evaluation) -> tuple[float, float]:
        """Return the mean squared and the mean absolute error."""
        self.model.eval()
        self.world.spread(self.model.buffers())  # batch norm's statistics are each process's own
        squared, absolute = (self.world.sum(evaluation.sums()) / evaluation.terms).tolist()
        return squared, absolute

    def _save(self, plan: Plan) -> None:
        if plan.folder is None:
            return
        random = self.world.of_each(random_state(self.world.device))
        with self.world.together():
            if self.world.leads:
                self._write(Path(plan.folder), random)

    def _write(self, folder: Path, random: list[list[Tensor]]) -> None:
        state = {
            "run": self.identity,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": random,
            "epochs": [asdict(epoch) for epoch in self.epochs],
            "losses": self._losses,
            "spent_s": self._spent_s,
            "total_s": time.perf_counter() - self._begun,
            "best": self._best,
        }
        if self._best and self._best["epoch"] != self._best_written:
            self._write_best(folder)
            self._best_written = self._best["epoch"]
        checkpoints.save(folder / CHECKPOINT, state)  # last: once it is there, the others are complete

    def _write_best(self, folder: Path) -> None:
        scaling = {"mean": self.windows.mean, "std": self.windows.std}
        checkpoints.save(folder / BEST, {"run": self.identity, **self._best, **scaling})

    def mend_best(self, folder: Path) -> None:
        """Write the best weights again if their file is missing, damaged or another run's."""
        try:
            there = checkpoints.load(folder / BEST)
        except checkpoints.CheckpointError:
            there = {}
        if (there.get("run"), there.get("epoch")) != (self.identity, self._best["epoch"]):
            self._write_best(folder)

    def _loaded(self, path: AnyPath) -> dict[str, Any]:
        """Load a checkpoint that `_write` could have written in this run."""
        state = checkpoints.load(path)
        if isinstance(state.get("run"), dict):
            checkpoints.require_same(path, state["run"], self.identity)
        epochs, losses = (state.get(name) for name in ("epochs", "losses"))
        ended = len(epochs) if isinstance(epochs, list) else 0
        done = losses.numel() if isinstance(losses, Tensor) else 0
        model = self.model.state_dict()
        moments = {
            index: {"step": torch.zeros(()), "exp_avg": each, "exp_avg_sq": each}
            for index, each in enumerate(self.model.parameters())
            if each.requires_grad
        }
        expected = {
            "schema": int,
            "run": dict,
            "model": model,
            "optimizer": {"state": moments, "param_groups": list},
            "random": [self._random] * self.world.size,
            "epochs": Every({each.name: float for each in fields(Epoch)}),
            "losses": torch.zeros(min(done, self.steps - 1)),
            "spent_s": float,
            "total_s": float,
            "best": {"epoch": range(1, ended + 1), "model": model} if ended else {},
        }
        checkpoints.require_structure(path, state, expected)
        try:
            set_random_state(state["random"][self.world.rank], self.world.device)
        except RuntimeError as error:
            raise CheckpointError(f"{path}: not a checkpoint of this run: {error}") from error
        return state

    def _weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    @torch.no_grad()
    def _forecast(self) -> Forecast:
        """Forecast the middle window of the test part."""
        windows, shown = self.windows, min(_SHOWN_CHANNELS, self.config.model.channels)
        window = windows.all[windows.test.first + windows.test.count // 2]
        self.model.eval()
        with torch.autocast(self.world.device.type, self._autocast, enabled=self._autocast is not None):
            y = self.model(window[None, :, : windows.inputs])[0]

        def original(values: Tensor) -> list[list[float]]:
            scaled = values[:shown].double().cpu() * windows.std[:shown, None] + windows.mean[:shown, None]
            return [[float(f"{value:.6g}") for value in channel] for channel in scaled.tolist()]

        history, truth = window[:, : windows.inputs], window[:, windows.inputs :]
        return Forecast(list(self.series.channels[:shown]), original(history), original(truth), original(y))


def best_forecaster(path: AnyPath) -> tuple[Forecaster, Tensor, Tensor]:
    """Load a run's best.pt: the model in eval mode, and the mean and deviation [channels] to scale its data by."""
    state = checkpoints.load(path)
    checkpoints.require_structure(path, state.get("run"), dict, "state['run']")
    types = get_type_hints(Architecture)
    sizes = {name: value for name, value in state["run"].items() if name in types}
    checkpoints.require_structure(path, sizes, types, "state['run']")
    model = Forecaster(Architecture(**sizes))
    scaling = torch.zeros(model.architecture.channels, dtype=torch.float64)
    expected = {"schema": int, "run": dict, "epoch": int, "model": model.state_dict(), "mean": scaling, "std": scaling}
    checkpoints.require_structure(path, state, expected)
    model.load_state_dict(state["model"])
    return model.eval(), state["mean"], state["std"]
