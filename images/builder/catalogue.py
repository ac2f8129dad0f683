"""The images of Moonpool: which layers each is made of, and how it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from images.builder import app, base, deps, oci, prune, static
from images.builder.layers import Layer, layer

REGISTRY = "registry.local"
USER = f"{base.UID}:{base.UID}"
PATH = f"/{deps.PREFIX}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
ENVIRONMENT = (
    f"PATH={PATH}",
    f"PYTHONPATH=/{app.PREFIX}:/{deps.PREFIX}",
    "PYTHONDONTWRITEBYTECODE=1",
    "PYTHONUNBUFFERED=1",
    "HOME=/tmp",
    "LANG=C.UTF-8",
)


@dataclass(frozen=True)
class PythonImage:
    """An image of Debian, locked packages, and (if `code`) the project's own packages."""

    name: str
    extras: tuple[str, ...]
    command: tuple[str, ...]
    keep_base: tuple[str, ...] | None = None
    rules: prune.Rules | None = None
    code: bool = True

    @property
    def tag(self) -> str:
        return f"{REGISTRY}/moonpool/{self.name}:dev"

    def build(self, say: Callable[[str], None]) -> oci.Image:
        locked = deps.requirements(self.extras, self.keep_base)
        rules = self.rules
        layers = [
            _layer("base", base.recipe(), base.build, say),
            _layer(
                f"deps-{self.name}",
                deps.recipe(locked, rules),
                lambda target: deps.build(target, locked, rules),
                say,
            ),
        ]
        if self.code:
            layers.append(_layer("app", app.recipe(), app.build, say))
        config = {"User": USER, "Env": list(ENVIRONMENT), "Entrypoint": list(self.command), "WorkingDir": "/tmp"}
        return oci.image(self.tag, layers, config)


@dataclass(frozen=True)
class StaticImage:
    """An image of one layer without Python."""

    name: str
    tag: str
    command: tuple[str, ...]
    recipe: Callable[[], dict]
    write: Callable[[Path], None]

    def build(self, say: Callable[[str], None]) -> oci.Image:
        layers = [_layer(self.name, self.recipe(), self.write, say)]
        config = {"User": USER, "Env": ["PATH=/bin"], "Entrypoint": list(self.command), "WorkingDir": "/"}
        return oci.image(self.tag, layers, config)


def _layer(name: str, recipe: dict, build: Callable[[Path], None], say: Callable[[str], None]) -> Layer:
    def announced(target: Path) -> None:
        say(f"building layer {name}")
        build(target)

    return layer(name, recipe, announced)[0]


IMAGES: dict[str, PythonImage | StaticImage] = {
    each.name: each
    for each in (
        StaticImage("pause", f"{REGISTRY}/pause:1", ("/pause",), static.pause_recipe, static.build_pause),
        PythonImage("operator", ("operator",), ("python3", "-m", "moonpool_operator")),
        PythonImage("gateway", ("gateway",), ("smg",), keep_base=("pyyaml",), code=False),
        PythonImage("store", ("cpu",), ("mooncake_master",), keep_base=(), code=False),
        PythonImage("worker", ("worker", "cpu"), ("python3", "-m", "moonpool_worker"), rules=prune.CPU_TORCH),
        StaticImage(
            "weights-smollm2",
            f"{REGISTRY}/moonpool/weights-smollm2:dev",
            ("sh",),
            static.weights_recipe,
            static.build_weights,
        ),
    )
}
