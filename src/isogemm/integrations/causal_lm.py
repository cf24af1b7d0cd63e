"""`invariance_report`: which parts of a causal LM give a sequence other bits in a batch, padded or chunked than alone.

Every part is judged on its own. The sequence runs alone once, and the inputs and outputs of each module are recorded.
When it runs in another way, its rows are compared at the same places and then replaced by the recorded ones, so that no
part gets a difference that another made.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from isogemm.core.errors import require_module
from isogemm.nn.linear import Linear
from isogemm.nn.mlp import MLP
from isogemm.nn.swap import summarize, without_indices

# What computed a tensor: a module without submodules (or an MLP), a module with submodules, or a module's caller.
Part = Literal["module", "ops inside", "ops before"]

_COVERED = (Linear, MLP)
_INT_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Comparison:
    """A sequence's elements at one place of the model, against those of the sequence alone."""

    way: str  # batch, padded, chunked
    part: Part
    module: str  # its name in the model; the model itself is ""
    type: str
    covered: bool  # an isogemm.nn.Linear or MLP computed them
    differing: int
    total: int  # 0: no element could be identified as the sequence's

    @property
    def equal(self) -> bool:
        return self.total > 0 and self.differing == 0


@dataclass(frozen=True)
class InvarianceReport:
    """What `invariance_report` found; prints as a table."""

    title: str
    ways: Mapping[str, str]  # name, in words
    logits: tuple[Comparison, ...]  # of each way, from end to end
    parts: tuple[Comparison, ...]  # of each way and part, given what entered it when the sequence ran alone
    bypassed: tuple[str, ...]  # isogemm layers whose forward never ran; their weights may be read past it

    @property
    def covered(self) -> tuple[Comparison, ...]:
        return tuple(part for part in self.parts if part.covered)

    @property
    def varying(self) -> tuple[Comparison, ...]:
        return tuple(part for part in self.parts if part.differing)

    def __str__(self) -> str:
        kinds: defaultdict[tuple[str, str, Part, bool], list[Comparison]] = defaultdict(list)
        for part in self.parts:
            kinds[without_indices(part.module), part.type, part.part, part.covered].append(part)
        varying = {kind: parts for kind, parts in kinds.items() if any(part.differing for part in parts)}
        table = [
            ["", "", *self.ways],
            ["logits, end to end", "", *self._cells(self.logits)],
            *(
                [_label(parts), "isogemm" if parts[0].covered else "torch", *self._cells(parts)]
                for kind, parts in kinds.items()
                if parts[0].part == "module" or kind in varying
            ),
        ]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [self.title, *(f"  {name}: {words}" for name, words in self.ways.items())]
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        lines += [f"still varies: {_label(parts)}" for parts in varying.values()] or ["nothing compared varies"]
        lines += [
            f"isogemm never called: {name}, whose weight may be read past it" for name in summarize(self.bypassed)
        ]
        return "\n".join(lines)

    def _cells(self, parts: Sequence[Comparison]) -> Iterator[str]:
        for way in self.ways:
            differing = sum(part.differing for part in parts if part.way == way)
            total = sum(part.total for part in parts if part.way == way)
            yield f"{differing} of {total} differ" if differing else "equal" if total else "not compared"


def _label(parts: Sequence[Comparison]) -> str:
    [name] = summarize({part.module: None for part in parts})
    where = f"{name or 'the model'} ({parts[0].type})"
    return where if parts[0].part == "module" else f"{parts[0].part} {where}"


def invariance_report(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    *,
    batch: int | None = 4,
    pad: int | None = 7,
    chunks: int | Sequence[int] | None = 3,
) -> InvarianceReport:
    """Compare, bit by bit and part by part, how a causal LM computes one sequence alone and in other ways.

    Args:
        model: as of transformers, with logits and a key-value cache. Run in eval mode, left as it was.
        input_ids: the sequence, [L] or [1, L].
        batch: sequences of the batch that holds it; the others are its rotations. None leaves this way out.
        pad: tokens to its right that the attention mask hides, or None.
        chunks: how many chunks it is prefilled in, or their lengths, or None.

    Modules whose rows cannot be identified as the sequence's (an expert's gathered tokens) are "not compared". What
    they contribute shows in the ops around them.
    """
    weight = _weight(model)
    ids = _sequence(input_ids).to(weight.device)
    calls = _calls(ids, batch, pad, chunks)
    alone = [_Call(ids[None], 0, 0, len(ids), len(ids))]
    with _evaluating(model):
        recorded: dict[_Place, torch.Tensor] = {}

        def record(call: _Call, place: _Place, tensor: torch.Tensor) -> torch.Tensor:
            recorded[place] = tensor.clone()
            return tensor

        expected = _logits(model, alone, record)
        end_to_end: list[Comparison] = []
        parts: list[Comparison] = []
        for way, (_, way_calls) in calls.items():
            differing = _count_differing(_logits(model, way_calls), expected)
            end_to_end.append(
                Comparison(way, "ops inside", "", type(model).__name__, False, differing, expected.numel())
            )
            parts += _judge(model, way, way_calls, recorded)
    called = {place.module for place in recorded}
    return InvarianceReport(
        title=f"{type(model).__name__}, {len(ids)} tokens, {weight.dtype} on {weight.device}: bits against those alone",
        ways={way: words for way, (words, _) in calls.items()},
        logits=tuple(end_to_end),
        parts=tuple(parts),
        bypassed=tuple(name for name, module in _parts(model) if isinstance(module, _COVERED) and name not in called),
    )


