import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


def test_tools_import_neither_triton_nor_hypothesis():
    program = (
        "import sys\n"
        "from isogemm.verify import activations, checks, compare, encoder_reference, errors, inputs, poison\n"
        "print([name for name in ('triton', 'hypothesis', 'pytest') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
