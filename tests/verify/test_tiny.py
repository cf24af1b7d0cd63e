import torch

from isogemm.cli import NOTHING_PROVEN, main
from isogemm.tiny import configs
from isogemm.verify import tiny
from isogemm.verify.tiny import CHECKS


def test_nothing_is_proven_on_a_cpu(capsys):
    """torch.bmm serves there: not even its accuracy is isogemm's."""
    assert main(["verify", "--family", "tiny", "--device", "cpu", "--trials", "1"]) == NOTHING_PROVEN == 3
    assert f"0 passed, 0 failed, {len(CHECKS)} skipped" in capsys.readouterr().out


def test_a_kernel_whose_bits_follow_the_batch_or_the_tile_is_seen(monkeypatch):
    """On the CPU, where an elementwise product stands in for the kernels."""
    wrong = []

    def product(a, b, problem, config):
        out = a[:, :, :1] * b[:, :1, :]
        return -out if wrong and wrong[0](problem, config) else out

    monkeypatch.setattr(tiny, "_product", product)
    each = [tiny.Setting(seed, torch.device("cpu")) for seed in range(2)]
    for trial in (tiny._batch_invariance, tiny._any_tile):
        assert all(diff.equal for diff in trial(each[0]))
    wrong.append(lambda problem, config: problem.batch == 2)
    assert not all(diff.equal for diff in tiny._batch_invariance(each[1]))
    wrong[0] = lambda problem, config: config != configs.choose(problem, config.kernel)
    assert not all(diff.equal for diff in tiny._any_tile(each[1]))
