"""DeepSeek-V4's caches as groups.

==========  =========================  ===============================================================================
group       rows                       why
==========  =========================  ===============================================================================
window      one per token, windowed    what all layers attend to directly: the last tokens
csa, hca    one per entry, all kept    the compressed text of the layers with compression, and the indexer's keys
csa_tail    one per token, windowed    raw rows from which the next entry is made; it overlaps with the one before
hca_tail    one per token, windowed    the same without overlap
==========  =========================  ===============================================================================

A tail is a short history of rows and not a state: its rows are found and stored like any others. Its block is one
entry's tokens, and its window is chosen so that exactly the blocks that the next entry needs stay: the entry's own,
and with overlap the one before. At a boundary of whole pages all entries are closed, so a tail without overlap needs
nothing there (its window is 1: the current token).
"""

from __future__ import annotations

import math

from moonpool_api.geometry import GroupGeometry, PlaneGeometry

from moonpool_worker.models.deepseek_v4.config import DeepseekV4Config, Kind

#: The one plane of every group.
ROWS = "rows"


def tail_of(kind: Kind) -> str:
    """The name of the group of raw rows; that of the entries is ``kind`` itself."""
    return f"{kind}_tail"


def entry_width(config: DeepseekV4Config, kind: Kind) -> int:
    """An entry: the row that is attended to and, where there is an indexer, its key."""
    return config.head_dim + (config.index_dim if kind == "csa" else 0)


def tail_width(config: DeepseekV4Config, kind: Kind) -> int:
    """A raw row: value and gate, twice where a token takes part in two entries."""
    return 2 * entry_width(config, kind) * (2 if kind == "csa" else 1)


def layers_of(config: DeepseekV4Config, kind: Kind) -> tuple[int, ...]:
    return tuple(number for number, found in enumerate(config.kinds) if found == kind)


def groups(config: DeepseekV4Config, dtype: str, granularity: int) -> tuple[GroupGeometry, ...]:
    """See above. ValueError when a page is no whole number of entries."""
    kinds = [kind for kind in config.strides if kind in config.kinds]
    least = math.lcm(*(config.strides[kind] for kind in kinds))
    if granularity % least:
        raise ValueError(f"this model's entries need a prefix granularity that is a multiple of {least} tokens")

    def group(
        name: str, layers: tuple[int, ...], width: int, block: int, *, window: int | None = None, stride: int = 1
    ) -> GroupGeometry:
        plane = PlaneGeometry(name=ROWS, shape=(width,), dtype=dtype)
        return GroupGeometry(
            name=name, layers=layers, planes=(plane,), block_tokens=block, window=window, stride=stride
        )

    # Blocks no longer than the window, so that little is kept beyond it.
    block = max(size for size in range(1, min(granularity, config.window) + 1) if granularity % size == 0)
    found = [group("window", tuple(range(config.layers)), config.head_dim, block, window=config.window)]
    for kind in kinds:
        layers, stride = layers_of(config, kind), config.strides[kind]
        found.append(group(kind, layers, entry_width(config, kind), granularity, stride=stride))
        before = stride if kind == "csa" else 0
        found.append(group(tail_of(kind), layers, tail_width(config, kind), stride, window=1 + before))
    return tuple(found)
