"""The JSON Schema of config files, made from `settings.Config` and a task's arguments.

Pydantic takes a setting's description from the docstring below its key. The description of a task's
argument is the line `name: meaning` in the task's docstring.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from typing import Any

from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_jsonable_python

from dist_amp.config.task_class import args_dataclass
from dist_amp.config.values import adapter
from dist_amp.settings import Config, SourceConfig

Schema = dict[str, Any]


class Generator(GenerateJsonSchema):
    """Leaves out titles, which repeat the key, and allows any value for types that JSON lacks."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> Any:
        return {}


def json_schema(task: type | None = None) -> Schema:
    """JSON Schema of config files, draft 2020-12; with the arguments of `task` if there is one."""
    schema = adapter(Config).json_schema(schema_generator=Generator)
    inherited = adapter(SourceConfig).json_schema()["properties"]  # subclasses lack these texts
    for table in schema["$defs"].values():
        del table["title"]
        for name, about in table["properties"].items():
            text = about.get("description") or inherited.get(name, {}).get("description", "")
            about["description"] = " ".join(text.split())
    if task is not None:
        args = args_dataclass(task)
        args_schema = adapter(args).json_schema(schema_generator=Generator)
        doc = inspect.getdoc(task) or ""
        for item in fields(args):
            about = args_schema["properties"][item.name]
            if meaning := re.search(rf"(?m)^\s*{item.name}(?: \(.*\))?: +(.+)$", doc):
                about["description"] = meaning[1]
            if item.default_factory is not MISSING:
                about["default"] = to_jsonable_python(item.default_factory(), fallback=str)
        schema["$defs"] |= args_schema.pop("$defs", {})
        schema["$defs"]["TaskConfig"]["properties"]["args"] = args_schema
    schema.pop("description", None)  # only some releases of pydantic add Config's docstring
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return head | schema | {"title": "dist_amp"}


def described(schema: Schema, sources: Sequence[str] = ("NAME",)) -> dict[str, Schema]:
    """{dotted key: its JSON Schema}, including data.sources.NAME.* for each NAME in `sources`."""

    def walk(table: Schema, prefix: str) -> Iterator[tuple[str, Schema]]:
        for name, about in table["properties"].items():
            key = f"{prefix}{name}"
            if "$ref" in about:
                about = schema["$defs"][about["$ref"].rpartition("/")[2]]
            if "properties" in about:
                yield from walk(about, f"{key}.")
            elif key == "data.sources":
                kind = about["additionalProperties"]["$ref"].rpartition("/")[2]
                for source in sources:
                    yield from walk(schema["$defs"][kind], f"{key}.{source}.")
            elif key != "task.args":
                yield key, about

    return dict(walk(schema, ""))
