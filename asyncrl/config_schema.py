"""The JSON schema of a recipe, for editors: what `asyncrl schema` prints and `recipes/schema.json` holds.

Descriptions are the docstrings under the fields; they are read from the source here alone, since that takes time at every start.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import core_schema

from asyncrl.config import RunConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def recipe_schema() -> str:
    """The schema as text, the same for the same settings."""
    schema = {"$schema": DIALECT, **RunConfig.model_json_schema(schema_generator=_Documented)}
    return json.dumps(schema | {"title": "asyncrl recipe"}, indent=1, ensure_ascii=False) + "\n"


def field_docs(section: type[BaseModel]) -> dict[str, str]:
    """The docstring under each field, in one line; inherited ones included."""
    docs: dict[str, str] = {}
    for part in reversed([part for part in section.__mro__ if issubclass(part, BaseModel) and part is not BaseModel]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
        assert isinstance(definition, ast.ClassDef)
        for item, after in zip(definition.body, definition.body[1:], strict=False):
            if (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and isinstance(after, ast.Expr)
                    and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)):
                docs[item.target.id] = " ".join(after.value.value.split())
    return docs


class _Documented(GenerateJsonSchema):
    """Puts the docstring of each field beside its type, and leaves out titles, which only repeat its name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Never."""
        return False

    def model_schema(self, schema: core_schema.ModelSchema) -> dict[str, Any]:
        described = super().model_schema(schema)
        for name, text in field_docs(schema["cls"]).items():
            if name in described.get("properties", {}):
                described["properties"][name]["description"] = text
        return described
