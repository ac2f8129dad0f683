"""The ways in which the embedded cluster fails, each with its own exit code."""

from __future__ import annotations


class ClusterError(Exception):
    """Something went wrong; the message says what, and where to look."""

    exit_code = 1


class CannotHostError(ClusterError):
    """This machine can't host the cluster. The message is one sentence: what is missing and what to do."""

    exit_code = 3


class ComponentDiedError(ClusterError):
    """A component of the node ended, or didn't become ready in time. The message carries the end of its log."""
