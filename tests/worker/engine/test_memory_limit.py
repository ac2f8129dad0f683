from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from moonpool_worker.engine import memory_limit
from moonpool_worker.engine.memory_limit import HostMemory
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


def test_refusal_shows_the_sum_and_what_would_fit() -> None:
    needed = HostMemory(weights=270 << 20, l1=512 << 20, l2=4 << 30)
    with pytest.raises(SettingsError) as refused:
        needed.check(4 << 30)
    sentence = str(refused.value)
    assert "4.0 GiB, but 270.0 MiB weights + 512.0 MiB L1 + 4.0 GiB L2 + 17.0 MiB page tables + " in sentence
    largest = int(sentence.rpartition("lower --l2-size to ")[2].removesuffix("Mi"))
    # What the sentence says must fit, and nothing larger may.
    dataclasses.replace(needed, l2=largest << 20).check(4 << 30)
    with pytest.raises(SettingsError):
        dataclasses.replace(needed, l2=largest + 1 << 20).check(4 << 30)


def test_without_room_even_for_l1_the_sentence_names_both() -> None:
    with pytest.raises(SettingsError, match="make --l1-size or --l2-size smaller"):
        HostMemory(270 << 20, 512 << 20, 1 << 20).check(1 << 30)
    HostMemory(270 << 20, 512 << 20, 0).check(2 << 30)
    HostMemory(1 << 60, 0, 0).check(None)


def test_a_size_wins_over_a_ratio_of_l1() -> None:
    assert memory_limit.l2_bytes(None, None, 100) == 100
    assert memory_limit.l2_bytes(None, 2.5, 100) == 250
    assert memory_limit.l2_bytes(None, 0, 100) == 0
    assert memory_limit.l2_bytes(7, 2.5, 100) == 7
    assert memory_limit.l2_bytes(0, None, 100) == 0
