"""The namespace changes with every input that changes KV bytes, and with nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moonpool_api.geometry import full_attention
from moonpool_api.names import parse_tenant, tenant_name
from moonpool_api.namespace import NamespaceInputs, RopeInputs, differing_inputs, namespace_hash

BASE = NamespaceInputs(
    architecture="llama",
    weights_digest="sha256:" + "a" * 64,
    weight_version="v1",
    dtype="bfloat16",
    attention_backend="torch",
    rope=RopeInputs(theta=1e5),
    geometry=full_attention(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", prefix_granularity=16),
    isolation="default/chat",
)

EDITS = {
    "kv_format": 2,
    "architecture": "qwen2",
    "weights_digest": "sha256:" + "b" * 64,
    "weight_version": "v2",
    "dtype": "float32",
    "quantization": "int8",
    "attention_backend": "triton",
    "tensor_parallel": 2,
    "rope": RopeInputs(theta=1e6),
    "geometry": BASE.geometry.model_copy(update={"prefix_granularity": 32}),
    "adapter": "lora-1",
    "isolation": "",
}


def test_every_input_is_edited_below() -> None:
    assert EDITS.keys() == NamespaceInputs.model_fields.keys()


@pytest.mark.parametrize("field", EDITS)
def test_an_edit_of_any_input_gives_another_namespace(field: str) -> None:
    edited = BASE.model_copy(update={field: EDITS[field]})
    assert namespace_hash(edited) != namespace_hash(BASE)
    assert {name.split(".")[0] for name in differing_inputs(BASE, edited)} == {field}


def test_the_hash_is_stable_across_releases() -> None:
    # Changing this value makes every cached block in every store unreachable.
    assert namespace_hash(BASE) == namespace_hash(NamespaceInputs.model_validate_json(BASE.model_dump_json()))
    assert namespace_hash(BASE) == "4d4f3a0733619ecc090fbd3a23591a5b160bb54fe6b979e42d27ef130d10ba93"


def test_bytes_per_token_of_smollm2() -> None:
    assert BASE.geometry.bytes_per_token == 23_040
    assert BASE.geometry.bytes_per_page == 368_640


@given(epoch=st.integers(min_value=0, max_value=10**6))
def test_tenant_names_round_trip(epoch: int) -> None:
    assert parse_tenant(tenant_name("c" * 64, epoch)) == ("c" * 64, epoch)


@pytest.mark.parametrize("name", ["default", "mp1-", "mp1-abc-0", "mp2-" + "c" * 64 + "-0", "mp1-" + "c" * 64 + "-x"])
def test_foreign_tenants_are_not_ours(name: str) -> None:
    assert parse_tenant(name) is None
