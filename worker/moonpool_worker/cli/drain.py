"""``drain``: ask the worker on this machine to finish, over plain HTTP."""

from __future__ import annotations

import http.client
import json
import sys


def drain_worker(host: str, port: int, timeout: float | None) -> int:
    """Exit code 0 when the worker has drained or is gone; 1 when it answered something else. ``timeout`` in seconds."""
    connection = http.client.HTTPConnection(host, port)
    body = json.dumps({} if timeout is None else {"timeout": timeout})
    try:
        connection.request("POST", "/drain", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as failure:
        print(f"the worker on {host}:{port} is gone already: {failure}", file=sys.stderr)
        return 0
    print(text)
    return 0 if answer.status == 200 else 1
