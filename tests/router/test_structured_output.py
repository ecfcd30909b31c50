"""From the fields of a body to what the text must be, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from stallfree_router.text.structured_output import structured_output
from stallfree_shared.errors import InvalidRequestError, UnsupportedParameterError
from stallfree_shared.openai_api import CompletionRequest
from stallfree_shared.wire import MAX_DEFINITION_BYTES, StructuredOutput
from tests.support.byte_alphabet import accepts

OBJECT = {
    "type": "object",
    "properties": {"b": {"type": "integer"}, "a": {"const": "é"}},
    "additionalProperties": False,
}
OBJECT_TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"const":"é"}},"additionalProperties":false}'
SCHEMA_PARAM = "response_format.json_schema.schema"


def body(**fields: object) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "x", **fields})


def openai_schema(schema: Mapping[str, object]) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def json_schema(text: str) -> StructuredOutput:
    return StructuredOutput(kind="json_schema", definition=text)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput(kind="json_object")),
        ({"response_format": openai_schema(OBJECT)}, json_schema(OBJECT_TEXT)),
        ({"response_format": openai_schema({})}, json_schema("{}")),
        ({"structured_outputs": {"json": OBJECT}}, json_schema(OBJECT_TEXT)),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, json_schema('{"type": "null"}')),
        ({"structured_outputs": {"json_object": True}}, StructuredOutput(kind="json_object")),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput(kind="regex", definition="a+")),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, StructuredOutput(kind="grammar", definition='start: "a"')),
        ({"guided_json": OBJECT}, json_schema(OBJECT_TEXT)),
        ({"guided_regex": "[ab]"}, StructuredOutput(kind="regex", definition="[ab]")),
        ({"guided_grammar": 'start: "a"'}, StructuredOutput(kind="grammar", definition='start: "a"')),
        ({"guided_regex": "a", "response_format": {"type": "text"}}, StructuredOutput(kind="regex", definition="a")),
    ],
)
def test_each_field_says_what_the_text_must_be(fields: dict[str, object], expected: StructuredOutput | None) -> None:
    assert structured_output(body(**fields)) == expected


@pytest.mark.parametrize(
    "fields", [{"guided_choice": ["yes", "né\n"]}, {"structured_outputs": {"choice": ["yes", "né\n"]}}]
)
def test_a_choice_is_one_of_the_strings(fields: dict[str, object]) -> None:
    output = structured_output(body(**fields))
    assert output is not None
    assert output.kind == "choice"
    assert [accepts(output, text) for text in ("yes", "né\n", "no", "yesné\n")] == [True, True, False, False]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": OBJECT, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a" * (MAX_DEFINITION_BYTES + 1)}, "guided_regex"),
        ({"guided_regex": "é" * (MAX_DEFINITION_BYTES // 2 + 1)}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[1]"}, "guided_json"),
        ({"response_format": openai_schema({"type": "strng"})}, SCHEMA_PARAM),
        ({"response_format": openai_schema({"properties": 5})}, SCHEMA_PARAM),
        ({"response_format": openai_schema({"required": "a"})}, SCHEMA_PARAM),
        ({"response_format": openai_schema({"enum": []})}, SCHEMA_PARAM),
        ({"response_format": openai_schema({"minimum": 5, "maximum": 4, "type": "integer"})}, SCHEMA_PARAM),
        ({"response_format": openai_schema({"$ref": "#/$defs/nothing"})}, SCHEMA_PARAM),
        ({"response_format": openai_schema({"$ref": "https://example.org/schema"})}, SCHEMA_PARAM),
        ({"response_format": openai_schema({"type": "string", "pattern": "("})}, SCHEMA_PARAM),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_grammar": 'root ::= "a"'}, "guided_grammar"),
        ({"guided_grammar": "start: missing"}, "guided_grammar"),
        ({"guided_grammar": 'start: start "a"'}, "guided_grammar"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_its_field(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refusal:
        structured_output(body(**fields))
    assert refusal.value.param == param
    assert param in refusal.value.message
    assert len(refusal.value.message) < 400


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"type": "null"}}, "contains"),
        ({"not": {"type": "null"}}, "not"),
        ({"if": {"type": "null"}, "then": {}}, "if"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "string", "format": "smiley"}, "smiley"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"x-guidance": {"lenient": True}, "not": {"type": "null"}}, "not"),
    ],
)
def test_a_keyword_that_cannot_be_enforced_is_refused_by_name(schema: dict[str, object], named: str) -> None:
    with pytest.raises(UnsupportedParameterError, match=named) as refusal:
        structured_output(body(response_format=openai_schema(schema)))
    assert refusal.value.param == SCHEMA_PARAM


HEAVY = {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": "^(.*a){30}$"} for i in range(1000)}}


def test_compiling_does_not_hold_the_interpreter() -> None:
    """What it costs is a thread's time: others go on meanwhile."""
    compiling = threading.Thread(target=structured_output, args=(body(guided_json=HEAVY),))
    compiling.start()
    turns = 0
    while compiling.is_alive():
        compiling.join(0.001)  # gives up the interpreter, and comes back only when nobody else holds it
        turns += 1
    assert turns > 10
