"""The promises' encoder layers."""

import contextlib
import random

import plain_encoder_oracle
import torch
from arithmetic import NUMBERS
from encoder_oracle import assert_encoder_no_worse
from gradients import gradients_of
from tensor_cases import NEARBY, nearby

import isogemm
import isogemm.nn
from isogemm.verify.encoder_reference import encoder_tensors, products_of_tf32, torch_encoder
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data
from isogemm.verify.poison import poisoned_allocations
from promises.main_grads import accumulate
from promises.rows import RowFunction, count_rows, map_rows


class Encoder:
    """A layer and sequences for it: results and the gradients of x, and the main_grads of its parameters."""

    def __init__(self, shape, number, options, device):
        dtype, precision = NUMBERS[number]
        self.shape, self.number, self.what = shape, number, f"{shape} {number} {options}"
        shown = {name: options[name] for name in ("norm", "activation") if name in options}
        self.tensors = encoder_tensors(shape, dtype, device=device, **({"activation": "relu"} | shown))
        grad = make_data("normal", tuple(self.tensors["x"].shape), seed=9, dtype=dtype, device=device)
        self.rows = {"x": self.tensors["x"], "grad": grad}
        self.options = {"nhead": shape.nhead, "precision": precision, **options}
        if options.get("norm") == "batch_norm":  # in eval mode: by statistics that are there
            d = shape.d_model
            mean, var = (make_data("normal", (d,), seed=seed, device=device) / 8 for seed in (40, 41))
            batches = torch.zeros((), dtype=torch.int64, device=device)
            running = isogemm.RunningStatistics(mean, 1 + var.abs(), batches)
            self.options |= {"training": False, "running": (running, running)}
        self.parameters = {name: torch.nn.Parameter(each) for name, each in self.tensors.items() if name != "x"}

    def __call__(self, rows):
        """[S, 2, T, D]: the result, and the gradient of x."""
        leaf = rows["x"].detach().clone().requires_grad_()
        params = isogemm.EncoderParameters(**map_rows(self.parameters, torch.Tensor.detach))
        with poisoned_allocations():
            result = isogemm.encoder_layer(leaf, params, key_padding_mask=rows.get("mask"), **self.options)
            (dx,) = torch.autograd.grad(result, leaf, rows["grad"])
        return torch.stack([result.detach(), dx], 1)

    def main_grads(self, rows, cuts=(), start=None):
        params = isogemm.EncoderParameters(**self.parameters)

        def step(first, last):
            isogemm.encoder_layer(rows["x"][first:last], params, **self.options).backward(rows["grad"][first:last])

        return accumulate(self.parameters, step, count_rows(rows), cuts, start)

    def assert_right(self):
        if self.options.get("norm") == "batch_norm" or self.number == "tf32x3":
            self._assert_right_by_reference()
            return
        sequences = 3  # of which several are drawn
        options = {name: each for name, each in self.options.items() if name not in ("precision", "nhead")}
        tensors = self.tensors | {"x": self.tensors["x"][:sequences]}
        precision = self.options["precision"]
        assert_encoder_no_worse(tensors, nhead=self.shape.nhead, precision=precision, **options)

    def _assert_right_by_reference(self):
        """For batch norm, which torch's layer does not have, and tf32x3, which torch does not have.

        At most twice the error of the layer in plain torch, against the same in float64; tf32x3 is held to an eighth of
        the bound for TF32, as products are.
        """
        tf32 = self.number.startswith("tf32") and self.rows["x"].device.type != "cpu"
        compared = []
        for i in range(1 + NEARBY):
            rows = self.rows if i == 0 else map_rows(self.rows, lambda each, i=i: nearby(each, i - 1))
            with products_of_tf32() if tf32 else contextlib.nullcontext():
                theirs = self._reference(rows, self.rows["x"].dtype)
            exact = self._reference(rows, torch.float64)
            ours = self(rows) if i == 0 else exact.to(theirs.dtype)
            compared.append((ours, theirs, exact, exact.abs().amax((0, 2, 3), keepdim=True).expand_as(exact)))
        ours, theirs, exact, scale = (torch.stack(each) for each in zip(*compared, strict=True))
        factor = 2 / 8 if self.number == "tf32x3" else 2
        assert_no_worse_than_torch(ours, theirs, exact, scale=scale, factor=factor, what=self.what)

    def _reference(self, rows, dtype):
        """As __call__, in plain torch."""
        options = {name: each for name, each in self.options.items() if name != "precision"}
        if "running" in options:
            statistics = options["running"][0]
            wide = statistics._replace(mean=statistics.mean.to(dtype), var=statistics.var.to(dtype))
            options["running"] = (wide, wide)
        leaf = rows["x"].detach().to(dtype).requires_grad_()
        params = isogemm.EncoderParameters(**map_rows(self.parameters, lambda each: each.detach().to(dtype)))
        result = plain_encoder_oracle.encoder_layer(leaf, params, **options)
        (dx,) = torch.autograd.grad(result, leaf, rows["grad"].to(dtype))
        return torch.stack([result.detach(), dx], 1)

    def assert_main_grads_right(self, found):
        """At most twice torch's error; torch's is the largest over several batches, as in `assert_encoder_no_worse`."""
        options = {name: each for name, each in self.options.items() if name != "precision"}
        tf32 = self.number.startswith("tf32") and self.rows["x"].device.type != "cpu"
        draws = [self.tensors, *(map_rows(self.tensors, lambda e, i=i: nearby(e, i)) for i in range(NEARBY))]
        compared = {name: [] for name in found}
        for i, tensors in enumerate(draws):
            with products_of_tf32() if tf32 else contextlib.nullcontext():
                theirs = gradients_of(torch_encoder, tensors, self.rows["grad"], **options)
            exact = gradients_of(torch_encoder, tensors, self.rows["grad"], torch.float64, **options)
            for name, each in found.items():
                ours = (each if i == 0 else exact[name]).to(theirs[name].dtype)
                compared[name].append((ours, theirs[name], exact[name], exact[name].abs().amax().expand_as(each)))
        for name, each in compared.items():
            ours, theirs, exact, scale = (torch.stack(every) for every in zip(*each, strict=True))
            assert_no_worse_than_torch(ours, theirs, exact, scale=scale, what=f"{self.what}: {name}")

    def function(self, mask=None):
        rows = self.rows if mask is None else {**self.rows, "mask": mask}
        return RowFunction(self, rows, f"{self.what}{'' if mask is None else ', masked'}", self(rows))


def encoders(scale, number):
    for shape, options in scale.encoders:
        yield Encoder(shape, number, options, scale.device)


def encoder_functions(scale, number):
    """Each layer without a mask, and with one by which every sequence has another length."""
    for layer in encoders(scale, number):
        layer.assert_right()
        yield layer.function()
        yield layer.function(random_lengths(layer)[:, None] <= torch.arange(layer.shape.tokens, device=scale.device))


def random_lengths(layer):
    draw = random.Random(layer.shape.tokens)
    made = [draw.randint(1, layer.shape.tokens) for _ in range(layer.shape.sequences)]
    return torch.tensor(made, device=layer.rows["x"].device)


def encoder_gradients(scale, number, chunks):
    """(layer of a little more than `chunks` chunks of sequences, chunk)"""
    for shape, options in scale.encoder_gradients:
        chunk = isogemm.encoder_chunk(*shape[1:], NUMBERS[number][0], device=scale.device)
        assert chunk >= 1
        yield Encoder(shape._replace(sequences=chunks * chunk + 3), number, options, scale.device), chunk
