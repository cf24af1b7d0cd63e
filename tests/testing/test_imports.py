import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


def test_testing_imports_neither_triton_nor_hypothesis():
    program = (
        "import sys, isogemm.testing\n"
        "print([name for name in ('triton', 'hypothesis', 'pytest') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_there():
    import isogemm.testing

    assert all(hasattr(isogemm.testing, name) for name in isogemm.testing.__all__)
