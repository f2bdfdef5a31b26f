"""Chat templates that take all the time or memory there is: refused in a sentence; the next chat is answered."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from cellar.core.errors import RequestError
from cellar.text.chat import ChatTemplate
from cellar.text.expendable import Budget
from cellar.text.rendering import Rendering

BUDGET = Budget(seconds=1.0, memory_bytes=192 * 2**20)
PLAIN = "{% for message in messages %}{{ message.content }};{% endfor %}"

HUGE = {
    "a width of format": "{{ '%300000000d'|format(1) }}",
    "center": "{{ 'x'.center(300000000) }}",
    "ljust": "{{ 'x'.ljust(400000000) }}",
    "zfill": "{{ 'x'.zfill(400000000) }}",
    "the filter center": "{{ 'x'|center(300000000) }}",
    "replace": "{% set a = 'x' * 40000 %}{{ a.replace('x', a)|length }}",
    "join": "{% set a = ['x' * 20000] * 20000 %}{{ a|join|length }}",
    "doubling": "{% set n = namespace(s='x') %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "expandtabs": "{{ ('\t' * 10000).expandtabs(100000)|length }}",
    "translate": "{{ ('x' * 30000).translate({120: 'y' * 30000})|length }}",
    "a precision of format": "{{ '%.300000000f'|format(1.0)|length }}",
    "a width of format_map": "{{ '{a:>300000000}'.format_map({'a': 'x'})|length }}",
    "batch": "{{ ['a']|batch(300000000, 'x')|list|length }}",
    "indent": "{{ ('a\n' * 20000)|indent(20000)|length }}",
}
ENDLESS = {
    "silent loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a recursive macro": "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{% for i in range(99999) %}"
    "{% if false %}{{ m(1) }}{% endif %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
}


@pytest.fixture
def made() -> Iterator[list[Rendering]]:
    kept: list[Rendering] = []
    yield kept
    for one in kept:
        one.close()


def rendering(made: list[Rendering], template: str, budget: Budget = BUDGET) -> Rendering:
    made.append(Rendering(ChatTemplate(template), budget))
    return made[-1]


def say(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    "template",
    [*HUGE.values(), *(pytest.param(one, marks=pytest.mark.long) for one in ENDLESS.values())],
    ids=[*HUGE, *ENDLESS],
)
def test_it_is_ended_and_the_next_one_is_answered(made: list[Rendering], template: str) -> None:
    """The template does it only when told to, so that the same one can answer afterwards."""
    both = "{% if messages[0].content == 'go' %}" + template + "{% else %}fine{% endif %}"
    hostile = rendering(made, both)
    assert hostile.render(say("x")) == "fine"
    with pytest.raises(RequestError, match="chat template") as caught:
        hostile.render(say("go"))
    assert caught.value.parameter == "messages"
    assert hostile.render(say("y")) == "fine"


def test_a_deep_tool_through_tojson(made: list[Rendering]) -> None:
    """7 MB of tools made 8 GB and 56 s."""
    tool: Any = ["x"] * 600
    for _ in range(600):
        tool = [tool, "y" * 1000]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": [tool] * 8}}}]
    indented = rendering(made, "{{ tools|tojson(indent=400) }}")
    with pytest.raises(RequestError, match="chat template"):
        indented.render(say("x"), tools)


@pytest.mark.long
def test_what_is_long_does_not_hold_up_what_is_short(made: list[Rendering]) -> None:
    slow = rendering(made, "{% if messages[0].content == 'go' %}" + ENDLESS["silent loops"] + "{% endif %}fine")
    slow.render(say("x"))
    endings: list[str] = []

    def attack() -> None:
        with pytest.raises(RequestError) as caught:
            slow.render(say("go"))
        endings.append(str(caught.value))

    threads = [threading.Thread(target=attack) for _ in range(3)]
    for thread in threads:
        thread.start()
    while slow._lanes._long._process is None:  # the first of them has moved on
        time.sleep(0.01)
    assert slow.render(say("x")) == "fine"
    assert len(endings) < len(threads)
    for thread in threads:
        thread.join(60)
    assert len(endings) == len(threads)


def test_equal_to_the_template_itself(made: list[Rendering]) -> None:
    messages = [*say("a \U0001f600 \ud83d b"), {"role": "assistant", "content": "\u00e9"}]
    assert rendering(made, PLAIN).render(messages) == ChatTemplate(PLAIN).render(messages)
    with pytest.raises(RequestError, match="messages is empty") as caught:
        made[0].render([])
    assert caught.value.parameter == "messages"


def test_the_bound_of_memory_is_what_the_call_may_use(made: list[Rendering]) -> None:
    template = "{% set a = 'x' * (messages[0].content|int * 1048576) %}{{ a|length }}"
    roomy = rendering(made, template, Budget(5.0, 256 * 2**20))
    assert roomy.render(say("14")) == str(14 * 2**20)
