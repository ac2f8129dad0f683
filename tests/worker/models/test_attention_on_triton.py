"""Models with attention alone over the Triton backend, in the interpreter: what its kernels are given by a model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from moonpool_worker.kernels.triton.backend import TritonKernels
from moonpool_worker.models.registry import load_model
from moonpool_worker.weights.safetensors_checkpoint import SafetensorsCheckpoint

from tests.worker.models import test_family_deepseek as deepseek
from tests.worker.models import test_family_gemma3 as gemma3
from tests.worker.models import test_family_gpt_oss as gpt_oss
from tests.worker.models import test_family_llama as llama
from tests.worker.models.family_case import TOLERANCE, Case, FamilyCase, Text

#: Grouped heads; windows and GELU; sinks; latent rows.
CONFIGS = {
    "llama": llama.TestLlama.config,
    "gemma3": gemma3.TestGemma3.config,
    "gpt_oss": gpt_oss.TestGptOss.config,
    "deepseek_v3": deepseek.TestDeepseekV3.config,
}


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.family
@pytest.mark.parametrize("name", CONFIGS)
def test_as_transformers(name: str, tmp_path: Path) -> None:
    """A prompt over page boundaries and further than the windows, in two chunks, and a decode."""
    reference = FamilyCase(CONFIGS[name], tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    try:
        case = Case(load_model(checkpoint, "float32", TritonKernels()))
    finally:
        checkpoint.close()
    ids, text = reference.ids(50), Text(case)
    expected = reference.expected(ids)
    for upto in (30, 49, 50):
        logits = text.feed(ids[text.length : upto])
        torch.testing.assert_close(logits, expected[upto - 1], atol=TOLERANCE, rtol=0)
