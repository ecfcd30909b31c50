"""What every kind of structured output lets through, character by character."""

from __future__ import annotations

import json

import pytest

from stallfree_shared.grammars import grammar_threads, make_grammar
from stallfree_shared.wire import MAX_DEFINITION_BYTES, StructuredOutput
from tests.support.byte_alphabet import accepts

PAIR = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}
LENIENT = {"x-guidance": {"lenient": True, "coerce_one_of": True, "whitespace_pattern": " *", "item_separator": ";"}}


def schema(definition: dict[str, object]) -> StructuredOutput:
    return StructuredOutput(kind="json_schema", definition=json.dumps(definition))


def choice(*choices: str) -> StructuredOutput:
    return StructuredOutput(kind="choice", definition=json.dumps(choices))


@pytest.mark.parametrize("text", ["[1,2]", "[1, 2]", "[ 1 , 2 ]", "[\n  1,\n  2\n]", "[\n\t1,\n\t2\n]"])
def test_json_may_be_compact_spaced_or_indented(text: str) -> None:
    assert accepts(schema(PAIR), text)


@pytest.mark.parametrize("text", ["[1,  2]", "[1,\n\n2]", " [1,2]", "[1,2] ", "[1,2]\n", "[1,\n" + " " * 65 + "2]"])
def test_json_has_no_white_space_without_end(text: str) -> None:
    assert not accepts(schema(PAIR), text)


@pytest.mark.parametrize("text", ["[1;2]", "[1,  2]"])
def test_a_schema_cannot_loosen_the_white_space_or_the_separators(text: str) -> None:
    assert not accepts(schema(PAIR | LENIENT), text)


def test_properties_come_in_the_order_of_the_schema() -> None:
    properties = {"b": {"type": "null"}, "a": {"type": "null"}}
    both = schema({"type": "object", "properties": properties, "required": ["a"], "additionalProperties": False})
    assert accepts(both, '{"b": null, "a": null}')
    assert accepts(both, '{"a": null}')
    assert not accepts(both, '{"a": null, "b": null}')
    assert not accepts(both, '{"b": null}')


@pytest.mark.parametrize(
    ("text", "is_object"), [("{}", True), ('{"a": [1, {"b": null}]}', True), ("[]", False), ("1", False)]
)
def test_a_json_object_is_any_object_and_nothing_else(text: str, is_object: bool) -> None:
    assert accepts(StructuredOutput(kind="json_object"), text) is is_object


def test_a_regular_expression_holds_for_the_whole_text() -> None:
    output = StructuredOutput(kind="regex", definition=r"[A-Z]{2}/\d+")
    assert accepts(output, "AB/12")
    assert not accepts(output, "AB/12 ")
    assert not accepts(output, "xAB/12")


def test_a_grammar_is_in_larks_syntax() -> None:
    output = StructuredOutput(kind="grammar", definition='start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/\n')
    assert accepts(output, "1+22+3")
    assert not accepts(output, "1+")


@pytest.mark.parametrize("text", ["yes", "é😀", 'a"b\\c/d', "two\nlines", "\t{%x}", "\u2028", "\x7f", ""])
def test_a_choice_may_have_any_characters(text: str) -> None:
    output = choice("something else", text)
    assert accepts(output, text)
    assert not accepts(output, text + "!")


@pytest.mark.parametrize(
    ("definition", "problem"), [("", "EOF"), ("{", "EOF"), ("[1]", "Expecting object"), ("true", "Expecting object")]
)
def test_a_schema_that_is_no_json_object_is_refused(definition: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make_grammar(StructuredOutput(kind="json_schema", definition=definition))


def rule_chain() -> str:
    """Rules that each lead to the next alone, and the last to "a"."""
    return "start:r0\n" + "".join(f"r{n}:r{n + 1}\n" for n in range(10_700)) + 'r10700:"a"'


def reference_chain() -> str:
    """A schema whose references each lead to the next alone, and the last to null."""
    links = {f"{n}": {"$ref": f"#/$defs/{n + 1}"} for n in range(4200)}
    definition = {"$ref": "#/$defs/0", "$defs": {**links, "4200": {"type": "null"}}}
    return json.dumps(definition, separators=(",", ":"))


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (StructuredOutput(kind="grammar", definition=rule_chain()), "a"),
        (StructuredOutput(kind="json_schema", definition=reference_chain()), "null"),
    ],
    ids=lambda value: value.kind if isinstance(value, StructuredOutput) else "",
)
def test_the_deepest_definition_does_not_end_the_process(output: StructuredOutput, text: str) -> None:
    """With the stack that threads usually have it does."""
    assert 0.9 * MAX_DEFINITION_BYTES < len(output.definition) <= MAX_DEFINITION_BYTES
    with grammar_threads(2, name="test") as threads:
        assert threads.submit(accepts, output, text).result()
        assert not threads.submit(accepts, output, text + text).result()
