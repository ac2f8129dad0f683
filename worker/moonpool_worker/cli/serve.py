"""``serve``: what a person sees while the worker starts and runs."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING

import structlog

from moonpool_worker.cli.progress import LoadProgress
from moonpool_worker.settings import Settings, SettingsError

if TYPE_CHECKING:
    from moonpool_worker.server.worker import Worker


def serve_until_stopped(settings: Settings) -> int:
    """The exit code of the process."""
    if settings.supervised is not None:
        settings.supervised.end_with_parent()
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    # Torch is imported from here on: a bad flag is reported without the wait.
    from moonpool_worker.server.process import fail, run

    try:
        settings.check()
    except SettingsError as failure:
        return fail(str(failure))
    started = time.monotonic()
    with LoadProgress() as progress:
        return run(settings, progress.update, lambda worker: _announce(worker, progress, time.monotonic() - started))


def _announce(worker: Worker, progress: LoadProgress, seconds: float) -> None:
    progress.finish()
    settings = worker.settings
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    address = f"http://{host}:{settings.port}"
    chat = worker.loaded is not None and worker.loaded.tokenizer.template_text is not None
    if chat:
        path = "/v1/chat/completions"
        body: dict[str, object] = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    else:
        path, body = "/v1/completions", {"prompt": "The capital of France is", "max_tokens": 16}
    print(f"Serving {worker.model_name} on {address} after {seconds:.1f} s. Try it:\n")
    print(f"  curl -s {address}{path} -H 'content-type: application/json' -d '{json.dumps(body)}'\n", flush=True)
