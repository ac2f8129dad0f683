"""Why a model could not be loaded."""

from __future__ import annotations


class ModelLoadError(Exception):
    """One sentence that a user can act on."""
