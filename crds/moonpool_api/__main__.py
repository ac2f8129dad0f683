"""Write the CRD manifests: ``python -m moonpool_api [FOLDER]`` (default: ``crds/``)."""

from __future__ import annotations

import sys
from pathlib import Path

import yaml

from moonpool_api.schema import Schema, custom_resource_definitions


class _NoAliases(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def render(manifest: Schema) -> str:
    head = "# Generated from crds/moonpool_api by `python -m moonpool_api`; a test fails when they differ.\n"
    return head + yaml.dump(manifest, Dumper=_NoAliases, sort_keys=False, width=110)


def main(folder: Path) -> None:
    for name, manifest in custom_resource_definitions().items():
        (folder / name).write_text(render(manifest))
        print(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent)
