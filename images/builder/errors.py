"""The builder's one error."""

from __future__ import annotations


class BuildError(Exception):
    """An image can't be built; the message says why, with the end of the tool's output."""
