"""How the rows of a batch norm's sums are grouped: a function of their number alone. Pure."""

from __future__ import annotations

from isogemm.encoder.configs import TILE_ROWS

ROWS = TILE_ROWS  # of a tile's sums
GROUP = 64  # tiles
GROUP_ROWS = GROUP * ROWS
_UNGROUPED = 2048  # tiles: so many are read by the programs of a few columns as fast as by two launches


def groups(rows: int, height: int = ROWS) -> int:
    """Of tiles of `height` rows that are combined before all else; 0 where there are few."""
    return -(-rows // (GROUP * height)) if rows > _UNGROUPED * height else 0
