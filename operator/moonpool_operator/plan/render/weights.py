"""Where a worker finds its weights: volumes, mounts and init containers for each kind of source."""

from __future__ import annotations

from dataclasses import dataclass, field

from moonpool_api.inference_service import ModelSource
from moonpool_api.names import MODEL_DIR

from moonpool_operator.clients.kube import Object
from moonpool_operator.plan.render.common import container_security


class Refused(ValueError):
    """The spec asks for something that this operator does not do; ``reason`` is a condition's reason."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Weights:
    """How a pod gets its weights. ``identity`` names the source in status.pinned."""

    identity: str
    path: str
    volumes: list[Object] = field(default_factory=list)
    mounts: list[Object] = field(default_factory=list)
    init_containers: list[Object] = field(default_factory=list)


def weights_of(source: ModelSource, allow_host_path: bool, pull_policy: str) -> Weights:
    """Raises Refused for a source that is not supported or not allowed."""
    mount: Object = {"name": "model", "mountPath": MODEL_DIR, "readOnly": True}
    if claim := source.persistent_volume_claim:
        volume = {"name": "model", "persistentVolumeClaim": {"claimName": claim.claim_name, "readOnly": True}}
        identity = f"persistentVolumeClaim/{claim.claim_name}/{claim.path}".rstrip("/")
        return Weights(identity, _below(claim.path), [volume], [mount])
    if image := source.image:
        copy: Object = {
            "name": "weights",
            "image": image.reference,
            "imagePullPolicy": pull_policy,
            "command": ["cp", "-r", image.path.rstrip("/") or "/", f"{MODEL_DIR}/"],
            "securityContext": container_security(),
            "volumeMounts": [{"name": "model", "mountPath": MODEL_DIR}],
        }
        last = image.path.rstrip("/").rpartition("/")[2]
        return Weights(
            f"image/{image.reference}{image.path}",
            _below(last),
            [{"name": "model", "emptyDir": {}}],
            [mount],
            [copy],
        )
    if source.hugging_face:
        raise Refused(
            "SourceNotSupported",
            "model.source.huggingFace isn't supported in this version; copy the weights to a volume or an image",
        )
    assert source.host_path is not None
    if not allow_host_path:
        raise Refused(
            "HostPathNotAllowed",
            "model.source.hostPath needs an operator that was started with MOONPOOL_ALLOW_HOST_PATH=true",
        )
    volume = {"name": "model", "hostPath": {"path": source.host_path.path}}
    return Weights(f"hostPath{source.host_path.path}", MODEL_DIR, [volume], [mount])


def _below(path: str) -> str:
    inner = path.strip("/")
    return f"{MODEL_DIR}/{inner}" if inner else MODEL_DIR
