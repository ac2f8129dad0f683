"""Chat templates, in the sandbox and dialect that Hugging Face's templates are written for."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """The template refused the messages, or there is none."""


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


class ChatTemplate:
    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._template = environment.from_string(source)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **self._tokens)
        except (TemplateError, TypeError, KeyError) as fault:
            raise ChatTemplateError(f"the chat template refused the messages: {fault}") from fault
