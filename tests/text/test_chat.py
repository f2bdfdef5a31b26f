from __future__ import annotations

import json
import re
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import AutoTokenizer

from cellar.core.errors import CheckpointError, RequestError
from cellar.text.chat import ChatTemplate
from cellar.text.tokenizer import Tokenizer
from cellar.text.tools.registry import parser_of

HERE = Path(__file__).parent.parent / "data"
SHARED = Path(__file__).parent.parent.parent.parent / "shared" / "data" / "chat_templates" / "llamacpp"
OWN = {path.stem: path.read_text(encoding="utf-8") for path in sorted((HERE / "text").glob("*.jinja"))}

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a <b>city</b> & more",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Its name"}},
                "required": ["city"],
            },
        },
    }
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Malmö"}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <there> \n"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "2 + 2 & 'more'?"},
    ],
    [
        {"role": "user", "content": "The weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": '{"t": 3}'},
    ],
    [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>x</think>y"},
        {"role": "user", "content": "z"},
    ],
]
USER = [{"role": "user", "content": "Hi"}]


def _agree(source: str) -> int:
    """Compare with transformers on all chats; the number of chats that both render."""
    reference = AutoTokenizer.from_pretrained(HERE / "tokenizers" / "gpt-tiny", chat_template=source, **SPECIAL)
    special = {**SPECIAL, "pad_token": "<|endoftext|>"}
    template = ChatTemplate(source, special)
    rendered = 0
    for chat, tools, prompt in product(CHATS, (None, TOOLS), (False, True)):
        if tools and not re.search(r"\btools\b", source):  # transformers would drop them
            with pytest.raises(RequestError, match="does not show tools"):
                template.render(chat, tools, prompt)
            continue
        arguments: Any = {"tools": tools, "add_generation_prompt": prompt, "functions": "[]", "datetime": "now"}
        try:
            want = reference.apply_chat_template(chat, tokenize=False, **arguments)
        except (jinja2.TemplateError, TypeError):
            with pytest.raises(RequestError):
                template.render(chat, now=datetime.now(), **arguments)
            continue
        assert template.render(chat, now=datetime.now(), **arguments) == want
        rendered += 1
    return rendered


# Without content_parts: over a string, transformers loops by character; see test_strings_become_parts.
@pytest.mark.parametrize("name", sorted(OWN.keys() - {"content_parts"}))
def test_own_templates_render_as_in_transformers(name: str) -> None:
    assert _agree(OWN[name]) >= (8 if "tools" in OWN[name] else 4)


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data/chat_templates is not there")
@pytest.mark.parametrize("path", sorted(SHARED.glob("*.jinja")), ids=lambda path: path.stem)
def test_templates_of_real_models_render_as_in_transformers(path: Path) -> None:
    assert _agree(path.read_text(encoding="utf-8")) >= 4


STEPS: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather of Malmö?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{**CALL, "function": {"name": "get_weather", "arguments": '{"city": "Malmö"}'}}],
    },
    {"role": "tool", "tool_call_id": "abcdefghi", "content": "rain"},
]
"""A question, a call as Cellar and OpenAI answer it, and its result."""


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data/chat_templates is not there")
@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "Qwen-QwQ-32B", "microsoft-Phi-3.5-mini-instruct"])
def test_a_message_of_calls_alone_renders_like_one_with_an_empty_content(name: str) -> None:
    template = ChatTemplate((SHARED / f"{name}.jinja").read_text(encoding="utf-8"), SPECIAL)
    tools = TOOLS if "Qwen" in name else None
    empty = [{**message, "content": message["content"] or ""} for message in STEPS]
    rendered = template.render(STEPS, tools)
    assert rendered == template.render(empty, tools)
    assert tools is None or "rain" in rendered
    assert tools is None or "Malmö" in rendered.partition("rain")[0].partition("Weather of Malmö?")[2]


