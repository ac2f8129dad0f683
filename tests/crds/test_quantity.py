from __future__ import annotations

import pytest
from moonpool_api.quantity import format_bytes, parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1", 1),
        ("512Mi", 512 << 20),
        ("1.5Gi", 3 << 29),
        ("2G", 2 * 10**9),
        ("100m", 1),
        ("1e3", 1000),
        ("1E", 10**18),
    ],
)
def test_quantities(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "512 MB", "ten", "-1", "1MiB", "1ee3"])
def test_bad_quantities_show_a_good_one(text: str) -> None:
    with pytest.raises(ValueError, match="512Mi"):
        parse_bytes(text)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1h30m", 5400), ("250ms", 0.25), ("1.5s", 1.5)])
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "90", "5 m", "-1s"])
def test_bad_durations_show_a_good_one(text: str) -> None:
    with pytest.raises(ValueError, match="90s"):
        parse_duration(text)


def test_format_bytes() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 << 30)] == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB"]
