"""The OpenAI API against the real model."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.model

REFERENCE = json.loads((Path(__file__).parent.parent / "data/smollm2-135m-instruct.json").read_text())
ROBOT = "Once upon a time, there was a little robot who"


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"temperature": 0} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of a stream; it must end with [DONE]."""
    lines = []
    with client.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line:
                assert line.startswith("data: ")
                lines.append(line.removeprefix("data: "))
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("run", [run for run in REFERENCE["runs"] if "chat" not in run], ids=lambda run: run["prompt"])
def test_greedy_equals_transformers(client: httpx.Client, run: dict[str, Any]) -> None:
    for prompt in (run["prompt"], run["prompt_ids"]):
        answer = complete(client, prompt=prompt, max_tokens=len(run["new_ids"]))
        assert answer["choices"][0]["text"] == run["text"].removesuffix("<|im_end|>")
        assert answer["usage"]["completion_tokens"] == len(run["new_ids"])
        assert answer["usage"]["prompt_tokens"] == len(run["prompt_ids"])


def test_chat_equals_transformers(client: httpx.Client) -> None:
    run = next(run for run in REFERENCE["runs"] if "chat" in run)
    body = {"model": "smollm2", "messages": run["chat"], "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["content"] == "The capital of Japan is Tokyo."
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["prompt_tokens"] == len(run["prompt_ids"])

    chunks = events(client, "/v1/chat/completions", body | {"stream_options": {"include_usage": True}})
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]) == (
        "The capital of Japan is Tokyo."
    )
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]
    assert all(c["usage"] is None for c in chunks[:-1])


def test_stream_equals_whole(client: httpx.Client) -> None:
    body = {"prompt": ROBOT, "max_tokens": 24, "temperature": 0.9, "seed": 7, "n": 2, "logprobs": 2}
    whole = complete(client, **body)
    chunks = events(client, "/v1/completions", body)
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(c["text"] for c in mine) == choice["text"]
        for key in ("tokens", "text_offset"):
            assert [each for c in mine for each in c["logprobs"][key]] == choice["logprobs"][key]
        assert mine[-1]["finish_reason"] == choice["finish_reason"] == "length"


def test_seeds(client: httpx.Client) -> None:
    body = {"prompt": ROBOT, "max_tokens": 12, "temperature": 1.0}
    texts = [complete(client, **body, seed=seed)["choices"][0]["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    both = complete(client, **body, seed=1, n=2)["choices"]
    assert both[0]["text"] == texts[0] != both[1]["text"]


def test_stop_strings(client: httpx.Client) -> None:
    whole = complete(client, prompt=ROBOT, max_tokens=24)["choices"][0]["text"]
    for stop in ("people", [" happy. H", "never"], "e happy"):
        stops = [stop] if isinstance(stop, str) else stop
        answer = complete(client, prompt=ROBOT, max_tokens=24, stop=stop)["choices"][0]
        assert answer["text"] == whole.split(stops[0])[0]
        assert answer["finish_reason"] == "stop"
        chunks = events(client, "/v1/completions", {"prompt": ROBOT, "max_tokens": 24, "temperature": 0, "stop": stop})
        assert "".join(c["choices"][0]["text"] for c in chunks) == answer["text"]
    # What only begins like a stop string is shown in the end.
    tail = whole[-3:] + "never"
    assert complete(client, prompt=ROBOT, max_tokens=24, stop=tail)["choices"][0]["text"] == whole


def test_chat_logprobs(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": "Say hi"}], "temperature": 0, "max_tokens": 5}
    answer = client.post("/v1/chat/completions", json=body | {"logprobs": True, "top_logprobs": 3}).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == answer["choices"][0]["message"]["content"]
    for entry in content:
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["token"] == entry["token"]
        assert entry["logprob"] <= 0
        assert bytes(entry["bytes"]).decode() == entry["token"]


def test_several_prompts(client: httpx.Client) -> None:
    answer = complete(client, prompt=["The capital of France is", "Two plus two is"], max_tokens=4, n=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["choices"][0]["text"] == answer["choices"][1]["text"]
    assert complete(client, prompt=[[504, 3575], [504]], max_tokens=1)["usage"]["prompt_tokens"] == 3


def text_of(words: int, about: str) -> str:
    return f"{about}: " + " ".join(f"{about} {number}" for number in range(words))


def test_cached_tokens_and_bits_by_tier(client: httpx.Client) -> None:
    """With equal chunks, log probabilities after a hit are those of the cold run, bit for bit."""
    # Nine pages and a bit: the last chunk (after 128 tokens) is the same 16 tokens, cold or warm.
    prompt = [100 + (7 * number) % 900 for number in range(144)]
    body = {"prompt": prompt, "max_tokens": 4, "logprobs": 5}
    client.post("/v1/cache/flush", json={"tiers": ["l1", "l2"]})
    runs = {"cold": complete(client, **body), "l1": complete(client, **body)}
    client.post("/v1/cache/flush", json={"tiers": ["l1"]})
    runs["l2"] = complete(client, **body)
    details = {name: run["usage"]["prompt_tokens_details"] for name, run in runs.items()}
    assert [details[name]["cached_tokens"] for name in runs] == [0, 128, 128]
    assert details["l1"]["moonpool"] == {"l1_tokens": 128, "l2_tokens": 0, "l3_tokens": 0}
    assert details["l2"]["moonpool"] == {"l1_tokens": 0, "l2_tokens": 128, "l3_tokens": 0}
    assert runs["cold"]["choices"] == runs["l1"]["choices"] == runs["l2"]["choices"]


def test_cache_salt_keeps_apart(client: httpx.Client) -> None:
    prompt = text_of(30, "salted")
    complete(client, prompt=prompt, max_tokens=1, cache_salt="a")
    cached = [
        complete(client, prompt=prompt, max_tokens=1, cache_salt=salt)["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]
        for salt in ("a", "b")
    ]
    assert cached[0] > 0
    assert cached[1] == 0


def test_neutral_values_of_unsupported_fields_pass(client: httpx.Client) -> None:
    neutral = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "logit_bias": {},
        "best_of": 1,
        "echo": False,
        "suffix": None,
        "logprobs": False,
        "stream": False,
        "user": "me",
        "data_parallel_rank": 1,
        "min_p": 0,
        "repetition_penalty": 1.0,
        "skip_special_tokens": True,
        "stream_options": None,
        "top_k": -1,
    }
    complete(client, prompt="Hello", max_tokens=1, **neutral)
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "max_completion_tokens": 1}
    extra = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "logprobs": False}
    assert client.post("/v1/chat/completions", json=chat | extra).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("n", 0),
        ("max_tokens", 0),
        ("stop", ["a", "b", "c", "d", "e"]),
        ("frequency_penalty", 0.5),
        ("echo", True),
        ("best_of", 3),
        ("logit_bias", {"1": 5}),
        ("logprobs", 99),
        ("nonsense", 1),
        ("prompt", []),
        ("prompt", {"a": 1}),
        ("prompt", [99999999]),
        ("suffix", "end"),
    ],
)
def test_refusals_name_the_field(client: httpx.Client, field: str, value: Any) -> None:
    answer = client.post("/v1/completions", json={"prompt": "x"} | {field: value})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field


