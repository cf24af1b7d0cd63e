"""Encoder layers that go to a plan at once: with the launches that they would have had without being known."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from idle_gpu import idle_gpu  # noqa: F401

import isogemm
from isogemm.core.plan import clear_caches
from isogemm.encoder import api

S, T, D, F = 8, 16, 64, 64  # a square linear1: w1 and w2 look the same


def _parameters(**absent):
    shapes = ((3 * D, D), (D, D), (F, D), (D, F), (D,), (D,), (3 * D,), (D,), (F,), (D,), (D,), (D,))
    named = zip(isogemm.EncoderParameters._fields, shapes, strict=True)
    return isogemm.EncoderParameters(**{name: torch.zeros(shape) for name, shape in named if name not in absent})


CALLS = {
    "plain": {},
    "other heads": {"nhead": 8},
    "norms first": {"norm_first": True},
    "gelu": {"activation": "gelu"},
    "causal": {"is_causal": True},
    "other eps": {"eps": 1e-3},
    "tf32": {"precision": "tf32"},
    "mask": {"mask": torch.bool},
    "additive mask": {"mask": torch.float32},
    "dropout off": {"dropout": 0.5, "training": False},
    "dropout": {"dropout": 0.5},
    "rms_norm": {"norm": "rms_norm", "absent": ("norm1_bias", "norm2_bias")},
    "no biases of norms": {"absent": ("norm1_bias", "norm2_bias")},
    "no bias of linear2": {"absent": ("linear2_bias",)},
    "no bias of out_proj": {"absent": ("out_proj_bias",)},
    "batch_norm": {"norm": "batch_norm"},
    "scores": {"return_scores": True},
}


def _make(mask=None, absent=(), **options):
    given = {"nhead": 4, "precision": "ieee"} | options
    if mask is not None:
        given["key_padding_mask"] = torch.zeros(S, T, dtype=mask)
    return torch.zeros(S, T, D), _parameters(**dict.fromkeys(absent)), given


def _launches(launched, call):
    """The launches of a call; an address that is none of its tensors', of memory that it allocates, is None."""
    x, params, options = call
    tensors = [x, options.get("key_padding_mask"), *params]
    addresses = {each.data_ptr() for each in tensors if each is not None}
    launched.clear()
    isogemm.encoder_layer(x, params, **options)
    return [
        (name, programs, tuple(None if _is_address(each) and each not in addresses else each for each in arguments))
        for name, programs, arguments in launched
    ]


def _is_address(argument):
    return isinstance(argument, int) and argument > 1 << 32


@torch.no_grad()
def test_a_known_layer_launches_what_an_unknown_one_does(idle_gpu):  # noqa: F811
    for _, options in itertools.product(range(3), CALLS.values()):
        _launches(idle_gpu, _make(**options))
    known = {name: _make(**options) for name, options in CALLS.items()}
    warm = {name: _launches(idle_gpu, call) for name, call in known.items()}
    for name, call in known.items():
        clear_caches()
        assert warm[name], name
        assert warm[name] == _launches(idle_gpu, call), name


@torch.no_grad()
def test_which_layers_are_known(idle_gpu):  # noqa: F811
    """All but those that draw a seed, take statistics or return more than y."""
    unknown = []
    for name, options in CALLS.items():
        clear_caches()
        x, params, given = _make(**options)
        for _ in range(3):
            isogemm.encoder_layer(x, params, **given)
        if not api._known_layers._cache:
            unknown.append(name)
    assert unknown == ["dropout", "batch_norm", "scores"]


def test_gradients_and_the_log_are_never_skipped(idle_gpu):  # noqa: F811
    x, params, options = _make()
    params.linear2_bias.requires_grad_()
    with torch.no_grad():
        for _ in range(3):
            isogemm.encoder_layer(x, params, **options)
        with isogemm.dispatch_log() as log:
            isogemm.encoder_layer(x, params, **options)
    assert [entry.path for entry in log] == ["fused"]
    assert isogemm.encoder_layer(x, params, **options).requires_grad


@torch.no_grad()
def test_autocast_s_dtype_is_followed(idle_gpu, monkeypatch):  # noqa: F811
    """The guards see that it is on, not to which dtype."""
    call, launched = _make(), []
    for dtype in (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float16):
        monkeypatch.setattr(api, "autocast_dtype", lambda x, dtype=dtype: dtype)
        x, params, options = call
        isogemm.encoder_layer(x, params, **(options | {"precision": None}))
        launched.append(len(api._known_layers._cache))
    assert launched == [0] * 4


@torch.no_grad()
@pytest.mark.parametrize(("name", "wrong"), [("nhead", 4.0), ("return_scores", "")])
def test_wrong_arguments_are_refused_though_equal_ones_are_known(idle_gpu, name, wrong):  # noqa: F811
    x, params, options = _make()
    for _ in range(3):
        isogemm.encoder_layer(x, params, **options)
    with pytest.raises(ValueError, match=f"{name} is"):
        isogemm.encoder_layer(x, params, **(options | {name: wrong}))
