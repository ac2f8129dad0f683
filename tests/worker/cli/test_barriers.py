from __future__ import annotations

import os

import pytest
from moonpool_worker.cli.barriers import limit_spinning


@pytest.mark.parametrize(("dedicated", "spins"), [(False, "0"), (True, "20000")])
def test_spinning(dedicated: bool, spins: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    limit_spinning(dedicated)
    assert os.environ["GOMP_SPINCOUNT"] == spins
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    limit_spinning(dedicated)
    assert os.environ["GOMP_SPINCOUNT"] == "7"
