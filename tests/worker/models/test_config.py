from __future__ import annotations

import pytest
from moonpool_worker.models.dtype import resolve_dtype


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="float8"):
        resolve_dtype("float8")
