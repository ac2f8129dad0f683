from __future__ import annotations

import os

import pytest
from moonpool_worker.cli.barriers import forbid_spinning


def test_threads_sleep_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    forbid_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "0"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    forbid_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "7"
