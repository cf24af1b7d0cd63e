"""NaN and Inf of results, compared with a reference."""

import torch


def assert_same_nonfinite(actual, reference, what=""):
    """Assert that NaN, +Inf and -Inf stand where `reference`, rounded to `actual`'s dtype, has them."""
    __tracebackhide__ = True
    rounded = reference.to(actual.dtype)
    for name, present in (("NaN", torch.isnan), ("+Inf", torch.isposinf), ("-Inf", torch.isneginf)):
        differs = present(actual) != present(rounded)
        if bool(differs.any()):
            coordinate = tuple(differs.nonzero()[0].tolist())
            raise AssertionError(
                f"{what}: {name} in other places than the reference ({int(differs.sum())} elements), first at "
                f"{coordinate}: got {actual[coordinate].item()!r}, reference {reference[coordinate].item()!r}"
            )
