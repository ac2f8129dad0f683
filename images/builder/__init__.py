"""Builds Moonpool's images without Docker: layers as plain tars, images as OCI layouts.

`python -m images.builder build --load` builds what changed and imports it into the embedded cluster. The steps are
`base` (Debian, by mmdebstrap), `deps` (Python packages from uv.lock), `app` (the project's code), `oci` (the image).
"""

from images.builder.build import build_and_load, build_images

__all__ = ["build_and_load", "build_images"]
