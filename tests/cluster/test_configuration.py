"""Rendered configuration, and which cluster `up` would use."""

import base64
import json

import yaml

from e2e.cluster import components, config, image_store, lifecycle, network, pki, settings


def test_the_kubeconfig_carries_everything():
    parsed = yaml.safe_load(config.kubeconfig(b"CA", "token"))
    assert base64.b64decode(parsed["clusters"][0]["cluster"]["certificate-authority-data"]) == b"CA"
    assert parsed["clusters"][0]["cluster"]["server"] == "https://10.99.0.1:6443"
    assert parsed["users"][0]["user"] == {"token": "token"}


def test_the_cni_configuration_is_json(tmp_path):
    assert json.loads(json.dumps(config.cni(settings.Layout())))["plugins"][0]["type"] == "bridge"


def test_tokens_are_fresh_and_name_the_node():
    tokens, text = pki.create_tokens("n1")
    assert tokens != pki.create_tokens("n1")[0]
    assert f'{tokens["node"]},system:node:n1,node,"system:nodes"' in text


def test_the_janitor_runs_without_cri():
    layout = settings.Layout()
    assert "disabled_plugins" in config.containerd(layout, cri=False)
    assert "disabled_plugins" not in config.containerd(layout)


def test_coredns_has_no_loop_plugin():
    assert "loop" not in config.corefile(settings.Layout()).split()


def test_a_given_kubeconfig_wins_unless_it_is_our_own(tmp_path, monkeypatch):
    monkeypatch.setenv("MOONPOOL_STATE", str(tmp_path))
    layout = settings.Layout("x")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    assert lifecycle.given_kubeconfig(layout) is None
    other = tmp_path / "other"
    other.write_text("")
    monkeypatch.setenv("KUBECONFIG", str(other))
    assert lifecycle.given_kubeconfig(layout) == str(other)
    layout.etc.mkdir(parents=True)
    layout.kubeconfig.write_text("")
    monkeypatch.setenv("KUBECONFIG", str(layout.kubeconfig))
    assert lifecycle.given_kubeconfig(layout) is None


def test_routes_of_others_are_noticed_and_ours_are_not():
    routes = "default via 192.0.2.1 dev eth0\n10.96.0.0/16 via 10.99.0.1 dev mp-a\n10.244.0.0/16 dev cni0 scope link"
    assert network.foreign_routes(routes, "mp-a") == ["10.244.0.0/16 dev cni0 scope link"]
    assert len(network.foreign_routes(routes, "mp-b")) == 2


def test_interface_names_fit():
    assert len(settings.Layout("a-very-long-cluster-name").host_interface) <= 15


LISTING = """REF TYPE DIGEST SIZE PLATFORMS LABELS
registry.local/moonpool/worker:dev application/x sha256:new 1.0 MiB linux/amd64 -
sha256:config-new application/x sha256:new 1.0 MiB linux/amd64 -
sha256:config-old application/x sha256:old 1.0 MiB linux/amd64 -
"""


def test_images_are_listed_by_name():
    assert image_store.parse_images(LISTING) == {"registry.local/moonpool/worker:dev": "sha256:new"}


def test_only_images_whose_tag_moved_on_are_superseded():
    assert image_store.superseded(LISTING) == ["sha256:config-old"]


def test_a_missing_log_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("MOONPOOL_STATE", str(tmp_path))
    layout = settings.Layout("x")
    assert "(no log)" in components.last_lines(layout, "kubelet")
    layout.logs.mkdir(parents=True)
    (layout.logs / "kubelet.log").write_text("".join(f"line {number}\n" for number in range(50)))
    assert "line 49" in components.last_lines(layout, "kubelet")
    assert "line 10\n" not in components.last_lines(layout, "kubelet")
