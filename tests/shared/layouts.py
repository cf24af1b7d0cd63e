"""The same tensors with other strides."""

import itertools

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from isogemm.verify import inputs

EVERY_LAYOUT = (*inputs.LAYOUTS, "broadcast")
_VARIED = ("transposed", "strided", "broadcast", "turned")


def with_layout(x, layout):
    """`inputs.with_layout`, or "broadcast": the first element of axis 0, repeated with stride 0."""
    if layout == "broadcast":
        return inputs.with_layout(x[:1], "contiguous").expand(x.shape) if len(x) else x.clone()
    return inputs.with_layout(x, layout)


def layouts_for(ndim):
    """Those of EVERY_LAYOUT that a tensor of `ndim` axes can have."""
    least = {"contiguous": 0, "misaligned": 0, "transposed": 2, "broadcast": 3}
    return tuple(layout for layout in EVERY_LAYOUT if ndim >= least.get(layout, 1))


def _arranged(x, layout):
    if layout == "turned":  # with the first dimension last in memory
        return x.movedim(0, -1).contiguous().movedim(-1, 0)
    return with_layout(x, layout if layout in layouts_for(x.ndim) else "strided")


def variations(tensors):
    """(what, tensors): as they are, and every one in every layout, another one each at a time; of a dict of tensors."""
    yield "as they are", tensors
    matrices = [name for name, x in tensors.items() if x.ndim and x.is_floating_point()]
    for first in range(len(_VARIED)):
        chosen = dict(zip(matrices, itertools.islice(itertools.cycle(_VARIED), first, None), strict=False))
        yield str(chosen), tensors | {name: _arranged(tensors[name], layout) for name, layout in chosen.items()}


def assert_fakes_agree(operator, arguments):
    """An operator's fake gives what it does, in dtype, shape and strides, for tensors of any strides."""
    tensors = {place: x for place, x in enumerate(arguments) if isinstance(x, torch.Tensor)}
    for what, varied in variations(tensors):
        real = operator(*(varied.get(place, x) for place, x in enumerate(arguments)))
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = {place: mode.from_tensor(x) for place, x in varied.items()}
            fake = operator(*(fakes.get(place, x) for place, x in enumerate(arguments)))
        assert tree_map_only(torch.Tensor, _look, fake) == tree_map_only(torch.Tensor, _look, real), what


def _look(x):
    return x.dtype, x.shape, x.stride()
