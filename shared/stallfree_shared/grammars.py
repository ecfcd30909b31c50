"""What a `StructuredOutput` means, as a grammar of the llguidance library, and what a grammar may cost.

The router checks with it that a grammar can be served, and the worker draws tokens by it: the same translation, the
same limits and threads alike, so that what one lets in, the other can serve. Imported by these two places only.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLMatcher, LLParserLimits

from stallfree_shared.wire import StructuredOutput

LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""The library's defaults, but for fewer states of a lexer: 1 to 2 kB each, 100 MB at most for one request. They keep
nearly every compilation below a second and a mask to tens of milliseconds; what would take longer is an error of that
grammar. Not bounded by them: optional properties of one object cost the square of their number, 0.3 s for 2,000 and 8 s
for 8,000."""
_STACK_BYTES = 256 * 1024 * 1024
"""The library follows the rules of a grammar and the references of a schema by recursion, and the whole process ends
where the stack does. The largest definition has some 15,000 levels, of up to 6 kB each; what is not used costs nothing.
"""

_ANY_OBJECT = '{"type": "object"}'
_WHITE_SPACE = r"\x20|\x0A[\x20\x09]{0,64}"
"""Between two parts of a JSON text at most a space, or a new line with its indentation: a model that is free to may
write white space without end."""


def grammar_threads(num_threads: int, *, name: str) -> ThreadPoolExecutor:
    """Threads in which any definition can be compiled. In others, a client could end the process with one."""
    threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
    all_started = threading.Barrier(num_threads + 1)
    size_before = threading.stack_size(_STACK_BYTES)
    try:
        for _ in range(num_threads):  # each starts with its first task, with the size that holds then
            threads.submit(all_started.wait)
        all_started.wait()
    finally:
        all_started.abort()
        threading.stack_size(size_before)
    return threads


def make_grammar(output: StructuredOutput) -> str:
    """The grammar of `output`, unchecked: whether it can be compiled is for a matcher to say.

    Raises:
        ValueError: the definition is not even JSON, where it should be.
    """
    if output.kind == "json_schema":
        return _json_grammar(output.definition)
    if output.kind == "json_object":
        return _json_grammar(_ANY_OBJECT)
    if output.kind == "regex":
        return LLMatcher.grammar_from_regex(output.definition)
    if output.kind == "choice":
        choices: list[str] = json.loads(output.definition)
        return LLMatcher.grammar_from_lark(f"start: {' | '.join(map(_literal, choices))}")
    return LLMatcher.grammar_from_lark(output.definition)


def _json_grammar(schema: str) -> str:
    # All but the white space are the library's defaults, said again because a schema's own x-guidance could change
    # them, and no part of a schema may be ignored.
    return LLMatcher.grammar_from_json_schema(
        schema,
        overrides={
            "whitespace_pattern": _WHITE_SPACE,
            "item_separator": ",",
            "key_separator": ":",
            "coerce_one_of": False,
            "lenient": False,
        },
    )


def _literal(text: str) -> str:
    """A string in Lark's syntax. JSON's, but that halves of a character have no escapes, and DEL must have one."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
