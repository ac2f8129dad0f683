"""`python -m e2e.cluster up|down|status|kubeconfig|images|logs`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from e2e.cluster import components, lifecycle, node, settings
from e2e.cluster.cluster import embedded
from e2e.cluster.errors import ClusterError

app = typer.Typer(add_completion=False, no_args_is_help=True, help="The embedded Kubernetes cluster.")
Name = Annotated[str, typer.Option("--name", help="Which cluster.")]


@contextmanager
def _reported() -> Iterator[None]:
    """Turn our errors into a message and an exit code; anything else is a bug and shows its traceback."""
    try:
        yield
    except ClusterError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(error.exit_code) from None


@app.command()
def up(
    name: Name = settings.DEFAULT_NAME,
    network_policy: Annotated[bool, typer.Option("--network-policy", help="Enforce NetworkPolicies.")] = False,
) -> None:
    """Start the cluster, building what is missing. Returns at once when it's up."""
    with _reported():
        print(f"export KUBECONFIG={lifecycle.up(name, network_policy=network_policy).kubeconfig}")


@app.command()
def down(
    name: Name = settings.DEFAULT_NAME,
    purge: Annotated[bool, typer.Option("--purge", help="Delete the node's images too.")] = False,
) -> None:
    """Remove the cluster and everything it made."""
    with _reported():
        lifecycle.down(name, purge=purge)


@app.command()
def status(name: Name = settings.DEFAULT_NAME) -> None:
    """Which components run. Exit code 1 unless the cluster is healthy."""
    layout = settings.Layout(name)
    record = node.load(layout)
    if record is None or not record.alive:
        print("down")
        raise typer.Exit(1)
    for component, pid in record.components.items():
        state = f"running, pid {pid} on the node" if components.is_running(record, component) else "ENDED"
        print(f"{component:24} {state}")
    wrong = lifecycle.ailment(layout)
    print(f"NOT healthy: {wrong}" if wrong else "healthy")
    raise typer.Exit(1 if wrong else 0)


@app.command()
def kubeconfig(name: Name = settings.DEFAULT_NAME) -> None:
    """Print the kubeconfig's path."""
    print(settings.Layout(name).kubeconfig)


@app.command()
def images(
    name: Name = settings.DEFAULT_NAME,
    load: Annotated[Path | None, typer.Option("--load", help="Import this OCI archive first.")] = None,
) -> None:
    """List the node's images."""
    with _reported():
        cluster = embedded(settings.Layout(name))
        if load:
            cluster.load_image(load)
        for image, digest in sorted(cluster.images().items()):
            print(f"{image:55} {digest}")


@app.command()
def logs(
    component: Annotated[str, typer.Argument(help="For example kubelet; without it, all are listed.")] = "",
    lines: Annotated[int, typer.Option("--lines", "-n")] = 50,
    name: Name = settings.DEFAULT_NAME,
) -> None:
    """Print the end of a component's log."""
    layout = settings.Layout(name)
    if component:
        print(components.last_lines(layout, component, lines))
        return
    for log in sorted(layout.logs.glob("*.log")):
        print(log)


@app.command("exec", context_settings={"ignore_unknown_options": True})
def exec_(argv: Annotated[list[str], typer.Argument()], name: Name = settings.DEFAULT_NAME) -> None:
    """Run a command on the node."""
    with _reported():
        done = embedded(settings.Layout(name)).node_exec(argv, check=False)
        print(done.stdout, end="")
        print(done.stderr, end="", file=sys.stderr)
        raise typer.Exit(done.returncode)


if __name__ == "__main__":
    app()
