from __future__ import annotations

from pathlib import Path

import pytest
from moonpool_worker.engine import memory_limit
from moonpool_worker.settings import SettingsError


def test_tightest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("0::/pod/container\n")
    root = tmp_path / "fs"
    (root / "pod/container").mkdir(parents=True)
    (root / "pod/container/memory.max").write_text("max\n")
    (root / "pod/memory.max").write_text("1000000\n")
    assert memory_limit.container_limit(root, own) == 1000000


def test_version_1_and_its_way_to_say_unlimited(tmp_path: Path) -> None:
    own = tmp_path / "cgroup"
    own.write_text("5:cpu:/x\n4:memory:/x\n")
    root = tmp_path / "fs"
    (root / "memory/x").mkdir(parents=True)
    (root / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_limit.container_limit(root, own) is None
    (root / "memory/x/memory.limit_in_bytes").write_text("2048\n")
    assert memory_limit.container_limit(root, own) == 2048


def test_refusal_shows_the_sum() -> None:
    with pytest.raises(SettingsError, match=r"1\.0 GiB, but .*MiB weights \+ 512\.0 MiB L1 \+ 0 B L2"):
        memory_limit.check(1 << 30, 270 << 20, 512 << 20, 0)
    memory_limit.check(2 << 30, 270 << 20, 512 << 20, 0)
    memory_limit.check(None, 1 << 60, 0, 0)
