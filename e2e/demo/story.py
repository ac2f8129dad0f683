"""How the demo speaks: a heading per step, the commands as a user would type them, and what they answered."""

from __future__ import annotations

import time

from rich.console import Console
from rich.markup import escape

from e2e.fleet import Kubectl


class Story:
    def __init__(self, console: Console) -> None:
        self.console = console
        self.begin = time.monotonic()
        self._number = 0

    def step(self, title: str) -> None:
        self._number += 1
        self.console.print(f"\n[bold cyan]{self._number}. {escape(title)}[/]  [dim]{self.elapsed()}[/]")

    def elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self.begin), 60)
        return f"{minutes}:{seconds:02d}"

    def say(self, text: str) -> None:
        self.console.print(f"   {text}", highlight=False)

    def kubectl(self, kubectl: Kubectl, *args: str, limit: int = 30) -> str:
        """Show the command and (the end of) its answer; raises KubectlError when it fails."""
        self.console.print(f"   [green]$ kubectl -n {kubectl.namespace} {escape(' '.join(args))}[/]", highlight=False)
        answer = kubectl.run(*args, timeout=300)
        for line in answer.rstrip().splitlines()[-limit:]:
            self.console.print(f"   {escape(line)}", highlight=False, overflow="ignore", crop=False)
        return answer
