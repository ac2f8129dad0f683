"""The check for machines with a GPU, as far as it goes without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[3]


def figures(*flags: str) -> dict[str, object]:
    command = [sys.executable, "-m", "benchmarks.gpu_check", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.interpreter
@pytest.mark.slow
def test_all_kernels_agree_with_torch_in_the_interpreter() -> None:
    line = figures("--interpret")
    assert [(name, line.get(f"{name[:-3]}_why")) for name in line if name.endswith("_ok") and not line[name]] == []
    assert sum(name.endswith("_ok") for name in line) >= 27


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so() -> None:
    line = figures("--only", "rope")
    assert "no GPU" in str(line["why"])
    assert line["rope_ok"] is None and line["rope_share"] is None
