"""Training with isogemm.encoder_layer goes as with torch's own layer."""

import copy

import torch
from torch import nn

import isogemm

STEPS = 200
SEQUENCES, TOKENS, FEATURES, D_MODEL, NHEAD, DIM_FEEDFORWARD = 16, 8, 4, 16, 4, 32


class Model(nn.Module):
    """A layer between a projection of the features and a head, by `layer(module, x)`."""

    def __init__(self, layer, norm_first):
        super().__init__()
        self.layer = layer
        self.project, self.head = nn.Linear(FEATURES, D_MODEL), nn.Linear(D_MODEL, 1)
        self.place = nn.Parameter(torch.randn(TOKENS, D_MODEL) / 4)
        self.block = nn.TransformerEncoderLayer(
            D_MODEL, NHEAD, DIM_FEEDFORWARD, 0.0, "gelu", batch_first=True, norm_first=norm_first
        )

    def forward(self, x):
        return self.head(self.layer(self.block, self.project(x) + self.place))[..., 0]


def _torch_layer(module, x):
    return module(x)


def _our_layer(module, x):
    attention = module.self_attn
    parameters = isogemm.EncoderParameters(
        attention.in_proj_weight, attention.out_proj.weight, module.linear1.weight, module.linear2.weight,
        module.norm1.weight, module.norm2.weight, attention.in_proj_bias, attention.out_proj.bias,
        module.linear1.bias, module.linear2.bias, module.norm1.bias, module.norm2.bias,
    )  # fmt: skip
    return isogemm.encoder_layer(x, parameters, nhead=NHEAD, norm_first=module.norm_first, activation="gelu")


def _task():
    """For every token, the distance of its first feature to the sequence's mean: one must look at all of them."""
    x = torch.randn(SEQUENCES, TOKENS, FEATURES, generator=torch.Generator().manual_seed(1))
    return x, x[..., 0] - x[..., 0].mean(1, keepdim=True)


def _losses(model, steps=STEPS):
    x, y = _task()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses, dtype=torch.float64)


def test_the_loss_curve_is_that_of_torch():
    torch.manual_seed(0)
    ours = Model(_our_layer, norm_first=True)
    theirs = copy.deepcopy(ours)
    theirs.layer = _torch_layer
    expected = _losses(theirs)
    assert float(expected[-1]) < 0.05 * float(expected[0])  # it learns
    found = _losses(ours)
    assert float((found - expected).abs().max()) <= 1e-4


def test_training_is_reproducible():
    torch.manual_seed(0)
    first = Model(_our_layer, norm_first=True)
    second = copy.deepcopy(first)
    assert torch.equal(_losses(first, 20), _losses(second, 20))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
