from __future__ import annotations

import pytest
import torch

from isogemm.training.series import Part, cut, synthetic
from isogemm.training.steps import Evaluation, Objective, Training


class Persistence(torch.nn.Module):
    """The last value, times a weight, for every row to come."""

    def __init__(self, horizon: int) -> None:
        super().__init__()
        self.horizon, self.weight = horizon, torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x[..., -1:]).expand(*x.shape[:-1], self.horizon)


@pytest.fixture
def windows():
    return cut(synthetic(120, 2), inputs=6, horizon=3)


def test_steps_are_those_of_a_loop(windows):
    batches = torch.randint(windows.train.count, (4, 5), generator=torch.Generator().manual_seed(0))
    model, twin = Persistence(3), Persistence(3)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, twin)]
    training = Training(Objective(model, windows), optimizers[0], windows.values, (4, 5))
    training.begin(batches, torch.zeros(0))
    assert [training.advance(4 - done) for done in range(4)] == [1] * 4
    expected = []
    for starts in batches.tolist():
        errors = [
            (twin.weight * windows.values[channel, at + 5] - windows.values[channel, at + 6 + ahead]) ** 2
            for at in starts
            for channel in range(2)
            for ahead in range(3)
        ]
        loss = torch.stack(errors).mean()
        loss.backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        expected.append(loss.detach())
    torch.testing.assert_close(training.losses(4), torch.stack(expected))
    torch.testing.assert_close(model.weight, twin.weight)


def test_preparing_changes_nothing(windows):
    model = torch.nn.Sequential(Persistence(3), torch.nn.BatchNorm1d(2), torch.nn.Dropout(0.5))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    training = Training(Objective(model, windows), optimizer, windows.values, (1, 8))
    torch.manual_seed(3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    training.prepare(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(not value.any() for state in optimizer.state.values() for value in state.values())
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1))


@pytest.mark.parametrize("batch", [1, 7, 64])
@pytest.mark.parametrize("processes", [1, 3])
def test_every_window_counts_once_in_an_evaluation(windows, batch, processes):
    objective, part = Objective(Persistence(3), windows), windows.test
    ours = [Evaluation(objective, windows, part, batch, rank, processes) for rank in range(processes)]
    for _ in range(2):
        found = sum(each.sums() for each in ours) / ours[0].terms
    all_windows = windows.all[part.first : part.first + part.count]
    errors = (0.5 * all_windows[..., 5:6] - all_windows[..., 6:]).double()
    torch.testing.assert_close(found, torch.stack((errors.square().mean(), errors.abs().mean())))


def test_an_evaluation_of_one_window(windows):
    evaluation = Evaluation(Objective(Persistence(3), windows), windows, Part(2, 1), 4)
    assert evaluation.terms == 6
    window = windows.all[2]
    errors = 0.5 * window[:, 5:6] - window[:, 6:]
    torch.testing.assert_close(evaluation.sums()[0].float(), errors.square().sum())
