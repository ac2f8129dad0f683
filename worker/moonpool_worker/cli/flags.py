"""The flags of ``serve``, in the groups that its help shows."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from moonpool_api.quantity import parse_bytes, parse_duration

if TYPE_CHECKING:
    from moonpool_worker.cache.events.config import EventsConfig

SERVING, IDENTITY, ENGINE, CACHE, STORE = "Serving", "Identity", "Engine", "Cache", "L3: the store"


class DTypeChoice(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class BackendChoice(StrEnum):
    auto = "auto"
    cpu = "cpu"
    torch = "torch"
    triton = "triton"


class QuantizationChoice(StrEnum):
    none = "none"
    int8 = "int8"


def quantity(flag: str, text: str) -> int:
    """Bytes; a usage error that names the flag when ``text`` is no quantity."""
    try:
        return parse_bytes(text)
    except ValueError as failure:
        raise typer.BadParameter(str(failure), param_hint=flag) from failure


def duration(flag: str, text: str) -> float:
    """Seconds, also of a plain number; a usage error that names the flag when ``text`` is no duration."""
    try:
        return float(text) if text.isdigit() else parse_duration(text)
    except ValueError as failure:
        raise typer.BadParameter(str(failure), param_hint=flag) from failure


def l1_bytes(size: str | None, tokens: int | None) -> int:
    """L1's bytes; with ``tokens`` they are computed when the model is known. A usage error when both are given."""
    if size is not None and tokens is not None:
        raise typer.BadParameter("L1's size is given twice: drop one of them", param_hint="--l1-size, --l1-tokens")
    return quantity("--l1-size", size or "512Mi")


def kv_events(text: str | None) -> EventsConfig | None:
    """What ``--kv-events-config`` says, None for no events; a usage error for what is no such object."""
    from moonpool_worker.cache.events.config import parse_events_config

    if text is None:
        return None
    try:
        config = parse_events_config(text)
    except ValueError as failure:
        raise typer.BadParameter(str(failure), param_hint="--kv-events-config") from failure
    return config if config.enabled else None


def optional_duration(flag: str, text: str | None) -> float | None:
    """As :func:`duration`; None for a flag that is not given."""
    return None if text is None else duration(flag, text)


Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A .gguf file, a folder with config.json and safetensors, smollm2 or gemma3."),
]

Host = Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=SERVING)]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.", rich_help_panel=SERVING)]
ServedName = Annotated[
    str | None, typer.Option(metavar="NAME", help="The model's name in the API.", rich_help_panel=SERVING)
]
DrainTimeout = Annotated[
    str,
    typer.Option(metavar="DURATION", help="How long requests may take to finish on shutdown.", rich_help_panel=SERVING),
]
LogRequestStats = Annotated[bool, typer.Option(help="A JSON line per request.", rich_help_panel=SERVING)]
#: Heeded before the command line is parsed: see ``supervisor.handover``.
Supervise = Annotated[
    bool, typer.Option(help="Restart an engine that crashes, and keep its L2.", rich_help_panel=SERVING)
]

WeightVersion = Annotated[
    str, typer.Option(metavar="VERSION", help="Name of these weights; part of the namespace.", rich_help_panel=IDENTITY)
]
Isolation = Annotated[
    str,
    typer.Option(metavar="TEXT", help="Keeps this service's cache apart from others'.", rich_help_panel=IDENTITY),
]
Podinfo = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Downward-API folder; unset: no cluster.", rich_help_panel=IDENTITY),
]

DType = Annotated[DTypeChoice, typer.Option(help="Of weights and KV.", rich_help_panel=ENGINE)]
AttentionBackend = Annotated[
    BackendChoice,
    typer.Option(help="Kernels: triton for GPUs, cpu for AVX-512, torch for all else.", rich_help_panel=ENGINE),
]
Quantization = Annotated[
    QuantizationChoice,
    typer.Option(help="Round weights that are not quantised in the file (backend cpu).", rich_help_panel=ENGINE),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(min=16, metavar="TOKENS", help="Prompt and answer; unset: the model's.", rich_help_panel=ENGINE),
]
MaxBatchTokens = Annotated[
    int, typer.Option(min=16, max=65536, metavar="TOKENS", help="Computed per step.", rich_help_panel=ENGINE)
]
MaxRunning = Annotated[
    int, typer.Option(min=1, max=1024, metavar="N", help="Sequences in one batch.", rich_help_panel=ENGINE)
]
MaxWaiting = Annotated[
    int, typer.Option(min=0, metavar="N", help="Sequences that may wait; more get 429.", rich_help_panel=ENGINE)
]

PrefixCaching = Annotated[bool, typer.Option(help="Reuse KV of equal prefixes.", rich_help_panel=CACHE)]
PrefixGranularity = Annotated[
    int,
    typer.Option(
        "--prefix-granularity",
        "--block-size",
        min=1,
        max=1024,
        metavar="TOKENS",
        help="Tokens per page.",
        rich_help_panel=CACHE,
    ),
]
L1Size = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Device memory for KV; unset: 512Mi.", rich_help_panel=CACHE)
]
L1Tokens = Annotated[
    int | None,
    typer.Option(min=1, metavar="TOKENS", help="L1 in tokens, instead of --l1-size.", rich_help_panel=CACHE),
]
L2Size = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="Host memory for KV; 0: off; unset: by --l2-ratio.", rich_help_panel=CACHE),
]
L2Ratio = Annotated[
    float | None,
    typer.Option(min=0, metavar="RATIO", help="L2 as a multiple of L1; unset: 1.", rich_help_panel=CACHE),
]

L3 = Annotated[bool, typer.Option(help="Use the store that the operator grants.", rich_help_panel=STORE)]
L3Master = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Use this Mooncake master, without an operator.", rich_help_panel=STORE)
]
L3Tenant = Annotated[str, typer.Option(metavar="TENANT", help="With --l3-master.", rich_help_panel=STORE)]
PrefetchMinPages = Annotated[
    int, typer.Option(min=1, metavar="PAGES", help="Fewer are computed instead.", rich_help_panel=STORE)
]
PrefetchAlways = Annotated[
    bool, typer.Option(help="Also where computing was measured to be faster.", rich_help_panel=STORE)
]
PrefetchTimeoutBase = Annotated[
    str | None,
    typer.Option(
        metavar="DURATION", help="A request waits so long for L3; unset: as measured …", rich_help_panel=STORE
    ),
]
PrefetchTimeoutPerPage = Annotated[
    str | None,
    typer.Option(metavar="DURATION", help="… and so much more per page; 2s at most if unset.", rich_help_panel=STORE),
]
PrefetchBatchPages = Annotated[
    int, typer.Option(min=1, max=1024, metavar="PAGES", help="Per call to the store.", rich_help_panel=STORE)
]
L3Protocol = Annotated[
    str, typer.Option(metavar="NAME", help="Mooncake's transport: tcp or rdma.", rich_help_panel=STORE)
]
L3Device = Annotated[str, typer.Option(metavar="NAME", help="RDMA device; unset: found.", rich_help_panel=STORE)]

KVEventsConfig = Annotated[
    str | None,
    typer.Option(metavar="JSON", help='KV events: {"enable_kv_cache_events": true, …}.', rich_help_panel=CACHE),
]
