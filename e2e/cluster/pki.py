"""Certificates and tokens of one cluster, fresh at every start.

One CA signs everything. The clients of the API server are told apart by static tokens, which need no renewal and no
bootstrap; the kubeconfigs carry them and are readable by root alone.
"""

from __future__ import annotations

import secrets
import subprocess
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import settings
from e2e.cluster.errors import ClusterError

DAYS = "365"
CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@dataclass(frozen=True)
class Identity:
    """A client of the API server: its kubeconfig's name, its user and its groups."""

    name: str
    user: str
    groups: str = ""


def identities(node: str) -> tuple[Identity, ...]:
    return (
        Identity("admin", "admin", "system:masters"),
        Identity("node", f"system:node:{node}", "system:nodes"),
        Identity("controller-manager", "system:kube-controller-manager"),
        Identity("scheduler", "system:kube-scheduler"),
        Identity("proxy", "system:kube-proxy"),
        Identity("dns", "system:coredns"),
        Identity("netpol", "system:netpol"),
    )


def create_certificates(folder: Path) -> None:
    """CA, API server certificate, its two client certificates, and the service account key pair."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _openssl(
        folder, "req", "-x509", *CURVE, "-keyout", "ca.key", "-out", "ca.crt", "-days", DAYS, "-subj", "/CN=kube-ca"
    )
    _openssl(folder, "genrsa", "-out", "sa.key", "2048")
    _openssl(folder, "rsa", "-in", "sa.key", "-pubout", "-out", "sa.pub")
    names = ["IP:127.0.0.1", f"IP:{settings.NODE_IP}", f"IP:{settings.API_SERVICE_IP}", "DNS:localhost"]
    names += ["DNS:kubernetes", "DNS:kubernetes.default", "DNS:kubernetes.default.svc"]
    names += [f"DNS:kubernetes.default.svc.{settings.CLUSTER_DOMAIN}"]
    _certificate(folder, "apiserver", "/CN=kube-apiserver", names)
    _certificate(folder, "kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client", ["DNS:client"])
    _certificate(folder, "proxy-client", "/CN=front-proxy", ["DNS:client"])


def _certificate(folder: Path, name: str, subject: str, names: list[str]) -> None:
    extensions = folder / f"{name}.ext"
    extensions.write_text(f"subjectAltName={','.join(names)}\nextendedKeyUsage=serverAuth,clientAuth\n")
    _openssl(folder, "req", *CURVE, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject)
    signing = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", DAYS, "-extfile", extensions.name)
    _openssl(folder, "x509", "-req", "-in", f"{name}.csr", *signing, "-out", f"{name}.crt")


def _openssl(folder: Path, *argv: str) -> None:
    done = subprocess.run(["openssl", *argv], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise ClusterError(f"openssl {argv[0]} failed: {done.stderr[-500:]}")


def create_tokens(node: str) -> tuple[dict[str, str], str]:
    """Fresh tokens by identity name, and the text of the API server's token file."""
    tokens: dict[str, str] = {}
    lines: list[str] = []
    for identity in identities(node):
        tokens[identity.name] = secrets.token_hex(24)
        lines.append(f'{tokens[identity.name]},{identity.user},{identity.name},"{identity.groups}"')
    return tokens, "\n".join(lines) + "\n"
