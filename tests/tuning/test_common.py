"""Compilation in other processes."""

import operator
import os
import subprocess
import sys
from functools import partial

from isogemm.tuning.common import compile_ahead


def test_results_are_in_the_order_of_the_jobs():
    jobs = [f"{index}/kernel" if index % 3 else "kernel" for index in range(10)]
    assert compile_ahead(os.path.dirname, jobs, workers=2) == [os.path.dirname(job) for job in jobs]  # noqa: PTH120
    assert compile_ahead(os.path.dirname, [], workers=1) == []


def test_a_process_that_dies_does_not_end_the_others():
    jobs = [partial(str, "done"), partial(os._exit, 3)]
    assert compile_ahead(operator.call, jobs, workers=1) == ["done", "a process died"]


def test_a_script_without_a_main_guard_runs_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os.path, sys\n"
        "print('script')\n"
        "from isogemm.tuning.common import compile_ahead\n"
        "print(compile_ahead(os.path.dirname, ['a', 'b/c'], 2), sys.modules['__main__'].__file__ == __file__)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["script", "['', 'b'] True"], done.stderr