_Index = tuple[int | slice, ...]


class _Place(NamedTuple):
    """Where a tensor enters or leaves a module."""

    module: str
    side: Literal["input", "output"]
    call: int  # of the module, in one forward of the model
    path: tuple[object, ...]  # in the arguments or the output


@dataclass(frozen=True)
class _Call:
    """One forward of the model, and the sequence's tokens in it."""

    input_ids: torch.Tensor  # [B, T]
    row: int
    start: int  # of the tokens, in the sequence
    count: int
    length: int  # of the sequence
    attention_mask: torch.Tensor | None = None

    def align(self, shape: torch.Size, alone: torch.Size) -> tuple[_Index, _Index] | None:
        """Return the index of the sequence's part of a tensor, and that in the tensor alone; None if unknown.

        Known are [B, ...] with the tokens on any later axis, the same shared by the batch, and [B * T, ...].
        """
        batch, tokens = self.input_ids.shape
        mine, theirs = slice(0, self.count), slice(self.start, self.start + self.count)
        if len(shape) != len(alone) or not shape:
            return None
        if alone[0] == self.length and shape == (batch * tokens, *alone[1:]):
            first = self.row * tokens
            return (slice(first, first + self.count),), (theirs,)
        if alone[0] != 1 or shape[0] not in (1, batch) or self.length not in alone[1:]:
            return None
        row = self.row if shape[0] == batch else 0
        unlike = [axis for axis in range(1, len(shape)) if shape[axis] != alone[axis]]
        if not unlike:
            return (row,), (0,)
        if len(unlike) > 1 or (shape[unlike[0]], alone[unlike[0]]) != (tokens, self.length):
            return None
        between = (slice(None),) * (unlike[0] - 1)
        return (row, *between, mine), (0, *between, theirs)


_See = Callable[[_Call, _Place, torch.Tensor], torch.Tensor]


