"""What tests, benchmarks and `isogemm verify` share: comparison, cases, errors, checks, compilation.

Hypothesis strategies are in `isogemm.testing.strategies`, apart because they need hypothesis.
"""

from isogemm.testing.attention import AttentionInputs, AttentionResults, attention_by_head, torch_attention
from isogemm.testing.cases import (
    DATA_KINDS,
    FLOAT_DTYPES,
    LAYOUTS,
    NEARBY,
    ODD_SIZES,
    TensorCase,
    layouts_for,
    make_data,
    make_operands,
    nearby,
    with_layout,
)
from isogemm.testing.checks import Check, CheckResult, run_trials, skip
from isogemm.testing.compare import BitDiff, assert_bitwise_equal, compare_bits
from isogemm.testing.compile_matrix import (
    TARGETS,
    CompileJob,
    Outcome,
    Resources,
    compile_job,
    disassemble,
    limit_violations,
    run_matrix,
)
from isogemm.testing.encoder import (
    ENCODER_SHAPES,
    EncoderShape,
    assert_encoder_no_worse,
    encoder_parameters,
    encoder_tensors,
    isogemm_encoder,
    products_of_tf32,
    torch_encoder,
    with_gradients,
)
from isogemm.testing.encoder_variants import Variant, assert_variant_no_worse
from isogemm.testing.error import (
    Comparison,
    Errors,
    assert_no_worse_than_torch,
    assert_same_nonfinite,
    measure_errors,
)
from isogemm.testing.forms import ACTIVATION_FORMS, GATE_FORMS, doubled, fused_form, gated_form
from isogemm.testing.gradients import assert_gradients_no_worse, gradients_of
from isogemm.testing.interpreter import interpreting, is_interpreted, require_interpreter
from isogemm.testing.launches import device_work
from isogemm.testing.poison import poison_value, poisoned_allocations
from isogemm.testing.ranks import run_ranks

__all__ = [
    "ACTIVATION_FORMS",
    "DATA_KINDS",
    "ENCODER_SHAPES",
    "FLOAT_DTYPES",
    "GATE_FORMS",
    "LAYOUTS",
    "NEARBY",
    "ODD_SIZES",
    "TARGETS",
    "AttentionInputs",
    "AttentionResults",
    "BitDiff",
    "Check",
    "CheckResult",
    "Comparison",
    "CompileJob",
    "EncoderShape",
    "Errors",
    "Outcome",
    "Resources",
    "TensorCase",
    "Variant",
    "assert_bitwise_equal",
    "assert_encoder_no_worse",
    "assert_gradients_no_worse",
    "assert_no_worse_than_torch",
    "assert_same_nonfinite",
    "assert_variant_no_worse",
    "attention_by_head",
    "compare_bits",
    "compile_job",
    "device_work",
    "disassemble",
    "doubled",
    "encoder_parameters",
    "encoder_tensors",
    "fused_form",
    "gated_form",
    "gradients_of",
    "interpreting",
    "is_interpreted",
    "isogemm_encoder",
    "layouts_for",
    "limit_violations",
    "make_data",
    "make_operands",
    "measure_errors",
    "nearby",
    "poison_value",
    "poisoned_allocations",
    "products_of_tf32",
    "require_interpreter",
    "run_matrix",
    "run_ranks",
    "run_trials",
    "skip",
    "torch_attention",
    "torch_encoder",
    "with_gradients",
    "with_layout",
]
