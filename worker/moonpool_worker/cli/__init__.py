"""The command line: ``moonpool-worker serve | digest | drain``."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit; for ``serve`` this process becomes the supervisor of the one that does."""
    from moonpool_worker.supervisor.handover import wants_supervisor

    arguments = sys.argv[1:]
    if wants_supervisor(arguments):
        from moonpool_worker.supervisor.loop import supervise

        sys.exit(supervise([sys.executable, "-m", "moonpool_worker", *arguments]))

    from moonpool_worker.cli.app import app
    from moonpool_worker.cli.tokenspeed import FlagError, translate

    try:
        arguments = translate(arguments)
    except FlagError as failure:
        print(f"moonpool-worker: {failure}", file=sys.stderr)
        sys.exit(2)
    app(arguments, prog_name="moonpool-worker")
