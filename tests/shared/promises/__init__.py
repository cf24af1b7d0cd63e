"""Tests of the README's table of promises, one per cell, on any device.

`tests/test_promises.py` runs them on the CPU and `tests/gpu/test_promises.py` on a GPU. A test is named
test_<stem of the table's row>_<column>. Each states that bits do not change, and that the values are right: an error
against float64 of at most twice torch's.

The modules that run them give the fixtures `scale` (sizes), `product` (an operation and its precision) and `number` (a
precision).
"""

import contextlib
import itertools
from typing import NamedTuple

import torch
from arithmetic import NUMBERS

import isogemm
import isogemm.nn
from isogemm.verify.compare import assert_bitwise_equal
from isogemm.verify.encoder_reference import EncoderShape, products_of_tf32
from isogemm.verify.errors import assert_no_worse_than_torch
from isogemm.verify.inputs import make_data, with_layout
from isogemm.verify.poison import poisoned_allocations
from promises.encoder import encoder_functions, encoder_gradients, encoders, random_lengths
from promises.main_grads import assert_same, starts
from promises.operations import attentions, row_operations, trained_operations
from promises.products import Product, Sizes, autofuse_chains, product_cases, row_functions, weight_gradients
from promises.rows import (
    RowFunction,
    assert_batch,
    assert_chunks,
    assert_decode,
    assert_micro_batches,
    assert_padding,
    garbage_rows,
    join_rows,
    map_rows,
    zero_rows,
)

__all__ = ["NUMBERS", "Promises", "Scale", "Sizes", "TinyPromises", "product_cases"]


class Scale(NamedTuple):
    """The sizes that one device can afford."""

    device: str
    rows: tuple[int, int]  # B, T: B * T rows
    weights: tuple[Sizes, ...]  # of linear
    few_weights: tuple[Sizes, ...]  # of the other operations
    batches: tuple[int, ...]  # rows in a call
    positions: tuple[int, ...]  # batches at every position of which a row is tried
    gradient_weights: tuple[Sizes, ...]
    encoders: tuple[tuple[EncoderShape, dict], ...]
    encoder_gradients: tuple[tuple[EncoderShape, dict], ...]  # the number of sequences is ignored
    attentions: tuple[tuple[int, int, dict], ...]  # tokens, head size, options

    def weights_of(self, operation):
        return self.weights if operation == "linear" else self.few_weights


