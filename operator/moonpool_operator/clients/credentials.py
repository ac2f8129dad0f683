"""Where the API server is and who we are: a kubeconfig, or the pod's service account."""

from __future__ import annotations

import base64
import os
import ssl
from pathlib import Path

import kopf

# Only the configuration loader of the official client is used. Touching one of its API classes (CoreV1Api) imports
# every model and costs 105 MB of resident memory, measured with 37.0.2.
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client.configuration import Configuration


async def load() -> Configuration:
    """The configuration of ``KUBECONFIG``, or of ``~/.kube/config``, or of the pod's service account."""
    configuration = Configuration()
    path = os.environ.get("KUBECONFIG")
    if path or ("KUBERNETES_SERVICE_HOST" not in os.environ and Path("~/.kube/config").expanduser().exists()):
        await kubernetes_config.load_kube_config(config_file=path, client_configuration=configuration)
    else:
        kubernetes_config.load_incluster_config(client_configuration=configuration)
    return configuration


def authorization(configuration: Configuration) -> str | None:
    """The current Authorization header; a service account's token is read again when it gets old."""
    if configuration.refresh_api_key_hook is not None:
        configuration.refresh_api_key_hook(configuration)
    bearer = configuration.api_key.get("BearerToken")
    if bearer:
        scheme, _, token = bearer.rpartition(" ")
        return f"{(scheme or 'bearer').capitalize()} {token}"
    if configuration.username:
        pair = f"{configuration.username}:{configuration.password or ''}".encode()
        return f"Basic {base64.b64encode(pair).decode()}"
    return None


def ssl_context(configuration: Configuration) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=configuration.ssl_ca_cert or None)
    if not configuration.verify_ssl:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if configuration.cert_file:
        context.load_cert_chain(configuration.cert_file, configuration.key_file)
    return context


def for_kopf(configuration: Configuration) -> kopf.ConnectionInfo:
    """The same credentials for kopf's own watches, so that it need not load a client library for them."""
    header = authorization(configuration) or ""
    scheme, _, secret = header.partition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert or None,
        insecure=not configuration.verify_ssl,
        scheme=scheme if secret else None,
        token=secret or None,
        certificate_path=configuration.cert_file or None,
        private_key_path=configuration.key_file or None,
    )