def _parts(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """Return the modules that are called: an MLP does not call its layers, and refuses hooks on them."""
    within = {id(layer) for mlp in model.modules() if isinstance(mlp, MLP) for layer in mlp.children()}
    return [(name, module) for name, module in model.named_modules() if id(module) not in within]


def _judge(
    model: torch.nn.Module, way: str, calls: Sequence[_Call], recorded: Mapping[_Place, torch.Tensor]
) -> Iterator[Comparison]:
    differing: Counter[tuple[str, str]] = Counter()
    total: Counter[tuple[str, str]] = Counter()

    def heal(call: _Call, place: _Place, tensor: torch.Tensor) -> torch.Tensor:
        key = place.module, place.side
        total[key] += 0  # listed even if nothing can be compared
        alone = recorded.get(place)
        aligned = call.align(tensor.shape, alone.shape) if alone is not None else None
        if alone is None or aligned is None or tensor.dtype != alone.dtype:
            return tensor
        mine, theirs = tensor[aligned[0]], alone[aligned[1]]
        total[key] += mine.numel()
        count = _count_differing(mine, theirs)
        if count:
            differing[key] += count
            tensor = tensor.clone()  # something else may read what came
            tensor[aligned[0]] = theirs
        return tensor

    _logits(model, calls, heal)
    modules = dict(_parts(model))
    for (name, side), elements in total.items():
        module = modules[name]
        leaf = isinstance(module, MLP) or next(module.children(), None) is None
        part: Part = "ops before" if side == "input" else "module" if leaf else "ops inside"
        if elements or part == "module":
            covered = part == "module" and isinstance(module, _COVERED)
            yield Comparison(way, part, name, type(module).__name__, covered, differing[name, side], elements)


def _logits(model: torch.nn.Module, calls: Sequence[_Call], see: _See | None = None) -> torch.Tensor:
    """Return the sequence's logits [L, V]. `see` may replace every tensor that enters or leaves a module."""
    rows = []
    arguments: dict[str, Any] = {"use_cache": len(calls) > 1}
    for call in calls:
        if call.attention_mask is not None:
            arguments["attention_mask"] = call.attention_mask
        with nullcontext() if see is None else _watched(model, call, see):
            output = model(input_ids=call.input_ids, **arguments)
        if not hasattr(output, "logits"):
            raise TypeError(f"model gave a {type(output).__name__}; expected a causal LM's output, with logits")
        if arguments["use_cache"]:
            arguments["past_key_values"] = output.past_key_values
        rows.append(output.logits[call.row, : call.count])
    return torch.cat(rows)


@contextmanager
def _watched(model: torch.nn.Module, call: _Call, see: _See) -> Iterator[None]:
    times: Counter[str] = Counter()

    def shown(name: str, side: Literal["input", "output"], value: object) -> object:
        return _map_tensors(lambda path, tensor: see(call, _Place(name, side, times[name], path), tensor), value)

    def before(name: str, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        times[name] += 1
        return shown(name, "input", (args, kwargs))

    def after(name: str, module: torch.nn.Module, args: Any, output: Any) -> Any:
        return shown(name, "output", output)

    with ExitStack() as handles:
        for name, module in _parts(model):
            handles.enter_context(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
            handles.enter_context(module.register_forward_hook(partial(after, name)))
        yield


def _map_tensors(
    function: Callable[[tuple[object, ...], torch.Tensor], torch.Tensor], value: object, path: tuple[object, ...] = ()
) -> object:
    """Map the tensors in tuples, lists and mappings; other values, such as caches, stay as they are."""
    if isinstance(value, torch.Tensor):
        return function(path, value)
    if isinstance(value, tuple | list) and type(value) in (tuple, list):
        return type(value)(_map_tensors(function, item, (*path, at)) for at, item in enumerate(value))
    if isinstance(value, dict):  # transformers' outputs are dicts
        mapped = copy.copy(value)
        for key, item in value.items():
            mapped[key] = _map_tensors(function, item, (*path, key))
        return mapped
    return value


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def _count_differing(a: torch.Tensor, b: torch.Tensor) -> int:
    differs = _bits(a) != _bits(b)
    return int((differs.any(-1) if a.is_complex() else differs).sum())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.view(_INT_OF_SIZE[tensor.element_size()])


def _weight(model: torch.nn.Module) -> torch.Tensor:
    """Return a weight, for its device and dtype, of what must be a causal LM."""
    require_module("model", model)
    try:
        inspect.signature(model.forward).bind(input_ids=None, use_cache=None)
        return next(model.parameters())
    except TypeError as error:
        why = f"its forward takes no input_ids= and use_cache= ({error})"
    except StopIteration:
        why = "it has no parameters"
    raise TypeError(f"model is a {type(model).__name__}; expected a causal LM as of transformers: {why}")


def _require_count(name: str, value: object, least: int, of: str) -> None:
    if not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; expected an integer, or None to leave this way out")
    if value < least:
        raise ValueError(f"{name} is {value}; expected at least {least} {of}, or None")


def _sequence(input_ids: torch.Tensor) -> torch.Tensor:
    if not isinstance(input_ids, torch.Tensor) or input_ids.is_floating_point():
        raise TypeError(f"input_ids is {input_ids!r}; expected a tensor of token ids")
    ids = input_ids[0] if input_ids.ndim == 2 and len(input_ids) == 1 else input_ids
    if ids.ndim != 1 or len(ids) == 0:
        raise ValueError(f"input_ids has shape {list(input_ids.shape)}; expected one sequence, [L] or [1, L]")
    return ids


def _calls(
    ids: torch.Tensor, batch: int | None, pad: int | None, chunks: int | Sequence[int] | None
) -> dict[str, tuple[str, list[_Call]]]:
    """Return each way as words and as calls of the model."""
    length = len(ids)
    ways: dict[str, tuple[str, list[_Call]]] = {}
    if batch is not None:
        _require_count("batch", batch, 2, "sequences")
        row = batch // 2
        rotations = torch.stack([ids.roll(index - row) for index in range(batch)])
        ways["batch"] = f"sequence {row} of {batch}", [_Call(rotations, row, 0, length, length)]
    if pad is not None:
        _require_count("pad", pad, 1, "token")
        padded = torch.nn.functional.pad(ids, (0, pad))[None]
        mask = torch.nn.functional.pad(torch.ones_like(ids), (0, pad))[None]
        ways["padded"] = f"{pad} tokens to the right", [_Call(padded, 0, 0, length, length, mask)]
    if chunks is not None:
        lengths = _chunk_lengths(chunks, length)
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        ways["chunked"] = (
            f"prefilled {' + '.join(map(str, lengths))} tokens",
            [
                _Call(ids[None, start : start + count], 0, start, count, length)
                for start, count in zip(starts, lengths, strict=True)
            ],
        )
    return ways


def _chunk_lengths(chunks: int | Sequence[int], length: int) -> list[int]:
    if isinstance(chunks, int):
        if not 2 <= chunks <= length:
            few = f"2 to {length}, the number of tokens, lengths, or None" if length > 1 else "None: there is one token"
            raise ValueError(f"chunks is {chunks}; expected {few}")
        return [length * (index + 1) // chunks - length * index // chunks for index in range(chunks)]
    if not isinstance(chunks, Sequence) or not all(isinstance(length, int) for length in chunks):
        raise TypeError(f"chunks is {chunks!r}; expected a number of chunks, their lengths, or None")
    lengths = list(chunks)
    if sum(lengths) != length or min(lengths) < 1 or len(lengths) < 2:
        raise ValueError(f"chunks is {lengths}; expected 2 or more positive lengths with the sum {length}, the tokens")
    return lengths
