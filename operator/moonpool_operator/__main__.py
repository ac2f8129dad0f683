"""Start the operator: ``python -m moonpool_operator --all-namespaces``."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from moonpool_operator import logs
from moonpool_operator.settings import from_environment

cli = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@cli.command()
def operator(
    namespace: Annotated[list[str] | None, typer.Option(help="Watch this namespace; may be given again.")] = None,
    all_namespaces: Annotated[bool, typer.Option("--all-namespaces", help="Watch the whole cluster.")] = False,
    dev: Annotated[bool, typer.Option("--dev", help="Logs for a person instead of JSON.")] = False,
    metrics_port: Annotated[int, typer.Option(help="Prometheus; 0 turns it off.")] = 9090,
    health_port: Annotated[int, typer.Option(help="GET /healthz; 0 turns it off.")] = 8081,
) -> None:
    """Run Moonpool's operator until it is told to stop."""
    if bool(namespace) == all_namespaces:
        raise typer.BadParameter("give --namespace (once or more) or --all-namespaces")
    logs.configure(dev)
    from moonpool_operator.app import run

    asyncio.run(run(namespace or [], from_environment(), metrics_port, health_port))


def main() -> None:
    cli()


if __name__ == "__main__":
    main()
