"""The tests' tree is the source's: the test of src/isogemm/<folder>/<name>.py is tests/<folder>/test_<name>.py."""

import re
from fnmatch import fnmatch
from pathlib import Path

TESTS = Path(__file__).parent
SOURCE = TESTS.parent / "src/isogemm"
LONGEST = 530  # lines

# Modules without a test of their name, and where they are tested. A pattern that matches none is out of date.
ELSEWHERE = {
    "__main__.py": "tests/cli/test_cli.py runs the command",
    "*kernels*.py": "kernels run in tests/interpreter and tests/gpu; the compile matrices compile them",
    "epilogues/device.py": "device code: tests/interpreter/test_fused.py",
    "*/tables/*.py": "measured data: tests/core/test_tables.py, and each family's test_configs.py",
    "*/reference.py": "an oracle, which tests compare with",
    "attention/describe.py": "tests/attention/test_plan.py",
    "encoder/attention/configs.py": "tests/encoder/attention/test_*_compile.py, tests/interpreter/test_encoder_*.py",
    "encoder/attention/op.py": "tests/encoder/test_composed.py and tests/gpu/test_encoder_attention.py",
    "loss/api.py": "tests/loss/test_contract.py and tests/loss/test_use.py",
    "loss/op.py": "tests/loss/test_contract.py and tests/loss/test_use.py",
    "norm/configs.py": "tests/norm/test_norm_compile_matrix.py and tests/interpreter/test_batch_norm.py",
    "norm/op.py": "tests/norm/test_batch_norm.py and tests/encoder/test_composed.py",
    "norm/row_norm.py": "tests/norm/test_contract.py, tests/norm/test_api.py and tests/norm/test_plans.py",
    "norm/softmax.py": "tests/norm/test_contract.py, tests/norm/test_api.py and tests/norm/test_plans.py",
    "norm/embedding.py": "tests/norm/test_contract.py, tests/norm/test_api.py and tests/norm/test_plans.py",
    "encoder/*.py": "a layer is tested as a whole, by property: tests/encoder, tests/interpreter/test_encoder*.py",
    "verify/activations.py": "torch's forms, an oracle",
    "verify/encoder_reference.py": "torch's layer, an oracle: tests/verify/test_encoder.py",
    "verify/precision.py": "tests/core/test_precision.py",
    "verify/trials.py": "what the families' checks share: tests/verify/test_gemm.py, test_fused.py and test_encoder.py",
    "bench/cases/tiny.py": "needs a GPU; its demo is in tests/bench/test_demo.py",
    "bench/ceilings.py": "measures a GPU; tests/cli/test_cli.py replaces it",
    "bench/extras.py": "tests/bench/test_report.py",
    "bench/plots.py": "tests/bench/test_report.py",
    "cli/*.py": "tests/cli/test_cli.py runs each command",
    "training/benchmark.py": "tests/training/test_command.py: --compare",
    "training/checkpoints.py": "tests/training/test_folder.py and test_loop.py",
    "training/results.py": "tests/training/test_folder.py",
}


def _untested():
    modules = [path.relative_to(SOURCE) for path in sorted(SOURCE.rglob("*.py")) if path.name != "__init__.py"]
    return [each.as_posix() for each in modules if not (TESTS / each.parent / f"test_{each.name}").exists()]


def test_a_module_without_a_test_of_its_name_has_a_reason():
    missing = [each for each in _untested() if not any(fnmatch(each, pattern) for pattern in ELSEWHERE)]
    assert not missing, "write tests/<folder>/test_<name>.py, or say in ELSEWHERE where they are tested"


def test_every_reason_is_needed_and_names_tests_that_are_there():
    for pattern, reason in ELSEWHERE.items():
        assert any(fnmatch(each, pattern) for each in _untested()), pattern
        for word in re.findall(r"tests/[\w/*.]*\w\*?", reason):
            assert list(TESTS.parent.glob(word)), word


def test_every_package_says_what_it_holds():
    packages = [each.parent for each in SOURCE.glob("*/__init__.py")]
    assert not [each.name for each in packages if not (each / "README.md").exists()], "write its README.md"


def test_no_test_file_is_long():
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in TESTS.rglob("*.py")}
    assert not [path for path, count in lines.items() if count > LONGEST], "split it by what it tests"
