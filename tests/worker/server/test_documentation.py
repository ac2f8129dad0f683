"""docs/engine.md and docs/interfaces.md name what there is: flags, metrics, statistics."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import typer
from moonpool_worker.cache.events.config import EventsConfig
from moonpool_worker.cache.stats import CacheStats, GroupStats
from moonpool_worker.cli.app import app
from moonpool_worker.server import metrics
from moonpool_worker.server.cache_report import cache_report
from moonpool_worker.server.request_log import RequestStats

ROOT = Path(__file__).parents[3]
ENGINE = (ROOT / "docs/engine.md").read_text()
INTERFACES = (ROOT / "docs/interfaces.md").read_text()


def section(title: str) -> str:
    """The text under a heading, up to the next one of any level."""
    return re.split(r"\n#+ ", ENGINE.split(f"# {title}\n", 1)[1])[0]


def test_every_flag_is_in_the_table() -> None:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = {option for param in command.params for option in param.opts if option.startswith("--")}
    assert set(re.findall(r"`(--[a-z0-9-]+)`", section("Flags"))) == options


def test_every_metric_is_in_the_table_and_no_other() -> None:
    source = Path(metrics.__file__).read_text()
    there = set(re.findall(r'"moonpool:(\w+)"', source))
    told = {
        name.removesuffix("_total")
        for row in section("Of the worker").splitlines()
        if row.startswith("| ") and not row.startswith("| what")
        for name in re.findall(r"`(\w+)(?:\{[\w,]+\})?`", row)
    }
    assert told == there


def test_every_field_of_a_requests_line_is_explained() -> None:
    text = section("Per request").replace("`_l2`", "`cache_tokens_l2`").replace("`_l3`", "`cache_tokens_l3`")
    for field in dataclasses.fields(RequestStats):
        assert f"`{field.name}`" in text, field.name


def test_every_field_of_the_events_configuration_is_explained() -> None:
    told = re.findall(r"^\| `(\w+)`", section("KV events"), re.MULTILINE)
    assert told == list(EventsConfig.__struct_fields__)


def test_the_statistics_of_the_cache_are_those_of_the_page() -> None:
    (example,) = re.findall(r"```json\n(\{\"prompt_tokens\".*?)```", INTERFACES, re.DOTALL)
    told = json.loads(example)
    report = cache_report(CacheStats(groups=(GroupStats("full", "history", None, 16, 0, 0, 0, 0),)), None)
    assert set(told) == set(report)
    assert set(told["rates"]) == set(report["rates"])
    assert set(told["groups"][0]) == set(report["groups"][0])
    assert set(told["store"]) - {"…"} <= set(report["store"])
