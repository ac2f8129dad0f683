"""Renders the configuration files of the node's components into the state directory."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import yaml

from e2e.cluster import pki, settings


def write_all(layout: settings.Layout) -> None:
    """Write every file that a component of this cluster reads."""
    layout.etc.mkdir(parents=True, exist_ok=True, mode=0o700)
    layout.volumes.mkdir(parents=True, exist_ok=True)
    layout.volumes.chmod(0o777)
    pki.create_certificates(layout.pki)
    tokens, token_file = pki.create_tokens(layout.name)
    _write(layout.etc / "tokens.csv", token_file)
    ca = (layout.pki / "ca.crt").read_bytes()
    for name, token in tokens.items():
        _write(layout.etc / f"{name}.kubeconfig", kubeconfig(ca, token))
    _write(layout.etc / "cni" / "10-bridge.conflist", json.dumps(cni(layout)))
    _write(layout.etc / "containerd.toml", containerd(layout))
    _write(layout.etc / "containerd-janitor.toml", containerd(layout, cri=False))
    _write(layout.etc / "kubelet.yaml", yaml.safe_dump(kubelet(layout)))
    _write(layout.etc / "Corefile", corefile(layout))


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o600)


def kubeconfig(ca: bytes, token: str) -> str:
    """A kubeconfig with everything inside, so that it can be copied elsewhere on this machine."""
    cluster = {
        "server": f"https://{settings.NODE_IP}:{settings.API_PORT}",
        "certificate-authority-data": base64.b64encode(ca).decode(),
    }
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "moonpool", "cluster": cluster}],
            "users": [{"name": "moonpool", "user": {"token": token}}],
            "contexts": [{"name": "moonpool", "context": {"cluster": "moonpool", "user": "moonpool"}}],
            "current-context": "moonpool",
        },
        sort_keys=False,
    )


def cni(layout: settings.Layout) -> dict:
    """Pods on a bridge of the node; addresses are handed out by a file in the node's own /run."""
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": settings.NODE_POD_CIDR}]],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": "/run/cni-networks",
        },
    }
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, portmap]}


def containerd(layout: settings.Layout, *, cri: bool = True) -> str:
    """containerd 1.6. Without `cri` it serves only the cleaning of what an earlier cluster left."""
    disabled = "" if cri else 'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n'
    return f"""version = 2
root = "{layout.containerd_root}"
state = "/run/containerd"
oom_score = 0
{disabled}
[grpc]
  address = "/run/containerd/containerd.sock"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{settings.PAUSE_IMAGE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  disable_hugetlb_controller = true
  tolerate_missing_hugetlb_controller = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{layout.etc}/cni"
"""


def kubelet(layout: settings.Layout) -> dict:
    """Nothing is reserved and nothing is garbage-collected: the node is small and its images can't be pulled again."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(layout.pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": True,
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDNS": [settings.DNS_SERVICE_IP],
        "clusterDomain": settings.CLUSTER_DOMAIN,
        "resolvConf": "/etc/resolv.conf",
        "registerNode": True,
        "oomScoreAdj": 0,
        "nodeStatusUpdateFrequency": "1s",
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageMaximumGCAge": "0s",
    }


def corefile(layout: settings.Layout) -> str:
    """CoreDNS as a process of the node. No `loop` plugin (it forwards nowhere), `ttl 0`-like caching for tests."""
    return f"""{settings.CLUSTER_DOMAIN}:53 in-addr.arpa:53 {{
  bind {settings.NODE_IP}
  errors
  health {settings.NODE_IP}:8099
  ready {settings.NODE_IP}:8181
  kubernetes {settings.CLUSTER_DOMAIN} in-addr.arpa {{
    kubeconfig {layout.etc}/dns.kubeconfig moonpool
    pods insecure
    ttl 1
  }}
  cache 1
}}
.:53 {{
  bind {settings.NODE_IP}
  template ANY ANY {{
    rcode NXDOMAIN
  }}
}}
"""
