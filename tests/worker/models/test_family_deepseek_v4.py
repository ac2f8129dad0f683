"""DeepSeek-V4 beside transformers: with short strides in every check of a family, and with its own (4 and 128)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moonpool_worker.models.deepseek_v4.config import read_config
from moonpool_worker.models.registry import geometry
from transformers import DeepseekV4Config

from tests.worker.models.family_case import TOLERANCE, FamilyCase, FamilyChecks, Text

_SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "moe_intermediate_size": 24,
    "num_attention_heads": 4,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 4,
    "hc_mult": 3,
    "sliding_window": 12,
    "swiglu_limit": 1.0,
    "index_n_heads": 4,
    "index_head_dim": 12,
    "index_topk": 512,
    "max_position_embeddings": 1024,
    "layer_types": [
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "sliding_attention",
        "compressed_sparse_attention",
    ],
    "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"],
}


class TestDeepseekV4(FamilyChecks):
    """An entry for every 4 and every 16 tokens; all entries are looked at."""

    config = DeepseekV4Config(
        **_SMALL, compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16}
    )


class TestChosenEntries(FamilyChecks):
    """The indexer leaves entries out. Many heads: with few, entries that all heads score as zero are equal, and which
    of them is taken is chance."""

    config = DeepseekV4Config(
        **_SMALL | {"index_n_heads": 16, "index_topk": 5},
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    )


class TestOwnStrides:
    """Entries for 4 and 128 tokens, pages of 128, long texts stretched by YaRN."""

    page = 128

    @pytest.fixture(scope="class")
    @classmethod
    def case(cls, tmp_path_factory: pytest.TempPathFactory) -> FamilyCase:
        config = DeepseekV4Config(
            **_SMALL,
            rope_parameters={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 8,
                "beta_slow": 1,
            },
        )
        return FamilyCase(config, tmp_path_factory.mktemp("v4"), cls.page)

    @pytest.mark.family
    @pytest.mark.parametrize("sizes", [[300], [128, 172], [5, 126, 130, 39], [127, 1, 1, 3, 170], [256, 1]], ids=str)
    def test_prefill(self, case: FamilyCase, sizes: list[int]) -> None:
        """Chunks that end on, before and behind the end of an entry of either kind."""
        ids = case.ids(sum(sizes))
        expected, text = case.expected(ids), Text(case)
        for size in sizes:
            logits = text.feed(ids[text.length : text.length + size])
            torch.testing.assert_close(logits, expected[text.length - 1], atol=TOLERANCE, rtol=0)

    @pytest.mark.family
    def test_decode_over_the_end_of_an_entry(self, case: FamilyCase) -> None:
        ids = case.ids(264, seed=1)
        expected, text = case.expected(ids), Text(case)
        text.feed(ids[:250])
        for token in ids[250:]:
            text.lose_the_past()
            logits = text.feed([token])
            torch.testing.assert_close(logits, expected[text.length - 1], atol=TOLERANCE, rtol=0)

    @pytest.mark.family
    def test_mixed_step(self, case: FamilyCase) -> None:
        """Decodes of texts with and without entries, beside chunks that complete some."""
        texts = [case.ids(count, seed=count) for count in (2, 200, 129, 131, 400, 128)]
        requests = [Text(case) for _ in texts]
        for request, ids, past in zip(requests, texts, (1, 199, 128, 126, 90, 0), strict=True):
            if past:
                request.feed(ids[:past])
                request.lose_the_past()
        logits = case.step(*(r.chunk(ids[r.length :]) for r, ids in zip(requests, texts, strict=True)))
        expected = torch.stack([case.expected(ids)[-1] for ids in texts])
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)

    @pytest.mark.family
    def test_greedy(self, case: FamilyCase) -> None:
        prompt, count = case.ids(252, seed=3), 8
        text = Text(case)
        ids = [int(text.feed(prompt).argmax())]
        while len(ids) < count:
            ids.append(int(text.feed(ids[-1:]).argmax()))
        assert ids == case.expected_greedy(prompt, count)

    @pytest.mark.family
    @pytest.mark.bit_equal
    @pytest.mark.parametrize("pages", [1, 2])
    def test_hit(self, case: FamilyCase, pages: int) -> None:
        """Behind a prefix of whole pages, of which the windows' rows before the last ones are gone."""
        ids, cut = case.ids(400, seed=4), pages * self.page
        cold = Text(case)
        cold.feed(ids[:cut])
        cold.lose_the_past()
        hit = cold.hit(cut)
        expected = [cold.feed(ids[cut:380])] + [cold.feed([token]) for token in ids[380:390]]
        Text(case).feed(case.ids(400, seed=5))
        found = [hit.feed(ids[cut:380])] + [hit.feed([token]) for token in ids[380:390]]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        torch.testing.assert_close(found[0], case.expected(ids)[379], atol=TOLERANCE, rtol=0)

    def test_groups(self, case: FamilyCase) -> None:
        """name, layers, tokens of a block, stride, window, numbers of a row."""
        found = [
            (g.name, g.layers, g.block_tokens, g.stride, g.window, g.planes[0].shape) for g in case.geometry.groups
        ]
        assert found == [
            ("window", (0, 1, 2, 3), 8, 1, 12, (16,)),
            ("csa", (1, 3), 128, 4, None, (16 + 12,)),
            ("csa_tail", (1, 3), 4, 1, 5, (4 * (16 + 12),)),
            ("hca", (0,), 128, 128, None, (16,)),
            ("hca_tail", (0,), 128, 1, 1, (2 * 16,)),
        ]

    def test_a_page_of_no_whole_entries_is_refused(self, case: FamilyCase) -> None:
        with pytest.raises(ValueError, match="multiple of 128"):
            geometry(case.config, "float32", 64)


_DEEPSEEKS_OWN: dict[str, Any] = {
    "qk_rope_head_dim": 8,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536},
    "compress_ratios": [128, 4, 0, 4, 0],
    "num_hash_layers": 2,
}


def test_a_configuration_in_deepseeks_own_terms() -> None:
    """Is read as transformers reads it."""
    changed = {"layer_types", "mlp_layer_types", "partial_rotary_factor", "num_hidden_layers"}
    small = {name: value for name, value in _SMALL.items() if name not in changed} | {"num_hidden_layers": 4}
    reference = DeepseekV4Config(**small, **_DEEPSEEKS_OWN).to_dict()
    assert read_config(
        DeepseekV4Config(**small).to_dict()
        | {"layer_types": None, "mlp_layer_types": None, "rope_parameters": None, **_DEEPSEEKS_OWN}
    ) == read_config(reference)


@pytest.mark.parametrize(
    "change",
    [
        {"layer_types": ["full_attention"] * 4},
        {"mlp_layer_types": ["dense"] * 4},
        {"attention_bias": True},
        {"n_shared_experts": 2},
        {"scoring_func": "tanh"},
        {"layer_types": ["sliding_attention"]},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"of type|biases|shared experts|scores|kinds|fp8"):
        read_config(DeepseekV4Config(**_SMALL).to_dict() | change)