def test_other_refusals(client: httpx.Client) -> None:
    assert client.post("/v1/completions", content=b"{").status_code == 400
    assert client.post("/v1/completions", content=b"[]").status_code == 400
    missing = client.post("/v1/chat/completions", json={})
    assert missing.status_code == 400
    assert missing.json()["error"]["param"] == "messages"
    other = client.post("/v1/completions", json={"prompt": "x", "model": "gpt-4"})
    assert other.status_code == 404
    assert other.json()["error"]["code"] == "model_not_found"
    long = client.post("/v1/completions", json={"prompt": [5] * 9000})
    assert long.status_code == 400
    assert long.json()["error"]["code"] == "context_length_exceeded"
    assert "8192" in long.json()["error"]["message"]
    assert "9000" in long.json()["error"]["message"]


def test_client_that_goes_away_frees_everything(client: httpx.Client) -> None:
    body = {"prompt": ROBOT, "max_tokens": 2000, "temperature": 0, "ignore_eos": True}
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        for _, _line in zip(range(5), answer.iter_lines(), strict=False):
            pass
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=body, timeout=1.0)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        load = client.get("/v1/loads").json()["loads"][0]
        if load["num_total_reqs"] == 0 and load["num_used_tokens"] == 0:
            break
        time.sleep(0.1)
    else:
        pytest.fail(f"still there: {load}")
    assert 'requests_total{outcome="client_gone"} 2' in client.get("/metrics").text


def test_what_the_fleet_asks(client: httpx.Client) -> None:
    namespace = client.get("/v1/cache/namespace").json()
    assert len(namespace["namespace"]) == 64
    assert namespace["l3"]["state"] == "off"
    assert namespace["inputs"]["weights_digest"] == namespace["weights_digest"]
    model = client.get("/v1/models").json()["data"][0]
    assert (model["id"], model["owned_by"], model["max_model_len"]) == ("smollm2", "moonpool", 8192)
    answer = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"x-request-id": "r-1"})
    assert answer.headers["x-moonpool-namespace"] == namespace["namespace"]
    assert answer.headers["x-request-id"] == "r-1"
    assert answer.json()["system_fingerprint"] == namespace["namespace"][:16]
    assert client.get("/server_info").status_code == 404
    wrong = client.post("/v1/cache/grant", json={"namespace": "0" * 64, "tenant": "t", "master": "m:1"})
    assert wrong.status_code == 409
    assert client.post("/v1/cache/flush", json={"tiers": ["l3"]}).status_code == 400
    text = client.get("/metrics").text
    for name in ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "l3_state"):
        assert f"moonpool:{name}" in text
    assert 'moonpool:prefix_cache_hits_total{tier="l1"}' in text


def test_the_coldest_temperatures_are_greedy(client: httpx.Client) -> None:
    greedy = complete(client, prompt=ROBOT, max_tokens=4)["choices"][0]["text"]
    for temperature in (1e-5, 1e-40, 1e-308):
        cold = complete(client, prompt=ROBOT, max_tokens=4, temperature=temperature)
        assert cold["choices"][0]["text"] == greedy
    assert client.get("/health").status_code == 200


def test_what_can_never_be_taken_is_not_worth_a_retry(client: httpx.Client) -> None:
    many = client.post("/v1/completions", json={"prompt": ["x"] * 600, "max_tokens": 1})
    assert many.status_code == 400
    assert many.json()["error"]["param"] == "n"
    large = client.post("/v1/completions", content=b" " * ((16 << 20) + 1))
    assert large.status_code == 413
    assert large.json()["error"]["code"] == "body_too_large"


def test_a_body_that_is_wrong_a_million_times_is_refused_at_once(client: httpx.Client) -> None:
    started = time.monotonic()
    answer = client.post("/v1/completions", content=b'{"prompt":[' + b"1.5," * 1_000_000 + b"1.5]}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"
    assert time.monotonic() - started < 1
