import operator
import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
import torch

from isogemm.verify import parallel
from isogemm.verify.parallel import retried_in_processes

CUDA = torch.device("cuda", 0)


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(parallel.os, "cpu_count", lambda: 2)
    room = parallel._PROCESS_BYTES
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * room, 4 * room))


def test_jobs_run_in_other_processes_and_errors_are_left_to_others(tmp_path, two_cores):
    (tmp_path / "taken").touch()
    parallel.run_in_processes(os.symlink, CUDA, [str(tmp_path / name) for name in ("one", "taken", "other")])
    links = {path.name: str(path.readlink()) for path in tmp_path.iterdir() if path.is_symlink()}
    assert links == {"one": "cuda:0", "other": "cuda:0"}


def test_nothing_is_done_for_a_cpu(tmp_path, two_cores):
    parallel.run_in_processes(os.symlink, torch.device("cpu"), [str(tmp_path / "one")])
    parallel.run_in_processes(os.symlink, CUDA, [])
    assert list(tmp_path.iterdir()) == []


def test_results_are_in_the_order_of_the_jobs():
    jobs = [f"{index}/kernel" if index % 3 else "kernel" for index in range(10)]
    assert retried_in_processes(os.path.dirname, jobs, workers=2) == [os.path.dirname(job) for job in jobs]  # noqa: PTH120
    assert retried_in_processes(os.path.dirname, [], workers=1) == []


def test_a_process_that_dies_does_not_end_the_others():
    jobs = [partial(str, "done"), partial(os._exit, 3)]
    assert retried_in_processes(operator.call, jobs, workers=1) == ["done", "a process died"]


def test_interrupts_end_it_at_once():
    """A second one too, and without a word from the pool's thread."""
    code = (
        "import signal, time; from isogemm.verify.parallel import retried_in_processes\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let what runs in the background ignore it\n"
        "print('begun', flush=True)\nretried_in_processes(time.sleep, [600.0] * 9, 2)"
    )
    running = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    running.stdout.readline()
    time.sleep(3)  # until both processes compile
    for _ in range(2):
        running.send_signal(signal.SIGINT)
        time.sleep(0.1)
    try:
        _, errors = running.communicate(timeout=60)  # a tenth of a job: machines with other work take a while
    finally:
        running.kill()
    assert "KeyboardInterrupt" in errors
    assert "Exception in thread" not in errors


def test_a_script_without_a_main_guard_runs_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os.path, sys\n"
        "print('script')\n"
        "from isogemm.verify.parallel import retried_in_processes\n"
        "print(retried_in_processes(os.path.dirname, ['a', 'b/c'], 2), sys.modules['__main__'].__file__ == __file__)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["script", "['', 'b'] True"], done.stderr
