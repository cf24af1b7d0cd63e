import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreting import interpreting, require_interpreter

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"

pytest.importorskip("triton")

PROGRAM = """
import torch, triton
import triton.language as tl
from interpreting import EXACT_DTYPES, interpreting, is_interpreted, require_interpreter

require_interpreter(strict=True)

@triton.jit
def dot(a, b, c, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    at = index[:, None] * BLOCK + index[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision="ieee"))

assert interpreting() and is_interpreted(dot)
for dtype in EXACT_DTYPES:
    a, b = (torch.randint(-4, 5, (16, 16)).to(dtype) for _ in range(2))
    c = torch.full((16, 16), float("nan"))
    dot[(1,)](a, b, c, BLOCK=16)
    assert torch.equal(c, a.float() @ b.float()), dtype
"""


def test_kernels_run_in_the_interpreter(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SOURCE, HERE))), "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(interpreting(), reason="the interpreter is on")
def test_says_why_it_does_not_run():
    with pytest.raises(pytest.skip.Exception, match="TRITON_INTERPRET is not set"):
        require_interpreter()
    with pytest.raises(pytest.fail.Exception, match="TRITON_INTERPRET is not set"):
        require_interpreter(strict=True)
