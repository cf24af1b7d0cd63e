"""What is to be tuned: weights and the products they are used in, from a text, a model, its config or its files."""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from isogemm.core.device import matmul_precision
from isogemm.core.errors import require_precision
from isogemm.epilogues import spec
from isogemm.gemm.op import SERVED
from isogemm.nn.linear import Linear
from isogemm.nn.mlp import MLP

_SAFETENSORS_DTYPES = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_INDEX = ".safetensors.index.json"  # ends the name of the file that lists a model's files
_LARGEST_HEADER = 100 << 20  # bytes, the format's own limit
_GIT_LFS = b"version "  # begins a pointer of Git LFS, where the file itself begins with a length
_EXPECTED = "expected a module, [N, K] tensors, or sizes such as '4096x14336'"
# The first that suits a config serves where the config names no class. The last one's models have no head.
_AUTO_MODELS = "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModel"
_EMBEDDING = re.compile(r"embed|wte|wpe", re.IGNORECASE)


@dataclass(frozen=True)
class Weight:
    """A weight [n, k] and the kinds of products (`gemm.KINDS`) that run with it."""

    n: int
    k: int
    dtype: torch.dtype
    forward: tuple[str, ...] = ("linear",)
    backward: tuple[str, ...] = ("dx", "dw")
    number: str = ""  # its arithmetic, a name in ARITHMETIC
    precision: str | None = None  # of its module, where that has one of its own

    @property
    def half(self) -> str:
        """The 16-bit type in which it is measured."""
        return "float16" if self.dtype is torch.float16 else "bfloat16"


def listed(found: Iterable[Weight], dtype: torch.dtype | None, precision: str | None) -> list[Weight]:
    """The weights to tune, each shape once, with their arithmetic.

    dtype: of all of them, as under autocast. precision: of float32 where its module has none, by default torch's.
    """
    require_precision(precision, torch.float32)
    if dtype is not None and dtype not in SERVED:
        raise ValueError(f"dtype is {dtype}; accepted: {', '.join(map(str, SERVED))}")
    merged: dict[tuple[str, int, int], Weight] = {}
    for each in found:
        served = dtype or each.dtype
        if served not in SERVED or not each.dtype.is_floating_point:
            continue  # float64 and quantized weights are torch's; those that are packed have other sizes
        number = (each.precision or precision or matmul_precision()) if served is torch.float32 else "half"
        known = merged.get((number, each.n, each.k), replace(each, number=number, dtype=served))
        merged[number, each.n, each.k] = replace(
            known, forward=_union(known.forward, each.forward), backward=_union(known.backward, each.backward)
        )
    if not merged:
        hint = "; give a dtype for weights in another one" if dtype is None else ""
        raise ValueError(f"weights: found no linear layer in {', '.join(map(str, SERVED))}{hint}")
    return list(merged.values())


def from_text(text: str) -> list[Weight]:
    """The weights of a list such as 4096x14336,1024x4096: N x K, in bfloat16."""
    sizes = [re.fullmatch(r"\s*([1-9]\d*)\s*x\s*([1-9]\d*)\s*", each) for each in text.split(",")]
    if not all(sizes):
        raise ValueError(f"weights is {text!r}; expected sizes N x K such as 4096x14336,1024x4096")
    return [Weight(int(each[1]), int(each[2]), torch.bfloat16) for each in sizes if each]


def from_torch(weights: Tensor | Iterable[Tensor] | torch.nn.Module) -> list[Weight]:
    """The linear layers of a module, or [N, K] tensors."""
    if isinstance(weights, torch.nn.Module):
        return list(_of_modules(weights))
    if not isinstance(weights, Iterable):
        raise ValueError(f"weights is a {type(weights).__name__}; {_EXPECTED}")
    made = []
    for each in (weights,) if isinstance(weights, Tensor) else weights:
        if not isinstance(each, Tensor) or each.ndim != 2 or not each.numel():
            got = f"a tensor {list(each.shape)}" if isinstance(each, Tensor) else f"a {type(each).__name__}"
            raise ValueError(f"weights: got {got}; {_EXPECTED}")
        made.append(_weight(each))
    return made


