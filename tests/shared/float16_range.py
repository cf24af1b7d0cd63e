"""Layers in float16 whose pre-activations leave its range, and their gradients in float64."""

import torch

from isogemm.epilogues import ACTIVATIONS

EPS = torch.finfo(torch.float16).eps
TINY = 2**-24  # the least that float16 holds
LARGE = (316.0, 317.0)  # whose product is beyond 65504


def operands(device, rows=24, columns=40, depth=16):
    """x, weight, weight_up: pre-activations around zero, and of 1e5 with both signs; gradients that stay in range."""
    draw = torch.Generator().manual_seed(0)
    x, weight, weight_up = (
        torch.randn(size, generator=draw).div(4) for size in ((rows, depth), (columns, depth), (columns, depth))
    )
    x[:, 0] = torch.tensor([LARGE[0], -LARGE[0], 0.0]).repeat(rows // 3)
    weight[:, 0] = torch.tensor([LARGE[1], -LARGE[1], 0.0, 0.0]).repeat(columns // 4)
    weight_up[:, 0] = torch.tensor([0.0, LARGE[1], 0.0, LARGE[1], -LARGE[1]]).repeat(columns // 5)
    return [each.half().to(device) for each in (x, weight, weight_up)]


def torch_form(activation):
    """The activated product in plain torch, as a function of x, weight and, where gated, weight_up."""
    form = ACTIVATIONS[activation].torch

    def call(x, weight, weight_up=None):
        value = form(x @ weight.T)
        return value if weight_up is None else value * (x @ weight_up.T)

    return call


def gradients(function, inputs, grad):
    leaves = [each.detach().requires_grad_() for each in inputs]
    result = function(*leaves)
    return result.detach(), torch.autograd.grad(result, leaves, grad.to(result.dtype))


def assert_gradients_right(found, function, inputs, grad, what=""):
    """As in float64, to a few roundings to float16 of what is summed."""
    wide = [each.double() for each in inputs]
    _, exact = gradients(function, wide, grad.double())
    # What each gradient's terms add up to without their signs: dz is exact but for roundings, and so are the factors.
    z = [(wide[0] @ each.T).requires_grad_() for each in wide[1:]]
    identity = torch.eye(z[0].shape[1], dtype=torch.float64, device=z[0].device)
    result = function(z[0], identity) if len(z) == 1 else _of_factors(function, z)
    dz = [each.abs() for each in torch.autograd.grad(result, z, grad.double())]
    dz = [4 * EPS * each + TINY for each in dz]
    allowed = [sum(each @ weight.abs() for each, weight in zip(dz, wide[1:], strict=True))]
    allowed += [each.T @ wide[0].abs() for each in dz]
    for place, (got, right, most) in enumerate(zip(found, exact, allowed, strict=True)):
        assert got.isfinite().all(), f"{what}: gradient {place} is not finite"
        error = (got.double() - right).abs()
        assert bool((error <= most).all()), f"{what}: gradient {place} is off by {error.max()}"


def _of_factors(function, z):
    """act(gate) * up of the factors themselves."""
    both = torch.cat(z, dim=1)
    first, second = torch.eye(both.shape[1], dtype=both.dtype, device=both.device).chunk(2)
    return function(both, first, second)
