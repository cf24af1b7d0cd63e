"""What is made of the list of operands: places, shapes, the operator's schema, what is compiled in."""

import inspect

import pytest
import torch

import isogemm
from isogemm.epilogues import operands
from isogemm.epilogues.operands import DEFAULTS, PLACES, SHAPES, STRIDES, TENSORS, Epilogue, Operands

X = torch.zeros(2)


def test_every_tensor_has_a_place_of_its_own():
    assert sorted(PLACES.values()) == list(range(len(TENSORS)))
    assert set(operands.MATRICES) | set(operands.VECTORS) < set(SHAPES) < set(PLACES)
    aux = [PLACES[name] for name in TENSORS if name.startswith("aux")]
    assert aux == list(range(aux[0], aux[0] + len(aux)))
    assert len(operands.MATRICES) + 2 * len(aux) == STRIDES


def test_the_schema_has_every_operand():
    schema = torch._C.parse_schema(f"some({operands.SCHEMA}) -> Tensor")
    assert [each.name for each in schema.arguments] == list(Operands._fields)
    types = {each.name: str(each.type) for each in schema.arguments}
    assert {types[name] for name in SHAPES} == {"Optional[Tensor]"}


@pytest.mark.parametrize("function", [isogemm.linear, isogemm.matmul_fused])
def test_public_functions_have_every_keyword(function):
    shown = inspect.signature(function).parameters
    assert {name: shown[name].default for name in DEFAULTS} == DEFAULTS


COMPILED = {  # of an operand: what it compiles in
    "bias": Epilogue(bias="n"),
    "bias_up": Epilogue(bias_up=True),
    "residual": Epilogue(residual=True),
    "row_scale": Epilogue(row_scale=True),
    "col_scale": Epilogue(col_scale=True),
    "alpha": Epilogue(alpha="device"),
    "beta": Epilogue(beta="device"),
    "c": Epilogue(),  # with beta alone
}


@pytest.mark.parametrize("name", SHAPES)
def test_operands_that_are_compiled_in(name):
    assert Operands(**{name: X}).compiled(torch.bfloat16, None, "") == COMPILED[name]


def test_numbers_that_are_compiled_in():
    def compiled(**given):
        return Operands(**given).compiled(torch.bfloat16, None, "")

    assert compiled() == operands.NOTHING
    assert compiled(alpha_value=2.0) == Epilogue(alpha="host")
    assert compiled(beta_value=2.0, c=X) == Epilogue(beta="host")
    assert compiled(dropout_p=0.5) == Epilogue(dropout=True)
    assert compiled(bias=X, bias_dim=-2) == Epilogue(bias="m")


@pytest.mark.parametrize(
    ("given", "saved"),
    [
        ({}, ""),
        ({"activation": "relu"}, "mask"),
        ({"activation": "gelu"}, "pre"),
        ({"activation": "sigmoid"}, "out"),
        ({"activation": "sigmoid", "residual": X}, "pre"),
        ({"activation": "sigmoid", "dropout_p": 0.5}, "pre"),
        ({"epilogue": "mine"}, "pre"),
    ],
)
def test_what_a_backward_reads(given, saved):
    assert Operands(**given).saved == saved