def from_config(path: Path) -> list[Weight]:
    """The linear layers of a Hugging Face config.json, or of its folder: without a download, or memory for a model."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"config is {path}; expected a Hugging Face config.json, or a folder that has one")
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a config is read with transformers, which is not installed: pip install transformers, or give --weights",
            name=error.name,
        ) from error
    try:
        model = _model(transformers, file)
    except Exception as error:  # whatever a config makes transformers raise, of a field or of a missing package
        reason = textwrap.shorten(str(error), 240) or type(error).__name__
        raise ValueError(f"config is {path}, from which transformers cannot make a model: {reason}") from error
    return from_torch(model)


def _model(transformers: Any, file: Path) -> torch.nn.Module:
    """A model of this config, on the meta device: of the class that it names, else of one that suits it."""
    config = transformers.AutoConfig.from_pretrained(file, trust_remote_code=False)
    suitable = None
    for name in _AUTO_MODELS:
        auto = getattr(transformers, name, None)
        with torch.device("meta"), suppress(ValueError):  # the config is of another kind
            if auto is not None:
                model = auto.from_config(config, trust_remote_code=False)
                suitable = suitable or model
                if type(model).__name__ in (config.architectures or ()):
                    return cast(torch.nn.Module, model)
    return cast(torch.nn.Module, suitable or transformers.AutoModel.from_config(config, trust_remote_code=False))


def from_safetensors(path: Path) -> list[Weight]:
    """The two-dimensional weights of a .safetensors file, of those that an index lists, or of a folder's.

    No tensor is read. Each is taken as [N, K]. Embeddings are left out, but for the largest one, which may be the head
    as well.
    """
    indices = sorted(path.glob(f"*{_INDEX}")) if path.is_dir() else [path] * path.name.endswith(_INDEX)
    files = [file for index in indices for file in _indexed(index)]
    files = files or (sorted(path.glob("*.safetensors")) if path.is_dir() else [path])
    if not files:
        raise ValueError(f"safetensors is {path}; expected a .safetensors file, or a folder that has some")
    tensors = {name: weight for file in files for name, weight in _header(file)}
    embeddings = [weight for name, weight in tensors.items() if _EMBEDDING.search(name)]
    others = [weight for name, weight in tensors.items() if not _EMBEDDING.search(name)]
    return others + sorted(embeddings, key=lambda weight: weight.n)[-1:]


def _indexed(index: Path) -> list[Path]:
    """The files that an index lists."""
    try:
        names = json.loads(index.read_bytes())["weight_map"].values()
        return [index.parent / name for name in dict.fromkeys(names)]
    except OSError as error:
        raise ValueError(f"safetensors: {index}: {error.strerror}") from error
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError):
        raise ValueError(f"safetensors: {index} is no index of safetensors files") from None


def _header(file: Path) -> Iterator[tuple[str, Weight]]:
    """Names and weights of a file's matrices. It begins with the length of a JSON text, in 8 bytes, and that text."""
    wrong = ValueError(f"safetensors: {file} is no safetensors file")
    try:
        with file.open("rb") as opened:
            start = opened.read(8)
            if start == _GIT_LFS:
                wrong = ValueError(f"safetensors: {file} is a pointer of Git LFS; `git lfs pull` fetches the file")
            length = int.from_bytes(start, "little")
            entries = json.loads(opened.read(length) if length <= _LARGEST_HEADER else b"")
    except OSError as error:
        raise ValueError(f"safetensors: {file}: {error.strerror}") from error
    except (ValueError, RecursionError):
        raise wrong from None
    if not isinstance(entries, dict):
        raise wrong
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = _SAFETENSORS_DTYPES.get(entry["dtype"]), list(map(int, entry["shape"]))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise wrong from None
        if dtype and len(shape) == 2 and min(shape) > 0 and name.endswith("weight"):
            yield name, Weight(shape[0], shape[1], dtype)


def _of_modules(model: torch.nn.Module) -> Iterator[Weight]:
    """The linear layers, each with what its forward and its backward run."""
    inside: set[torch.nn.Module] = set()  # layers whose forward does not run
    module: Any
    for module in model.modules():
        if isinstance(module, MLP):
            inside.update(module.modules())
            yield from _of_mlp(module)
        elif module in inside:
            continue
        elif isinstance(module, torch.nn.Linear):
            activated = isinstance(module, Linear) and module.activation is not None
            precision = module.precision if isinstance(module, Linear) else None
            yield from _of_layer(module, precision, forward=("activated" if activated else "linear",))
        elif type(module).__name__ == "Conv1D" and module.weight.ndim == 2:  # GPT-2's, whose weight is transposed
            yield from _of_layer(module, None, forward=("dx",), backward=("linear", "dw"))


def _of_mlp(mlp: MLP) -> Iterator[Weight]:
    gated = bool(spec.activation(mlp.activation).gate)
    yield from _of_layer(mlp.up, mlp.precision, forward=("gated" if gated else "activated",))
    yield from _of_layer(mlp.down, mlp.precision, backward=("gated gradient" if gated else "gradient", "dw"))


def _of_layer(
    layer: Any,
    precision: str | None,
    forward: tuple[str, ...] = Weight.forward,
    backward: tuple[str, ...] = Weight.backward,
) -> Iterator[Weight]:
    """The layer's weight, if it has any elements."""
    weight = layer.weight
    if weight.ndim != 2:  # sharded, or flattened with others
        got = f"a {type(layer).__name__} has a weight {list(weight.shape)}"
        raise ValueError(f"weights: {got}; expected [N, K], as before it is sharded")
    if weight.numel():
        yield replace(_weight(weight), forward=forward, backward=backward, precision=precision)


def _union(*kinds: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(itertools.chain(*kinds)))


def _weight(tensor: Tensor) -> Weight:
    n, k = tensor.shape
    return Weight(n, k, tensor.dtype)