def _with_calls() -> list[Path]:
    """Templates that show tools, and whose models' calls are read."""
    found = []
    for path in sorted(SHARED.glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        if parser_of({"default": source}) is not None and re.search(r"\btools\b", source):
            found.append(path)
    return found


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data/chat_templates is not there")
@pytest.mark.parametrize("path", _with_calls(), ids=lambda path: path.stem)
def test_what_cellar_answers_can_be_sent_back(path: Path) -> None:
    """The call is in the next prompt, whatever the template; those that cannot show tools say so."""
    source = path.read_text(encoding="utf-8")
    template = ChatTemplate(source, SPECIAL)
    tools = None if "deepseek" in path.stem else TOOLS  # its template makes JSON of a generator
    prompt = template.render(STEPS, tools, now=datetime.now())
    asked, _, answered = prompt.rpartition("Malmö")
    assert "get_weather" in asked
    assert "rain" in answered


def test_a_template_that_pastes_arguments_still_shows_calls_without_content() -> None:
    """An empty content is the last resort: here it would hide the calls."""
    source = (
        "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.arguments + '!' }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert ChatTemplate(source).render(STEPS).endswith('{"city": "Malmö"}!rain')


def test_a_template_comes_with_the_tokenizer() -> None:
    path = HERE / "tokenizers" / "gpt-tiny"
    tokenizer = Tokenizer.load(path)
    template = ChatTemplate.load(path, tokenizer.special_tokens)
    prompt = template.render(USER)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    reference = AutoTokenizer.from_pretrained(path)
    ids = reference.apply_chat_template(USER, add_generation_prompt=True)["input_ids"]
    assert tokenizer.encode(prompt, add_special_tokens=False) == ids


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert not ChatTemplate.load(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one"}))
    assert ChatTemplate.load(tmp_path).render(USER) == "one"
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools{% if tools %}{% endif %}"},
    ]
    config.write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.load(tmp_path).render(USER) == "plain"
    assert ChatTemplate.load(tmp_path).render(USER, tools=TOOLS) == "tools"
    (tmp_path / "chat_template.jinja").write_text("file{% if tools %}{% endif %}")
    assert ChatTemplate.load(tmp_path).render(USER, tools=TOOLS) == "file"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("more{% if tools %}{% endif %}")
    assert ChatTemplate.load(tmp_path).render(USER, tools=TOOLS) == "more"


@pytest.mark.parametrize("template", [5, [1], [{"name": "default"}], "{% if %}", "{{", {"default": 3}])
def test_a_damaged_template_is_a_checkpoint_error(template: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(CheckpointError, match="template"):
        ChatTemplate.load(tmp_path)


def test_no_template_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"chat_template\.jinja") as caught:
        ChatTemplate.load(tmp_path).render(USER)
    assert caught.value.parameter == "messages"
    with pytest.raises(RequestError, match="only rag"):
        ChatTemplate({"rag": "x"}).render(USER)


def test_text_parts_are_joined_for_templates_that_expect_strings() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    template = ChatTemplate("{{ messages[0].content }}")
    assert template.render([{"role": "user", "content": parts}]) == "one\ntwo"
    assert template.render([{"role": "user", "content": parts[:1]}]) == "one"
    source = "{% for m in messages %}{% for p in m['content'] %}({{ p.text }}){% endfor %}{% endfor %}"
    assert ChatTemplate(source).render([{"role": "user", "content": parts}]) == "(one)(two)"


def test_parts_are_text_parts_for_the_template_whatever_the_client_calls_them() -> None:
    source = "{% for p in messages[0].content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    for kind in ("text", "input_text", "output_text"):
        assert ChatTemplate(source).render([{"role": "user", "content": [{"type": kind, "text": "one"}]}]) == "one"


def test_a_developer_is_a_system_to_templates_that_know_no_developer() -> None:
    chat = [{"role": "developer", "content": "Be brief."}]
    source = "{% for m in messages %}{% if m.role == 'system' %}S:{{ m.content }}{% endif %}"
    assert ChatTemplate(source + "{% endfor %}").render(chat) == "S:Be brief."
    knows = source + "{% if m.role in ['developer'] %}D:{{ m.content }}{% endif %}{% endfor %}"
    assert ChatTemplate(knows).render(chat) == "D:Be brief."


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data/chat_templates is not there")
@pytest.mark.parametrize("path", sorted(SHARED.glob("*.jinja")), ids=lambda path: path.stem)
def test_no_template_of_a_real_model_swallows_what_a_developer_says(path: Path) -> None:
    template = ChatTemplate(path.read_text(encoding="utf-8"), SPECIAL)

    def rendered(role: str) -> str | None:
        try:
            return template.render([{"role": role, "content": "BRIEF"}, *USER], now=datetime(2026, 1, 1))
        except RequestError:
            return None

    assert rendered("developer") == rendered("system")


def test_fields_that_are_null_are_absent() -> None:
    source = "{% if messages[0].content is none %}-{% endif %}{% if 'tool_calls' in messages[1] %}called{% endif %}"
    chat = [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": "x", "tool_calls": None, "refusal": None},
    ]
    assert ChatTemplate(source).render(chat) == "-"


def test_strings_become_parts_for_templates_that_expect_only_parts() -> None:
    chat = [{"role": "user", "content": "one"}, {"role": "user", "content": [{"type": "text", "text": "two"}]}]
    assert ChatTemplate(OWN["content_parts"]).render(chat) == "[user]one[user]two"
    both = "{% set c = messages[0].content %}{% if c is string %}s{% else %}{% for p in c %}p{% endfor %}{% endif %}"
    assert ChatTemplate(both).render(USER) == "s"


def test_variables_and_the_date() -> None:
    thinking = ChatTemplate(OWN["chatml_tools"])
    assert thinking.render(USER, enable_thinking=False).endswith("<think></think>")
    assert not thinking.render(USER).endswith("<think></think>")
    dated = ChatTemplate(OWN["dated"])
    assert dated.render(USER) == "Today: 1 Jan 2024\nHi"
    assert dated.render(USER, now=datetime(2026, 11, 21)) == "Today: 21 Nov 2026\nHi"


def test_arguments_of_calls_come_as_text_or_object() -> None:
    def chat(arguments: Any) -> list[dict[str, Any]]:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]

    as_object = ChatTemplate(OWN["chatml_tools"])
    assert as_object.render(chat('{"x": 1}')) == as_object.render(chat({"x": 1}))
    assert '"arguments": {"x": 1}' in as_object.render(chat('{"x": 1}'))
    as_text = ChatTemplate(OWN["dated"])
    assert as_text.render(chat('{"x": 1}')).endswith('(nothing)```json\n{"x": 1}\n```')
    with pytest.raises(RequestError, match="JSON"):
        as_object.render(chat('{"x": '))


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty"),
        ("hello", "list"),
        ({"role": "user", "content": "x"}, "list"),
        (["hello"], r"messages\[0\]"),
        ([{"content": "x"}], "role None"),
        ([{"role": "wizard", "content": "x"}], "wizard"),
        ([{"role": 3, "content": "x"}], "role 3"),
        ([{"role": "user"}], "no content"),
        ([{"role": "user", "content": None}], "no content"),
        ([{"role": "user", "content": 7}], "int"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "image_url"),
        ([{"role": "user", "content": ["x"]}], "part"),
        ([{"role": "user", "content": "x", "extra": object()}], "object"),
        ([{"role": "system", "content": "x"}], "System role not supported"),
        ([*USER, *USER], "alternate"),
    ],
)
def test_bad_messages_are_refused(messages: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        ChatTemplate(OWN["strict_turns"], SPECIAL).render(messages)
    assert caught.value.parameter == "messages"
    assert str(caught.value).endswith(".")


def test_a_role_that_the_template_knows_is_allowed() -> None:
    chat = [*USER, {"role": "model", "content": "Hello"}]
    assert "<turn>model\nHello<end>" in ChatTemplate(OWN["strict_turns"], SPECIAL).render(chat)


def test_bad_tools_are_refused() -> None:
    for tools in ([1], {"type": "function"}, "f"):
        with pytest.raises(RequestError, match="tools"):
            ChatTemplate(OWN["chatml_tools"]).render(USER, tools=tools)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'] }}{{ (''|attr('__class__')).__mro__ }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ namespace(__class__=1) }}",
        "{% set n = namespace() %}{% set n.__html__ = 1 %}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ strftime_now.__self__.__class__.now() }}",
        "{{ lipsum() }}",
        "{% include 'file' %}",
        "{{ undefined.attribute }}",
        "{{ 1 / 0 }}",
        "{% for a in range(100000000) %}x{% endfor %}",
        "{% for a in range(100000) %}{% for b in range(100000) %}xxxxxxxxxx{% endfor %}{% endfor %}",
        "{{ 'x' * 10 ** 12 }}",
        "{{ [1] * 10000000000 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ '%999999999999d' % 1 }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_a_template_cannot_break_out_or_run_away(source: str) -> None:
    with pytest.raises(RequestError, match="refuses") as caught:
        print(ChatTemplate(source, max_characters=10_000).render(USER, now=datetime(2026, 1, 1)))
    assert caught.value.parameter == "messages"


def test_messages_are_never_run_as_templates() -> None:
    evil = "{{ 7 * 7 }}{% raw %}<script>"
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": evil}]) == evil


def test_the_callers_messages_are_not_changed() -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": None}]
    before = json.dumps(chat)
    ChatTemplate("{{ messages[0].content }}").render(chat)
    assert json.dumps(chat) == before
