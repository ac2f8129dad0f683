"""A real Mooncake master and store for tests, on free loopback ports.

The master runs with strict tenants and a file of quotas, as Moonpool's operator starts it; the store is
``mc_store_rest_server``, a process of its own. Nothing needs root or a network.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

BIN = Path(sys.executable).parent
MiB = 1 << 20


def available() -> bool:
    """Whether this environment has Mooncake's programs."""
    return (BIN / "mooncake_master").exists() and (BIN / "mc_store_rest_server").exists()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Answer:
    """Status and JSON (or text) of one admin call."""

    status: int
    body: dict
    text: str


@dataclass
class RunningMooncake:
    """One master, one store, and the admin calls of ``docs/mooncake-admin.md``."""

    folder: Path
    rpc_port: int
    http_port: int
    rest_port: int
    segment: int
    client_ttl: int = 10
    put_start_release: int = 8
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def master(self) -> str:
        return f"127.0.0.1:{self.rpc_port}"

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    # -- processes ---------------------------------------------------------------------------------------------

    def start_master(self) -> None:
        quotas = self.folder / "quotas.yaml"
        if not quotas.exists():
            quotas.write_text("version: 1\ntenants: []\n")
        self._start(
            "master",
            str(BIN / "mooncake_master"),
            "--rpc_address=127.0.0.1",
            f"--rpc_port={self.rpc_port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self.http_port}",
            "--enable_multi_tenants=true",
            "--tenant_quota_connector_type=file",
            f"--tenant_quota_connector_uri={quotas}",
            "--put_start_discard_timeout_sec=5",
            f"--put_start_release_timeout_sec={self.put_start_release}",
            f"--client_ttl={self.client_ttl}",
            "--logtostderr=1",
        )
        self._wait(lambda: self._responds(), "the master's admin API")

    def start_store(self, wait: bool = True) -> None:
        self._start(
            "store",
            str(BIN / "mc_store_rest_server"),
            f"--port={self.rest_port}",
            MOONCAKE_MASTER=self.master,
            MOONCAKE_TE_META_DATA_SERVER="P2PHANDSHAKE",
            MOONCAKE_LOCAL_HOSTNAME="127.0.0.1",
            MOONCAKE_GLOBAL_SEGMENT_SIZE=str(self.segment),
            MOONCAKE_LOCAL_BUFFER_SIZE=str(16 * MiB),
            MOONCAKE_PROTOCOL="tcp",
            MC_STORE_CLIENT_SETUP_RETRIES="3",
        )
        if wait:
            self.wait_for_capacity()

    def wait_for_capacity(self, seconds: float = 30) -> None:
        self._wait(lambda: self.capacity() > 0, "the store's segment", seconds)

    def signal(self, name: str, number: int) -> None:
        self.processes[name].send_signal(number)

    def pid(self, name: str) -> int:
        return self.processes[name].pid

    def kill(self, name: str) -> None:
        """SIGKILL ``master`` or ``store`` and reap it."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait(10)

    def stop(self) -> None:
        for process in reversed(list(self.processes.values())):
            process.kill()
            process.wait(10)
        self.processes.clear()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _start(self, name: str, *command: str, **environment: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=os.environ | {"GLOG_logtostderr": "1", "GLOG_minloglevel": "1"} | environment,
            )

    def _wait(self, done: object, what: str, seconds: float = 30) -> None:
        assert callable(done)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if done():
                return
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise RuntimeError(f"{name} exited {process.returncode}: {self.log(name)[-2000:]}")
            time.sleep(0.05)
        raise TimeoutError(f"{what} did not come up in {seconds} s")

    def _responds(self) -> bool:
        try:
            return self.call("GET", "/health").status == 200
        except OSError:
            return False

    # -- the admin API -----------------------------------------------------------------------------------------

    def call(self, method: str, path: str, body: dict | None = None) -> Answer:
        """One admin call; OSError when the master does not answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.http + path, data=data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                status, text = response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        try:
            parsed = json.loads(text)
        except ValueError:
            parsed = {}
        return Answer(status, parsed if isinstance(parsed, dict) else {}, text)

    def register(self, tenant: str, quota: int) -> Answer:
        """Register a tenant, or change the quota of a registered one."""
        return self.call("PUT", f"/api/v1/tenant_quotas?tenant_id={tenant}", {"requested_quota_bytes": quota})

    def fence(self, tenant: str) -> Answer:
        """Close a tenant for writes: one byte is the smallest quota that the master accepts."""
        return self.register(tenant, 1)

    def quota(self, tenant: str) -> dict | None:
        """The master's figures of one tenant, or None when it is not registered."""
        answer = self.call("GET", f"/api/v1/tenant_quotas?tenant_id={tenant}")
        return answer.body["data"] if answer.status == 200 else None

    def charged(self, tenant: str) -> int:
        return int((self.quota(tenant) or {}).get("charged_bytes", 0))

    def remove_all(self, tenant: str, force: bool = True) -> int:
        """Remove the tenant's objects; returns how many."""
        forced = "true" if force else "false"
        answer = self.call("POST", f"/api/v1/remove_all?force={forced}&tenant_id={tenant}")
        return int(answer.body.get("removed_count", 0))

    def delete(self, tenant: str) -> Answer:
        """Delete the tenant; 409 while it owns bytes."""
        return self.call("DELETE", f"/api/v1/tenant_quotas?tenant_id={tenant}")

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels; 0 when it is not there."""
        lines = [line for line in self.call("GET", "/metrics").text.splitlines() if not line.startswith("#")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def capacity(self) -> int:
        try:
            return int(self.metric("master_total_capacity_bytes"))
        except OSError:
            return 0


@contextlib.contextmanager
def running_mooncake(
    tenants: dict[str, int] | None = None, segment: int = 64 * MiB, store: bool = True, client_ttl: int = 10
) -> Iterator[RunningMooncake]:
    """A master, a store of ``segment`` bytes, and the given tenants with their quotas in bytes."""
    with tempfile.TemporaryDirectory(prefix="mooncake-") as folder:
        running = RunningMooncake(Path(folder), free_port(), free_port(), free_port(), segment, client_ttl)
        try:
            running.start_master()
            if store:
                running.start_store()
            for tenant, quota in (tenants or {}).items():
                answer = running.register(tenant, quota)
                assert answer.status == 200, answer.text
            yield running
        finally:
            running.stop()
