from isogemm.cli import NOTHING_PROVEN, main
from isogemm.verify.tiny import CHECKS


def test_nothing_is_proven_on_a_cpu(capsys):
    """torch.bmm serves there: not even its accuracy is isogemm's."""
    assert main(["verify", "--family", "tiny", "--device", "cpu", "--trials", "1"]) == NOTHING_PROVEN == 3
    assert f"0 passed, 0 failed, {len(CHECKS)} skipped" in capsys.readouterr().out
