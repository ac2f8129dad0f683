"""Fields of the OpenAI API, and of gateways, that this engine does not implement.

Their neutral values change nothing and are accepted, since clients and gateways send them unasked; any other value is
refused, because an answer that silently ignores it would be wrong.
"""

from __future__ import annotations

from typing import Any

from moonpool_worker.server.errors import ApiError

#: Nothing about the answer depends on these.
IGNORED = frozenset(
    {
        "user",
        "data_parallel_rank",
        "routed_dp_rank",
        "rid",
        "request_id",
        "metadata",
        "store",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "priority",
        "parallel_tool_calls",
        "separate_reasoning",
        "stream_reasoning",
        "skip_special_tokens",
        "no_stop_trim",
        "return_hidden_states",
        "spaces_between_special_tokens",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
    }
)

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "service_tier": ("auto", "default"),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "stop_token_ids": ([],),
    "use_beam_search": (False,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "include_stop_str_in_output": (False,),
    "chat_template_kwargs": ({},),
    "regex": ("",),
    "ebnf": ("",),
    "json_schema": ("",),
    "structural_tag": ("",),
    "lora_path": ("",),
    "session_params": ({},),
    "logits_processors": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}


def take_out(body: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """``body`` without ignored fields and neutral values.

    Raises ApiError 400 naming the field, for a value that would have an effect, and for a field nobody knows.
    """
    kept = {}
    for name, value in body.items():
        if name in known:
            kept[name] = value
        elif name in IGNORED or (name in _NEUTRAL and (value is None or value in _NEUTRAL[name])):
            continue
        elif name in _NEUTRAL:
            raise ApiError(
                400, f"{name!r} is not supported by this server; leave it out", param=name, code="unsupported_parameter"
            )
        else:
            raise ApiError(400, f"unrecognized request argument: {name}", param=name, code="unknown_parameter")
    return kept
