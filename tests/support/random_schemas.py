"""Random JSON schemas: objects, arrays, enums, constants, numbers with ranges, strings with lengths, patterns and
formats, unions, references; nested, and small enough that every text which keeps to one ends soon.

    schema = random_schema(random.Random(7))
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

JsonSchema = dict[str, object]

_NAMES = ("id", "name", "größe", "unit price", 'a"b', "tags", "x", "is_open", "日付", "next/step", "kind", "n1")
_PATTERNS = ("^[A-Z]{2}-[0-9]{1,4}$", "^(red|green|blue)( (light|dark))?$", "^[a-zäöü]{3,8}$", "^\\d{3}[.,]\\d\\d?$")
_FORMATS = ("date", "uuid", "ipv4")
_CONSTANTS: tuple[object, ...] = (0, -12, 3.5, True, None, "yes", 'say "no"', "né\n", [], [1, "two"], {"k": [None]})


def random_schema(source: random.Random, *, depth: int = 3) -> JsonSchema:
    """An object at the top, `depth` levels at most below it. Draft 2020-12."""
    definition = _any(source, 1)
    schema = _object(source, depth)
    properties = schema["properties"]
    assert isinstance(properties, dict)
    if source.random() < 0.3:
        properties["shared"] = {"$ref": "#/$defs/shared"}
        schema["$defs"] = {"shared": definition}
    return schema


def _any(source: random.Random, depth: int) -> JsonSchema:
    leaves = (_integer, _number, _string, _pattern, _format, _enum, _constant, _boolean, _nullable)
    return source.choice(leaves)(source) if depth == 0 else source.choice(_INNER)(source, depth - 1)


def _object(source: random.Random, depth: int) -> JsonSchema:
    names = source.sample(_NAMES, source.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _any(source, max(0, depth - 1)) for name in names},
        "required": [name for name in names if source.random() < 0.7],
        "additionalProperties": False,
    }


def _array(source: random.Random, depth: int) -> JsonSchema:
    least = source.randint(0, 2)
    return {"type": "array", "items": _any(source, depth), "minItems": least, "maxItems": least + source.randint(0, 2)}


def _tuple(source: random.Random, depth: int) -> JsonSchema:
    items = [_any(source, depth) for _ in range(source.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _union(source: random.Random, depth: int) -> JsonSchema:
    return {"anyOf": [_any(source, depth) for _ in range(source.randint(2, 3))]}


def _leaf(source: random.Random, depth: int) -> JsonSchema:
    return _any(source, 0)


_INNER: tuple[Callable[[random.Random, int], JsonSchema], ...] = (_object, _array, _tuple, _union, _leaf, _leaf)


def _integer(source: random.Random) -> JsonSchema:
    least = source.randint(-1000, 1000)
    most = least + source.choice((0, 5, 99, 100_000))
    bounds: Mapping[str, int] = source.choice(
        (
            {"minimum": least, "maximum": most},
            {"exclusiveMinimum": least - 1, "exclusiveMaximum": most + 1},
            {"minimum": least, "maximum": most + 7, "multipleOf": 7},
        )
    )
    return {"type": "integer", **bounds}


def _number(source: random.Random) -> JsonSchema:
    least = round(source.uniform(-10, 10), source.randint(0, 3))
    return {"type": "number", "minimum": least, "maximum": least + source.choice((1, 2.5, 1000))}


def _string(source: random.Random) -> JsonSchema:
    least = source.randint(0, 4)
    return {"type": "string", "minLength": least, "maxLength": least + source.randint(1, 12)}


def _pattern(source: random.Random) -> JsonSchema:
    return {"type": "string", "pattern": source.choice(_PATTERNS)}


def _format(source: random.Random) -> JsonSchema:
    return {"type": "string", "format": source.choice(_FORMATS)}


def _enum(source: random.Random) -> JsonSchema:
    return {"enum": source.sample(_CONSTANTS, source.randint(1, 4))}


def _constant(source: random.Random) -> JsonSchema:
    return {"const": source.choice(_CONSTANTS)}


def _boolean(source: random.Random) -> JsonSchema:
    return {"type": "boolean"}


def _nullable(source: random.Random) -> JsonSchema:
    return {"type": ["integer", "null"], "minimum": 0, "maximum": source.randint(0, 50)}
