"""The command line: ``moonpool-worker serve | digest | drain``."""

from __future__ import annotations


def main() -> None:
    """Run the command line and exit."""
    from moonpool_worker.cli.app import app

    app(prog_name="moonpool-worker")
