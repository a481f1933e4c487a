"""python -m dist_amp.schema > schema.json: the JSON Schema of config files, for editors.

A config whose first line is `#:schema schema.json` is completed and checked by taplo and by VS
Code's Even Better TOML, with each setting's meaning. --task.target my_file:MyTask adds the
arguments of your task. Exit status: 0, 64 a task that can't be imported.

Docs: docs/configuration.md
"""

import ast
import inspect
import json
import math
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from dist_amp.config.load import collect, schema, target_in
from dist_amp.config.task_class import find_task
from dist_amp.settings import Config, MixedSourceConfig, Range
from dist_amp.supervise.command_line import Parser, command

TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
BOUNDS = {
    "low": "minimum",
    "high": "maximum",
    "above": "exclusiveMinimum",
    "below": "exclusiveMaximum",
}


@command()
def main(argv: Sequence[str]) -> None:
    parser = Parser("python -m dist_amp.schema", __doc__)
    _, words = parser.parse_known_args(argv)
    settings = collect(words)
    config = Config  # which leaves a task's arguments open
    if "task.target" in settings:
        config = schema(find_task(target_in(settings)))
    print(json.dumps(json_schema(config), indent=1))


def json_schema(config: type) -> dict[str, Any]:
    """Of a dataclass like `settings.Config`, as draft 2020-12."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "dist_amp"}
    return head | of_table(config)


def of_table(table: type) -> dict[str, Any]:
    """A dataclass: a table without other keys."""
    hints = get_type_hints(table, include_extras=True)
    meanings = meanings_in(table)
    properties = {}
    for item in fields(table):
        described = of_type(hints[item.name])
        if text := meanings.get(item.name):
            described["description"] = text
        if item.default is not MISSING:
            described["default"] = item.default
        properties[item.name] = described
    if "sources" in properties:  # of a mixture, under names of your choice
        source = of_table(MixedSourceConfig)
        properties["sources"] = {"type": "object", "additionalProperties": source}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def of_type(hint: Any) -> dict[str, Any]:
    """A type that `config.parse` knows; {} accepts everything."""
    kind = get_origin(hint) or hint
    parts = get_args(hint)
    if is_dataclass(hint):
        return of_table(hint)  # type: ignore[arg-type]
    if kind is Annotated:
        return of_type(parts[0]) | bounds([part for part in parts if isinstance(part, Range)])
    if kind in (Union, UnionType):
        return {"anyOf": [of_type(part) for part in parts if part is not type(None)]}
    if kind is Literal:
        return {"enum": list(parts)}
    if kind is tuple and parts and ... not in parts:
        items = [of_type(part) for part in parts]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "items": False}
    if kind in (tuple, list):
        return {"type": "array", "items": of_type(parts[0]) if parts else {}}
    if kind in TYPES:
        return {"type": TYPES[kind]}
    return {}


def bounds(ranges: Sequence[Range]) -> dict[str, float]:
    """The finite bounds, whole ones as integers."""
    rules = {}
    for one in ranges:
        for name, keyword in BOUNDS.items():
            bound = getattr(one, name)
            if math.isfinite(bound):
                rules[keyword] = int(bound) if bound == int(bound) else bound
    return rules


def meanings_in(table: type) -> Mapping[str, str]:
    """{field: the docstring below it}, those of base classes too; none without the source."""
    meanings: dict[str, str] = {}
    for cls in reversed(table.__mro__):
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        except (OSError, TypeError, SyntaxError):  # made while running, or built in
            continue
        body = getattr(tree, "body", [])
        for item, below in pairwise(body):
            if isinstance(item, ast.AnnAssign) and isinstance(below, ast.Expr):
                text = ast.literal_eval(below.value)
                meanings[ast.unparse(item.target)] = " ".join(text.split())
    return meanings


if __name__ == "__main__":
    sys.exit(main())
