"""The base of every model that is written to, or read from, Kubernetes: snake_case here, camelCase there."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """Unknown fields are refused, so that a typing error is never silently ignored."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid")

    def to_api(self) -> dict:
        """The object as Kubernetes stores it: camelCase, unset and null fields left out."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
