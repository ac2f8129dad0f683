"""The commands. Nothing here imports torch: ``drain`` runs as a preStop hook and must start fast."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from moonpool_worker.cli import flags

app = typer.Typer(
    name="moonpool-worker",
    help="Serve a language model with a three-tier KV cache, over the OpenAI API.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"moonpool-worker {version('moonpool')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(epilog="TokenSpeed's names of flags are taken too: see docs/tokenspeed-flags.md.")
def serve(
    model: flags.Model,
    host: flags.Host = "0.0.0.0",
    port: flags.Port = 8000,
    served_name: flags.ServedName = None,
    drain_timeout: flags.DrainTimeout = "60s",
    log_request_stats: flags.LogRequestStats = False,
    supervise: flags.Supervise = True,
    weight_version: flags.WeightVersion = "",
    isolation: flags.Isolation = "",
    podinfo: flags.Podinfo = None,
    dtype: flags.DType = flags.DTypeChoice.auto,
    attention_backend: flags.AttentionBackend = flags.BackendChoice.auto,
    quantization: flags.Quantization = flags.QuantizationChoice.none,
    max_model_len: flags.MaxModelLen = None,
    max_batch_tokens: flags.MaxBatchTokens = 512,
    max_running: flags.MaxRunning = 32,
    max_waiting: flags.MaxWaiting = 512,
    prefix_caching: flags.PrefixCaching = True,
    prefix_granularity: flags.PrefixGranularity = 16,
    l1_size: flags.L1Size = None,
    l1_tokens: flags.L1Tokens = None,
    l2_size: flags.L2Size = None,
    l2_ratio: flags.L2Ratio = None,
    kv_events_config: flags.KVEventsConfig = None,
    l3: flags.L3 = False,
    l3_master: flags.L3Master = "",
    l3_tenant: flags.L3Tenant = "default",
    l3_protocol: flags.L3Protocol = "tcp",
    l3_device: flags.L3Device = "",
    prefetch_min_pages: flags.PrefetchMinPages = 2,
    prefetch_always: flags.PrefetchAlways = False,
    prefetch_timeout_base: flags.PrefetchTimeoutBase = None,
    prefetch_timeout_per_page: flags.PrefetchTimeoutPerPage = None,
    prefetch_batch_pages: flags.PrefetchBatchPages = 128,
) -> None:
    """Load MODEL and serve it: a .gguf file, a folder with config.json and safetensors,
    [bold]smollm2[/bold] or [bold]gemma3[/bold]."""
    from moonpool_worker.cache.store_tier.options import StoreOptions
    from moonpool_worker.cli.barriers import forbid_spinning
    from moonpool_worker.cli.serve import serve_until_stopped
    from moonpool_worker.settings import Pod, Settings
    from moonpool_worker.supervisor.handover import Supervised

    forbid_spinning()
    settings = Settings(
        model=model,
        host=host,
        port=port,
        served_name=served_name,
        weight_version=weight_version,
        isolation=isolation,
        dtype=dtype.value,
        attention_backend=attention_backend.value,
        quantization=quantization.value,
        prefix_granularity=prefix_granularity,
        max_model_len=max_model_len,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        max_waiting=max_waiting,
        prefix_caching=prefix_caching,
        l1_bytes=flags.l1_bytes(l1_size, l1_tokens),
        l2_bytes=None if l2_size is None else flags.quantity("--l2-size", l2_size),
        l1_tokens=l1_tokens,
        l2_ratio=l2_ratio,
        kv_events=flags.kv_events(kv_events_config),
        l3=l3,
        l3_master=l3_master,
        l3_tenant=l3_tenant,
        store=StoreOptions(
            min_pages=prefetch_min_pages,
            always=prefetch_always,
            timeout_base=flags.optional_duration("--prefetch-timeout-base", prefetch_timeout_base),
            timeout_per_page=flags.optional_duration("--prefetch-timeout-per-page", prefetch_timeout_per_page),
            batch_pages=prefetch_batch_pages,
            protocol=l3_protocol,
            device=l3_device,
        ),
        podinfo=podinfo,
        drain_timeout=flags.duration("--drain-timeout", drain_timeout),
        log_request_stats=log_request_stats,
        pod=Pod.from_environment(),
        supervised=Supervised.from_environment() if supervise else None,
    )
    code = serve_until_stopped(settings)
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed; taking torch apart object by object would only hold up the pod's end.
    os._exit(code)


@app.command()
def digest(path: Annotated[str, typer.Argument(metavar="MODEL", help="As for serve.")]) -> None:
    """Print the weights digest of MODEL: what a service's [bold]model.digest[/bold] can demand."""
    from moonpool_worker.weights.errors import ModelLoadError
    from moonpool_worker.weights.open import open_checkpoint

    try:
        checkpoint = open_checkpoint(path)
        print(checkpoint.digest())
    except ModelLoadError as failure:
        print(f"moonpool-worker: {failure}", file=sys.stderr)
        raise typer.Exit(2) from failure


@app.command()
def drain(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where the worker listens.")] = 8000,
    host: Annotated[str, typer.Option(help="Where the worker listens.")] = "127.0.0.1",
    timeout: Annotated[str, typer.Option(help="Finish requests for so long; unset: the worker's own.")] = "",
) -> None:
    """Drain the worker on this machine and wait for it: the preStop hook. One that is gone counts as drained."""
    from moonpool_worker.cli.drain import drain_worker

    seconds = flags.duration("--timeout", timeout) if timeout else None
    raise typer.Exit(drain_worker(host, port, seconds))
