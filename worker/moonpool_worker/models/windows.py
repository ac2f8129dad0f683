"""Layers that look back over a window beside layers that look at everything: one cache group for each reach."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool_api.geometry import GroupGeometry, PlaneGeometry

#: How many tokens a layer looks back, the current one included (transformers' ``sliding_window`` counts the same way);
#: None for all of the text.
Window = int | None


def reaches(windows: Sequence[Window]) -> list[Window]:
    """The layers' different windows in the order of their groups: all of the text first, then from far to near."""
    return sorted(set(windows), key=lambda window: (window is not None, -(window or 0)))


def group_of_layer(windows: Sequence[Window]) -> list[int]:
    """The cache group of each layer."""
    groups = {window: index for index, window in enumerate(reaches(windows))}
    return [groups[window] for window in windows]


def attention_groups(
    windows: Sequence[Window], *, kv_heads: int, head_dim: int, dtype: str, prefix_granularity: int
) -> tuple[GroupGeometry, ...]:
    """K and V rows ``[kv_heads, head_dim]`` of all layers, ``windows`` being theirs in order."""
    row = (kv_heads, head_dim)
    planes = (PlaneGeometry(name="k", shape=row, dtype=dtype), PlaneGeometry(name="v", shape=row, dtype=dtype))
    found = reaches(windows)
    single = len([window for window in found if window is not None]) == 1
    return tuple(
        GroupGeometry(
            name="full" if reach is None else "window" if single else f"window{reach}",
            window=reach,
            block_tokens=prefix_granularity,
            layers=tuple(number for number, window in enumerate(windows) if window == reach),
            planes=planes,
        )
        for reach in found
    )


def read_windows(layer_types: Sequence[str], window: int | None) -> tuple[Window, ...]:
    """From ``layer_types`` and ``sliding_window`` of a configuration. ValueError for other kinds of layers."""
    for kind in layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layers of type {kind!r}")
    if "sliding_attention" in layer_types and not window:
        raise ValueError("sliding layers without a sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
