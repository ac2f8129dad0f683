"""The pod's annotations as the kubelet writes them into a downward-API volume.

One ``KEY="value"`` per line, the value quoted as Go's ``%q`` does it. The folder's files are links that are swapped
atomically, so a read sees one version whole.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from moonpool_api import names

FILE = "annotations"
_LINE = re.compile(r'^(?P<key>[^=\s]+)="(?P<value>(?:[^"\\]|\\.)*)"$')
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{3}|.)", re.DOTALL)
_SIMPLE = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


@dataclass(frozen=True, slots=True)
class Grant:
    """What the operator told this pod: the namespace it verified, and the tenant that may be opened ("" for none)."""

    namespace: str = ""
    tenant: str = ""
    master: str = ""


def unquote(text: str) -> str:
    """The inside of a Go-quoted string."""

    def replace(match: re.Match[str]) -> str:
        escape = match[1]
        if escape[0] in "uU" and len(escape) > 1:
            return chr(int(escape[1:], 16))
        if escape[0] == "x" and len(escape) > 1:
            return chr(int(escape[1:], 16))
        if escape.isdigit():
            return chr(int(escape, 8))
        return _SIMPLE.get(escape, escape)

    return _ESCAPE.sub(replace, text)


def parse(text: str) -> dict[str, str]:
    """Annotations by name; lines that are not of the form are passed over."""
    found = (_LINE.match(line) for line in text.split("\n"))
    return {match["key"]: unquote(match["value"]) for match in found if match}


def read_grant(folder: Path) -> Grant | None:
    """The grant in ``folder``, or None when there is no file to read (yet)."""
    try:
        text = (folder / FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    annotations = parse(text)
    return Grant(
        namespace=annotations.get(names.ANNOTATION_VERIFIED_NAMESPACE, ""),
        tenant=annotations.get(names.ANNOTATION_GRANTED_TENANT, ""),
        master=annotations.get(names.ANNOTATION_GRANTED_MASTER, ""),
    )


def write_annotations(folder: Path, annotations: dict[str, str]) -> None:
    """Write the file as the kubelet would; for tests and for a fleet without a cluster."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{key}={json.dumps(value)}" for key, value in sorted(annotations.items())]
    fresh = folder / f".{FILE}"
    fresh.write_text("\n".join(lines))
    fresh.rename(folder / FILE)
