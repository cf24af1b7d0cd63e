from __future__ import annotations

from isogemm.bench import headline


def test_the_package_ships_figures_to_show() -> None:
    shipped = headline.shipped()
    assert shipped
    for gpu in shipped:
        assert gpu.source.startswith(f"{gpu.gpu}, ")
        assert {len(line) for line in gpu.lines} == {len(headline.COLUMNS)}
