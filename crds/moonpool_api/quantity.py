"""Kubernetes quantities (``512Mi``, ``1.5G``, ``200m``) and durations (``90s``, ``1h30m``) as numbers."""

from __future__ import annotations

import re
from decimal import ROUND_CEILING, Decimal

QUANTITY_PATTERN = r"^(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+|Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E)?$"
DURATION_PATTERN = r"^(\d+(\.\d+)?(ms|s|m|h))+$"

_SUFFIX = {
    "": Decimal(1),
    **{s: Decimal(1024) ** i for i, s in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)},
    **{s: Decimal(1000) ** i for i, s in enumerate(("k", "M", "G", "T", "P", "E"), 1)},
    "m": Decimal("1e-3"),
    "u": Decimal("1e-6"),
    "n": Decimal("1e-9"),
}
_QUANTITY = re.compile(r"^(?P<number>\d+(\.\d*)?|\.\d+)(?P<suffix>[eE][+-]?\d+|[A-Za-z]{0,2})$")
_DURATION_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def parse_bytes(text: str) -> int:
    """Bytes of a Kubernetes quantity, rounded up. Raises ValueError with an example of a good one."""
    match = _QUANTITY.match(text.strip())
    suffix = match["suffix"] if match else ""
    if not match or (suffix not in _SUFFIX and suffix[:1] not in "eE"):
        raise ValueError(f"{text!r} is not a quantity; write for example 512Mi or 2Gi")
    factor = _SUFFIX.get(suffix)
    value = Decimal(match["number"] + suffix) if factor is None else Decimal(match["number"]) * factor
    return int(value.to_integral_value(rounding=ROUND_CEILING))


def parse_duration(text: str) -> float:
    """Seconds of a Go-style duration. Raises ValueError with an example of a good one."""
    if not re.match(DURATION_PATTERN, text):
        raise ValueError(f"{text!r} is not a duration; write for example 90s, 5m or 1h30m")
    return sum(float(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text))


def format_bytes(count: int) -> str:
    """``count`` bytes in the largest binary unit that leaves at least 1."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")
