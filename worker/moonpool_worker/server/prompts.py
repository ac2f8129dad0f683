"""From what a body says to token ids that fit the model."""

from __future__ import annotations

import asyncio

from moonpool_worker.engine.loading import Loaded
from moonpool_worker.server.bodies import ChatBody, CompletionBody
from moonpool_worker.server.errors import ApiError
from moonpool_worker.tokenizer.chat_template import ChatTemplateError

#: Longer texts are tokenised on another thread: at about 2 µs a character this one would keep streams waiting.
_INLINE_CHARACTERS = 2000


async def completion_prompts(body: CompletionBody, loaded: Loaded) -> list[list[int]]:
    """One list of token ids per prompt. Raises ApiError 400."""
    prompts = [
        await _encode(prompt, loaded) if isinstance(prompt, str) else _checked(prompt, loaded)
        for prompt in body.prompts
    ]
    if not prompts:
        raise ApiError(400, "prompt: must not be an empty list", param="prompt", code="invalid_value")
    for prompt in prompts:
        _fit(prompt, loaded, "prompt")
    return prompts


async def chat_prompt(body: ChatBody, loaded: Loaded) -> list[int]:
    """Token ids of the chat with the model's template. Raises ApiError 400."""
    messages = [
        {"role": "system" if message.role == "developer" else message.role, "content": message.content or ""}
        for message in body.messages
    ]
    try:
        text = loaded.tokenizer.apply_chat_template(messages)
    except ChatTemplateError as failure:
        raise ApiError(400, str(failure), param="messages", code="invalid_value") from failure
    prompt = await _encode(text, loaded)
    _fit(prompt, loaded, "messages")
    return prompt


async def _encode(text: str, loaded: Loaded) -> list[int]:
    if len(text) <= _INLINE_CHARACTERS:
        return loaded.tokenizer.encode(text)
    return await asyncio.to_thread(loaded.tokenizer.encode, text)


def _checked(token_ids: list[int], loaded: Loaded) -> list[int]:
    for token_id in token_ids:
        if not 0 <= token_id < loaded.config.vocab:
            raise ApiError(
                400,
                f"prompt: token id {token_id} is outside the vocabulary of {loaded.config.vocab}",
                param="prompt",
                code="invalid_value",
            )
    return token_ids


def _fit(prompt: list[int], loaded: Loaded, param: str) -> None:
    if not prompt:
        raise ApiError(400, f"{param}: must hold at least one token", param=param, code="invalid_value")
    if len(prompt) >= loaded.max_model_len:
        raise ApiError(
            400,
            f"this model's maximum context length is {loaded.max_model_len} tokens, prompt and answer together, "
            f"but the prompt alone has {len(prompt)} tokens",
            param=param,
            code="context_length_exceeded",
        )