class Promises:
    # products

    def test_products_batch(self, scale, product):
        for f in row_functions(scale, product, gradient=False):
            assert_batch(f, scale.batches, scale.positions)

    def test_products_padding(self, scale, product):
        for f in row_functions(scale, product, gradient=False):
            assert_padding(f)

    def test_products_chunks(self, scale, product):
        for f in row_functions(scale, product, gradient=False):
            assert_chunks(f)

    def test_products_decode(self, scale, product):
        for f in row_functions(scale, product, gradient=False):
            assert_decode(f, most=17)

    def test_products_micro_batches(self, scale, product):
        for f in row_functions(scale, product, gradient=False):
            assert_micro_batches(f)

    # input_gradients

    def test_input_gradients_batch(self, scale, product):
        for f in row_functions(scale, product, gradient=True):
            assert_batch(f, scale.batches, scale.positions[:2])

    def test_input_gradients_padding(self, scale, product):
        for f in row_functions(scale, product, gradient=True):
            assert_padding(f)

    def test_input_gradients_chunks(self, scale, product):
        for f in row_functions(scale, product, gradient=True):
            assert_chunks(f)

    def test_input_gradients_micro_batches(self, scale, product):
        for f in row_functions(scale, product, gradient=True):
            assert_micro_batches(f)

    # weight_gradients

    def test_weight_gradients_padding(self, scale, number):
        """Trailing rows whose gradient is zero, whatever x they have."""
        for trained in weight_gradients(scale, number, chunks=1):
            whole = trained.whole()
            for more in (1, 63, trained.chunk + 1):
                for kind in ("zeros", "normal"):
                    rows = join_rows(trained.rows, zero_rows(trained.rows, more))
                    if kind == "normal":
                        rows["x"][-more:] = trained.product._data("normal", rows["x"][-more:].shape, 30)
                    assert_same(trained(rows), whole, f"{trained}: {more} rows without a gradient, x {kind}")

    def test_weight_gradients_micro_batches(self, scale, number):
        for trained in weight_gradients(scale, number, chunks=3):
            whole, chunk = trained.whole(), trained.chunk
            for start in starts(trained.parameters):
                expected = whole if start is None else trained(trained.rows, start=start)
                for cuts in ([chunk], [2 * chunk], [chunk, 2 * chunk, 3 * chunk]):
                    what = f"{trained}: cut at {cuts}{'' if start is None else ', onto others'}"
                    assert_same(trained(trained.rows, cuts, start), expected, what)

    def test_weight_gradients_token_chunk(self, scale, number):
        """A positive int, of the weight or of its module, of shape and dtype alone."""
        dtype, _ = NUMBERS[number]
        for sizes in scale.gradient_weights:
            weight = torch.zeros(sizes.n, sizes.k, dtype=dtype, device=scale.device)
            chunk = isogemm.token_chunk(weight)
            assert type(chunk) is int
            assert chunk > 0
            options = {"device": scale.device, "dtype": dtype}
            for module in (isogemm.nn.Linear, torch.nn.Linear):
                assert isogemm.token_chunk(module(sizes.k, sizes.n, **options)) == chunk
            assert isogemm.token_chunk(torch.nn.Parameter(weight)) == chunk

    # encoder_layer

    def test_encoder_layer_batch(self, scale, number):
        for f in encoder_functions(scale, number):
            assert_batch(f, scale.batches, scale.positions[:2])

    def test_encoder_layer_padding(self, scale, number):
        """Tokens after a sequence's own, which a mask leaves out and whose result nobody reads."""
        for layer in encoders(scale, number):
            layer.assert_right()
            tokens, count = layer.shape.tokens, layer.shape.sequences
            expected, device = layer(layer.rows), scale.device
            for wide in (tokens + 1, 64, 128):
                for value in (0.0, 100.0):
                    more = torch.full((count, wide - tokens, layer.shape.d_model), value, dtype=expected.dtype)
                    more = more.to(device)
                    rows = join_rows(layer.rows, {"x": more, "grad": torch.zeros_like(more)}, dim=1)
                    left_out = (torch.arange(wide, device=device) >= tokens).expand(count, -1)
                    scores = torch.zeros(count, wide, dtype=expected.dtype, device=device)
                    for mask in (left_out, scores.masked_fill(left_out, -torch.inf)):
                        found = layer({**rows, "mask": mask})[:, :, :tokens]
                        what = f"{layer.what}: {tokens} tokens in {wide}, {value} behind, mask {mask.dtype}"
                        assert_bitwise_equal(found, expected, what)
            lengths = random_lengths(layer)
            mask = torch.arange(tokens, device=device) >= lengths[:, None]
            rows = {**layer.rows, "grad": layer.rows["grad"].masked_fill(mask[..., None], 0), "mask": mask}
            found = layer(rows)
            for i, own in enumerate(lengths[:5].tolist()):
                alone = layer(map_rows(layer.rows, lambda each: each[i : i + 1, :own]))  # noqa: B023
                what = f"{layer.what}: sequence {i} with {own} of {tokens} tokens"
                assert_bitwise_equal(found[i : i + 1, :, :own], alone, what)

    def test_encoder_layer_micro_batches(self, scale, number):
        for f in encoder_functions(scale, number):
            assert_micro_batches(f)

    # encoder_gradients

    def test_encoder_gradients_padding(self, scale, number):
        """Trailing sequences whose gradient is zero."""
        for layer, chunk in encoder_gradients(scale, number, chunks=1):
            whole = layer.main_grads(layer.rows)
            layer.assert_main_grads_right(whole)
            for more in (1, chunk + 1):
                shape = (more, *layer.rows["x"].shape[1:])
                other = make_data("normal", shape, seed=more, dtype=layer.rows["x"].dtype, device=scale.device)
                rows = join_rows(layer.rows, {"x": other, "grad": torch.zeros_like(other)})
                assert_same(layer.main_grads(rows), whole, f"{layer.what}: {more} sequences without a gradient")

    def test_encoder_gradients_micro_batches(self, scale, number):
        for layer, chunk in encoder_gradients(scale, number, chunks=2):
            for start in starts(layer.parameters):
                whole = layer.main_grads(layer.rows, start=start)
                if start is None:
                    layer.assert_main_grads_right(whole)
                for cuts in ([chunk], [2 * chunk], [chunk, 2 * chunk]):
                    what = f"{layer.what}: cut at {cuts}{'' if start is None else ', onto others'}"
                    assert_same(layer.main_grads(layer.rows, cuts, start), whole, what)

    # operations

    def test_operations_batch(self, scale, number):
        for f in row_operations(scale, number, gradient=False):
            assert_batch(f, scale.batches, scale.positions[:1])

    def test_operations_padding(self, scale, number):
        for f in row_operations(scale, number, gradient=False):
            assert_padding(f)

    def test_operations_chunks(self, scale, number):
        for f in row_operations(scale, number, gradient=False):
            assert_chunks(f)

    def test_operations_decode(self, scale, number):
        for f in row_operations(scale, number, gradient=False):
            assert_decode(f, most=5)

    def test_operations_micro_batches(self, scale, number):
        for f in row_operations(scale, number, gradient=False):
            assert_micro_batches(f)

    # operation_input_gradients

    def test_operation_input_gradients_batch(self, scale, number):
        for f in row_operations(scale, number, gradient=True):
            assert_batch(f, scale.batches[:3], scale.positions[:1])

    def test_operation_input_gradients_padding(self, scale, number):
        for f in row_operations(scale, number, gradient=True):
            assert_padding(f)

    def test_operation_input_gradients_chunks(self, scale, number):
        for f in row_operations(scale, number, gradient=True):
            assert_chunks(f)

    def test_operation_input_gradients_micro_batches(self, scale, number):
        for f in row_operations(scale, number, gradient=True):
            assert_micro_batches(f)

    # operation_weight_gradients

    def test_operation_weight_gradients_padding(self, scale, number):
        """Trailing rows whose gradient is zero."""
        for trained in trained_operations(scale, number, chunks=1):
            whole = trained(trained.rows)
            rows = join_rows(trained.rows, {"x": trained.rows["x"][:65], "grad": trained.rows["grad"][:65] * 0})
            assert_same(trained(rows), whole, f"{trained.what}: 65 rows without a gradient")

    def test_operation_weight_gradients_micro_batches(self, scale, number):
        for trained in trained_operations(scale, number, chunks=2):
            for start in starts(trained.parameters):
                whole = trained(trained.rows, start=start)
                found = trained(trained.rows, [trained.chunk], start)
                assert_same(found, whole, f"{trained.what}: cut at {trained.chunk}")

    # attention

    def test_attention_batch(self, scale, number):
        for each in attentions(scale, number):
            rows = {name: each.rows[name] for name in "qkv"}
            whole = each.attend(**rows)
            f = RowFunction(lambda rows, each=each: each.attend(**rows), rows, each.what, whole)
            assert_batch(f, (1, 2, 3), (3,))

    def test_attention_padding(self, scale, number):
        """Garbage before a sequence (kv_starts) and after it (kv_lengths), and queries that see nothing."""
        for each in attentions(scale, number):
            rows = {name: each.rows[name] for name in "qkv"}
            whole = each.attend(**rows)
            count, _, tokens, _ = rows["q"].shape
            for before, after in ((0, 3), (5, 0), (70, 1)):
                wide = {
                    name: torch.cat([garbage_rows({"x": x.transpose(0, 2)}, n)["x"].transpose(0, 2) for n in (before,)]
                                    + [x] + [garbage_rows({"x": x.transpose(0, 2)}, after)["x"].transpose(0, 2)], 2)
                    for name, x in rows.items()
                }  # fmt: skip
                starts_at = torch.full((count,), before, dtype=torch.int32, device=scale.device)
                found = each.attend(
                    wide["q"][:, :, : before + tokens], wide["k"], wide["v"], kv_starts=starts_at,
                    kv_lengths=starts_at + tokens,
                )  # fmt: skip
                what = f"{each.what}: {before} before, {after} after"
                assert_bitwise_equal(found[:, :, before:], whole, what)
                assert not found[:, :, :before].any(), what

    def test_attention_chunks(self, scale, number):
        for each in attentions(scale, number):
            q, k, v = (each.rows[name] for name in "qkv")
            whole, tokens = each.attend(q, k, v), q.shape[2]
            for cuts in ([1], [tokens // 2], [3, tokens - 2], [64, 65]):
                bounds = [0, *(cut for cut in cuts if cut < tokens), tokens]
                parts = [
                    each.attend(q[:, :, first:last], k[:, :, :last], v[:, :, :last])
                    for first, last in itertools.pairwise(bounds)
                ]
                assert_bitwise_equal(torch.cat(parts, 2), whole, f"{each.what}: in chunks {bounds}")

    def test_attention_decode(self, scale, number):
        """Token by token, from a growing cache and from a larger one with garbage behind."""
        for each in attentions(scale, number):
            q, k, v = (each.rows[name] for name in "qkv")
            whole, tokens = each.attend(q, k, v), q.shape[2]
            static = [torch.cat([x, torch.full_like(x[:, :, :9], torch.nan)], 2) for x in (k, v)]
            for at in sorted({0, 1, 2, 63, 64, 65, tokens // 2, tokens - 1} & set(range(tokens))):
                query = q[:, :, at : at + 1]
                found = each.attend(query, k[:, :, : at + 1], v[:, :, : at + 1])
                assert_bitwise_equal(found, whole[:, :, at : at + 1], f"{each.what}: token {at}")
                lengths = torch.full((len(q),), at + 1, dtype=torch.int32, device=scale.device)
                found = each.attend(query, *static, kv_lengths=lengths)
                assert_bitwise_equal(found, whole[:, :, at : at + 1], f"{each.what}: token {at}, larger cache")

    def test_attention_micro_batches(self, scale, number):
        for each in attentions(scale, number):
            rows = {name: each.rows[name] for name in "qkv"}
            f = RowFunction(lambda rows, each=each: each.attend(**rows), rows, each.what, each.attend(**rows))
            assert_micro_batches(f)

    # attention_gradients

    def test_attention_gradients_batch(self, scale, number):
        for each in attentions(scale, number):
            whole = each.gradients(each.rows)
            for first, last in ((0, 1), (2, 3), (1, 5)):
                part = each.gradients({name: x[first:last] for name, x in each.rows.items()})
                for name, found, expected in zip("qkv", part, whole, strict=True):
                    assert_bitwise_equal(found, expected[first:last], f"{each.what}: d{name} of {first} to {last}")

    def test_attention_gradients_padding(self, scale, number):
        """Left-padded, and packed without padding."""
        for each in attentions(scale, number):
            whole, rows = each.gradients(each.rows), each.rows
            count, before = len(rows["q"]), 7
            wide = {name: torch.cat([torch.randn_like(x[:, :, :before]), x], 2) for name, x in rows.items()}
            wide["grad"][:, :, :before] = 1
            starts_at = torch.full((count,), before, dtype=torch.int32, device=scale.device)
            found = each.gradients(wide, kv_starts=starts_at)
            for name, padded, expected in zip("qkv", found, whole, strict=True):
                assert_bitwise_equal(padded[:, :, before:], expected, f"{each.what}: d{name}, padded")
                assert not padded[:, :, :before].any(), f"{each.what}: d{name} of padding"
            tokens = rows["q"].shape[2]
            leaves = [rows[name].transpose(1, 2).flatten(0, 1).detach().requires_grad_() for name in "qkv"]
            lengths = torch.arange(count + 1, dtype=torch.int32, device=scale.device) * tokens
            out = isogemm.attention_varlen(*leaves, lengths, lengths, **each.options)
            packed = torch.autograd.grad(out, leaves, rows["grad"].transpose(1, 2).flatten(0, 1))
            for name, found, expected in zip("qkv", packed, whole, strict=True):
                expected = expected.transpose(1, 2).flatten(0, 1)
                assert_bitwise_equal(found, expected, f"{each.what}: d{name}, packed")

    # autofuse

    def test_autofuse_batch(self, scale, number):
        """A fused chain has the bits of the explicit call, and so those of a row alone."""
        precision = NUMBERS[number][1]
        if precision == "tf32x3":  # no setting of torch's, which plain code has its precision from
            precision = "ieee"
        before = torch.backends.cuda.matmul.fp32_precision
        torch.backends.cuda.matmul.fp32_precision = precision or "ieee"
        try:
            self._assert_autofuse(scale, number, precision)
        finally:
            torch.backends.cuda.matmul.fp32_precision = before

    def _assert_autofuse(self, scale, number, precision):
        for sizes in scale.few_weights:
            tensors = Product("swiglu", number, sizes, max(scale.batches), scale.device)
            named = {**tensors.rows, **tensors.parameters}
            named["b"] = named["weight"].mT.contiguous()
            named["residual"] = tensors._rows((max(scale.batches), sizes.n), 3)
            for name, (plain, explicit) in autofuse_chains(precision).items():
                for size in (*scale.batches, 1):
                    x = named["x"][:size]
                    with torch.no_grad():
                        expected = explicit(x, named)
                        with isogemm.autofuse() as report:
                            found = plain(x, named)
                        assert sum(report.fused.values()) == 1, f"{name}: {report}"
                        assert_bitwise_equal(found, expected, f"{name} {number} {sizes}: {size} rows")
                        alone = explicit(x[:1], named)
                    assert_bitwise_equal(found[:1], alone, f"{name} {number} {sizes}: row 0 of {size}")


class TinyPromises:
    """Promised where the tiny kernels serve, which is on a GPU."""

    def test_bmm_batch(self, number):
        dtype, precision = NUMBERS[number]
        served = 0
        for m, k, n, layout in ((12, 64, 12, "transposed"), (3, 7, 5, "contiguous"), (17, 17, 17, "contiguous")):
            a = make_data("normal", (1000, m, k), seed=0, dtype=dtype, device="cuda")
            b = with_layout(make_data("wide", (1000, k, n), seed=1, dtype=dtype, device="cuda"), layout)
            with isogemm.dispatch_log() as log:
                whole = isogemm.bmm(a, b, precision=precision)
            if log[-1].path != "tiny":
                continue
            served += 1
            exact, size = torch.bmm(a.double(), b.double()), torch.bmm(a.double().abs(), b.double().abs())
            with products_of_tf32() if number == "tf32" else contextlib.nullcontext():
                theirs = torch.bmm(a, b)
            assert_no_worse_than_torch(whole, theirs, exact, scale=size, what=f"bmm {m}x{k}x{n} {number}")

            def call(rows):
                with poisoned_allocations():
                    return isogemm.bmm(rows["a"], rows["b"], precision=precision)

            with isogemm.dispatch_log() as log:
                for first, last in ((0, 2), (1, 3), (998, 1000), (500, 517), (0, 127), (3, 1000)):
                    found = call({"a": a[first:last], "b": b[first:last]})
                    assert_bitwise_equal(found, whole[first:last], f"matrices {first} to {last}")
                for count in (2, 3, 17):
                    for position in range(count):
                        others = garbage_rows({"a": a, "b": b}, count)
                        others["a"][position], others["b"][position] = a[position], b[position]
                        found = call(others)[position]
                        assert_bitwise_equal(found, whole[position], f"at {position} of {count}")
            assert {entry.path for entry in log} == {"tiny"}
        assert served
