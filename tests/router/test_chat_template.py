"""Chat templates: what transformers gives them, what they refuse."""

from __future__ import annotations

import pytest

from stallfree_router.text.chat_template import render_chat
from stallfree_shared.errors import InvalidRequestError
from stallfree_shared.openai_api import ChatMessage

_STRICT = """
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif -%}
{%- for message in messages -%}
  {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
    {{ raise_exception('Conversation roles must alternate user/assistant') }}
  {%- endif -%}
  {{ bos_token if loop.first }}[{{ message['role'] }}]{{ message['content'] | trim }}
{%- endfor -%}
{%- if add_generation_prompt %}[assistant]{% endif -%}
"""


def render(template: str, *messages: tuple[str, str], **special_tokens: str) -> str:
    chat = [ChatMessage.model_validate({"role": role, "content": content}) for role, content in messages]
    return render_chat(template, chat, special_tokens=special_tokens)


def test_messages_special_tokens_and_the_generation_prompt_are_rendered() -> None:
    text = render(_STRICT, ("user", " hi "), ("assistant", "yes"), ("user", "so?"), bos_token="<bos>")  # noqa: S106
    assert text == "<bos>[user]hi[assistant]yes[user]so?[assistant]"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([("system", "be nice"), ("user", "hi")], "System role not supported"),
        ([("developer", "be nice"), ("user", "hi")], "System role not supported"),
        ([("user", "a"), ("user", "b")], "roles must alternate"),
        ([("assistant", "a")], "roles must alternate"),
    ],
)
def test_a39_what_the_template_refuses_is_a_400_with_its_reason(messages: list[tuple[str, str]], reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as refusal:
        render(_STRICT, *messages, bos_token="")
    assert refusal.value.param == "messages"
    assert refusal.value.http_status == 400


@pytest.mark.parametrize("template", ["{{ 1 + messages }}", "{{ messages[9].content }}", "{% if %}", "{{ 1 // 0 }}"])
def test_a39_a_template_that_fails_is_a_400(template: str) -> None:
    with pytest.raises(InvalidRequestError):
        render(template, ("user", "hi"))


def test_a_template_cannot_leave_its_sandbox() -> None:
    with pytest.raises(InvalidRequestError):
        render("{{ messages.__class__.__mro__[1].__subclasses__() }}", ("user", "hi"))
    with pytest.raises(InvalidRequestError):
        render("{% set _ = messages.append(1) %}", ("user", "hi"))


def test_tojson_is_as_transformers_has_it() -> None:
    assert render("{{ messages | tojson }}", ("user", "<é>")) == '[{"role": "user", "content": "<é>"}]'
    assert render("{{ {'b': 1, 'a': [2]} | tojson(indent=1) }}", ("user", "")) == '{\n "b": 1,\n "a": [\n  2\n ]\n}'


def test_blocks_are_trimmed_as_transformers_does() -> None:
    template = "{% for message in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}\n"
    assert render(template, ("user", "")) == "x\n"


def test_generation_blocks_and_loop_controls_are_known() -> None:
    template = (
        "{% for message in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}"
        "{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"
    )
    assert render(template, ("user", "a"), ("user", "b")) == "a"


def test_strftime_now_gives_the_date() -> None:
    assert render("{{ strftime_now('%Y') }}", ("user", "")).isdigit()


def test_templates_written_for_the_system_role_see_developer_as_system() -> None:
    assert render("{{ messages[0].role }}", ("developer", "x")) == "system"
