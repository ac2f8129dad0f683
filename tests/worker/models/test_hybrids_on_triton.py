"""Models with recurrent states over the Triton backend, in the interpreter: what its kernels are given by a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from moonpool_worker.kernels.triton.backend import TritonKernels
from moonpool_worker.models.registry import load_model
from moonpool_worker.weights.safetensors_checkpoint import SafetensorsCheckpoint

from tests.worker.models.family_case import TOLERANCE, Case, FamilyCase, Text
from tests.worker.models.test_family_kimi_linear import TestKimiLinear
from tests.worker.models.test_family_mamba2 import TestMamba2
from tests.worker.models.test_family_qwen3_next import TestQwen35

CONFIGS = {"qwen3_5": TestQwen35.config, "kimi_linear": TestKimiLinear.config, "mamba2": TestMamba2.config}
del TestKimiLinear, TestMamba2, TestQwen35  # or their tests would run here again


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.family
@pytest.mark.parametrize("name", CONFIGS)
def test_as_transformers(name: str, tmp_path: Path) -> None:
    """A prompt over a page boundary, and a decode."""
    reference = FamilyCase(CONFIGS[name], tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    try:
        case = Case(load_model(checkpoint, "float32", TritonKernels()))
    finally:
        checkpoint.close()
    ids, text = reference.ids(20), Text(case)
    expected = reference.expected(ids)
    for upto in (19, 20):
        logits = text.feed(ids[text.length : upto], keep=[16] if upto == 19 else [])
        torch.testing.assert_close(logits, expected[upto - 1], atol=TOLERANCE, rtol=0)
