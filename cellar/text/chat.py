"""Chat templates: messages to the prompt that a model was trained on (the `chat_template` of Hugging Face's layout).

A template is a Jinja program that comes with the model. It runs in Jinja's sandbox, sees plain JSON values only,
has no clock, and its output is bounded. The helpers it may use are those that templates are written for:
`raise_exception`, `strftime_now`, `tojson` without HTML escapes, `break` and `continue`, the `generation` tag.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError

from cellar.core.errors import CheckpointError, RequestError
from cellar.text.sandbox import Sandbox
from cellar.text.tokenizer import read_json
from cellar.text.tools.custom import as_function_call, with_functions

MAX_CHARACTERS = 16 * 2**20

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")

Message = Mapping[str, Any]


class ChatTemplate:
    """The templates of one model. `default` serves plain chats, `tool_use`, where there is one, those with tools."""

    def __init__(
        self,
        source: str | Mapping[str, str] | None,
        special_tokens: Mapping[str, str] | None = None,
        max_characters: int = MAX_CHARACTERS,
    ) -> None:
        """`source` None is a model without templates: render() says so.

        Raises CheckpointError for a template that is not valid Jinja.
        """
        self.sources = {"default": source} if isinstance(source, str) else dict(source or {})
        self._templates = {name: _Template(name, text, max_characters) for name, text in self.sources.items()}
        self.special_tokens = dict(special_tokens or {})

    @classmethod
    def load(cls, directory: str | Path, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate:
        """Read chat_template.jinja (and additional_chat_templates/), else `chat_template` of tokenizer_config.json.

        Raises CheckpointError if what is there cannot be read as templates.
        """
        path = Path(directory)
        files = {f.stem: f for f in sorted((path / "additional_chat_templates").glob("*.jinja"))}
        if (path / "chat_template.jinja").exists():
            files["default"] = path / "chat_template.jinja"
        try:
            source: Any = {name: file.read_text(encoding="utf-8") for name, file in files.items()}
        except (OSError, ValueError) as error:
            raise CheckpointError(f"a chat template of {str(path)!r} cannot be read ({error}).") from error
        if not source:
            source = read_json(path / "tokenizer_config.json").get("chat_template")
        if isinstance(source, list):
            source = _named(source)
        if not isinstance(source, (str, dict, type(None))):
            raise CheckpointError(
                f"chat_template in {str(path)!r} must be a string or a list of named ones; correct it."
            )
        return cls(source, special_tokens)

    @classmethod
    def read(cls, file: str | Path, special_tokens: Mapping[str, str] | None = None) -> ChatTemplate:
        """One template out of a file of its own. Raises CheckpointError if it cannot be read or is none."""
        try:
            return cls(Path(file).read_text(encoding="utf-8"), special_tokens)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"the chat template {str(file)!r} cannot be read ({error}).") from error

    def __bool__(self) -> bool:
        """True if the model has a template."""
        return bool(self._templates)

    def reads(self, name: str) -> bool:
        """True if a variable of this name makes a difference to one of the templates."""
        return any(name in template.variables for template in self._templates.values())

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        now: datetime | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation; it holds its special tokens, so encode it without adding any.

        `now` is what the template's `strftime_now` prints; without it the name is undefined, as templates allow for.
        `variables` (e.g. `enable_thinking`, `documents`) go to the template as they are. Text parts of a message
        are joined by newlines for a template that expects a string. Tool arguments given as JSON text are
        handed over as the object they hold, where the template takes that.

        Raises RequestError on `messages` if they are malformed, or if the template refuses them.
        """
        template = self._choose(bool(tools))
        if tools and not template.shows_tools:
            raise RequestError(
                "the model's chat template does not show tools to it; leave tools out, or use a model that knows them.",
                "tools",
            )
        checked = [template.message(message, index) for index, message in enumerate(_sequence(messages))]
        context = {
            **self.special_tokens,
            "tools": None if tools is None else _checked_tools(tools),
            **{name: _plain(value, name) for name, value in variables.items()},
            "add_generation_prompt": add_generation_prompt,
        }
        if now is not None:
            context["strftime_now"] = now.strftime
        *others, last = _forms(checked)
        for form in others:
            try:
                return template.render({**context, "messages": form})
            except RequestError:
                continue
        return template.render({**context, "messages": last})

    def _choose(self, tools: bool) -> _Template:
        if not self._templates:
            raise RequestError(
                "the model has no chat template; send a plain prompt, or put chat_template.jinja into its directory.",
                "messages",
            )
        names = ("tool_use", "default") if tools else ("default",)
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise RequestError(
            f"the model has no default chat template, only {', '.join(self._templates)};"
            " put the one to use into chat_template.jinja.",
            "messages",
        )


class _Template:
    """One compiled template, and what its source tells about the messages it expects."""

    def __init__(self, name: str, source: str, max_characters: int) -> None:
        if not isinstance(source, str):
            raise CheckpointError(
                f"chat template {name!r} is a {type(source).__name__}, but must be a string; correct it."
            )
        environment = Sandbox(max_characters)
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise CheckpointError(
                f"chat template {name!r} is not valid Jinja ({error}); correct it or fetch the model again."
            ) from error
        self._max_characters = max_characters
        self._takes_parts = _iterates_content(tree)
        self._takes_strings = not self._takes_parts or any(t.name == "string" for t in tree.find_all(nodes.Test))
        self._tests_none = any(t.name == "none" for t in tree.find_all(nodes.Test))
        self.variables = frozenset(name.name for name in tree.find_all(nodes.Name) if name.ctx == "load")
        self.shows_tools = "tools" in self.variables
        roles = _compared_roles(tree)
        self._roles = {*ROLES, *roles}
        # The older name of the same: many templates print nothing of a role that they do not know.
        self._developer = "developer" if "developer" in roles else "system"

    def message(self, message: Any, index: int) -> dict[str, Any]:
        """A checked copy of a message, in the form the template expects."""
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            _refuse(f"{where} is a {type(message).__name__}, but must be an object with role and content.")
        role = message.get("role")
        if not isinstance(role, str) or role not in self._roles:
            _refuse(f"{where} has the role {role!r}, but must have one of {', '.join(ROLES)}.")
        plain: dict[str, Any] = _plain(dict(message), "messages")
        if role == "developer":
            plain["role"] = self._developer
        if "reasoning" in plain:  # vLLM's newer name; templates know the older one
            plain.setdefault("reasoning_content", plain.pop("reasoning"))
        if isinstance(plain.get("tool_calls"), list):
            plain["tool_calls"] = [as_function_call(call) for call in plain["tool_calls"]]
        content = plain.get("content")
        if isinstance(content, list):
            texts = [_part_text(part, where) for part in content]
            parts = [{"type": "text", "text": text} for text in texts]
            plain["content"] = parts if self._takes_parts else "\n".join(texts)
        elif isinstance(content, str):
            if not self._takes_strings:
                plain["content"] = [{"type": "text", "text": content}]
        elif content is not None:
            _refuse(f"content of {where} is a {type(content).__name__}, but must be a string or a list of text parts.")
        elif not any(plain.get(key) for key in ("tool_calls", "function_call", "refusal", "reasoning_content")):
            _refuse(f"{where} has no content; give a string or a list of text parts.")
        # Most templates print a content of None; those that ask for it need it.
        kept = ("content",) if self._tests_none else ()
        return {key: value for key, value in plain.items() if value is not None or key in kept}

    def render(self, context: Mapping[str, Any]) -> str:
        """Run the template. Raises RequestError for whatever goes wrong in it: it is no code of ours."""
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(context):
                size += len(part)
                if size > self._max_characters:
                    raise SecurityError(f"its output exceeds {self._max_characters} characters")
                parts.append(part)
        except MemoryError:
            raise
        except Exception as error:
            reason = str(error).strip() or type(error).__name__
            raise RequestError(
                f"the model's chat template refuses these messages: {reason.rstrip('.')}.", "messages"
            ) from error
        return "".join(parts)


def _iterates_content(tree: nodes.Template) -> bool:
    """True if the template loops over a message's content, directly, under another name, or filtered."""

    def is_content(node: nodes.Node, names: Iterable[str]) -> bool:
        while isinstance(node, nodes.Filter) and node.node is not None:
            node = node.node
        match node:
            case nodes.Name(name=name):
                return name in names
            case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
                return True
        return False

    names = {"content"}  # a macro's parameter, by custom
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and is_content(assign.node, ()):
            names.add(assign.target.name)
    return any(is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _compared_roles(tree: nodes.Template) -> set[str]:
    """Strings that the template compares a message's role with: roles of its own (`document`, `model`)."""
    found: set[str] = set()
    for compare in tree.find_all(nodes.Compare):
        match compare.expr:
            case nodes.Name(name="role") | nodes.Getattr(attr="role") | nodes.Getitem(arg=nodes.Const(value="role")):
                values = (const.value for operand in compare.ops for const in operand.find_all(nodes.Const))
                found.update(value for value in values if isinstance(value, str))
    return found


def _named(source: list[Any]) -> dict[str, str]:
    try:
        return {entry["name"]: entry["template"] for entry in source}
    except (TypeError, KeyError) as error:
        raise CheckpointError(
            "chat_template in tokenizer_config.json is a list whose entries lack a name or a template; correct it."
        ) from error


def _sequence(messages: Any) -> Sequence[Any]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        _refuse(f"messages is a {type(messages).__name__}, but must be a list of messages.")
    if not messages:
        _refuse("messages is empty; give at least one message.")
    return messages


def _checked_tools(tools: Any) -> list[Any]:
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RequestError("tools must be a list of objects, each a function with its JSON schema.", "tools")
    try:
        shown, _ = with_functions(_plain(list(tools), "tools"))
    except ValueError as error:
        raise RequestError(f"tools are not as they should be: {error}.", "tools") from error
    return shown


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "output_text") or not isinstance(part.get("text"), str):
        _refuse(f'a content part of {where} is {kind or part!r}, but must be {{"type": "text", "text": ...}}.')
    text: str = part["text"]
    return text


def _forms(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The messages as templates may want them, the likeliest first.

    Most print a call's arguments as an object, a few paste the text that they came as. Most know that a message which
    is nothing but calls has no content; those that look into it all the same get an empty one.
    """
    parsed = [_with_parsed_arguments(message, index) for index, message in enumerate(messages)]
    forms = [parsed, messages, _with_content(parsed), _with_content(messages)]
    return [form for k, form in enumerate(forms) if form not in forms[:k]]


def _with_content(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [message if message.get("content") is not None else {**message, "content": ""} for message in messages]


def _with_parsed_arguments(message: dict[str, Any], index: int) -> dict[str, Any]:
    """OpenAI's clients send a call's arguments as JSON text; most templates print the object."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_parsed_call(call, f"messages[{index}].tool_calls") for call in calls]}


def _parsed_call(call: Any, where: str) -> Any:
    if not isinstance(call, dict):
        _refuse(f"an entry of {where} is a {type(call).__name__}, but must be an object with a function.")
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        _refuse(f"the arguments of an entry of {where} are not valid JSON; send what the model's call held.")
    return {**call, "function": {**function, "arguments": arguments}}


def _plain(value: Any, parameter: str) -> Any:
    """A copy in plain JSON types, whose methods the sandbox knows. Raises RequestError for anything else."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # an enum's value, say, without its methods
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key, parameter): _plain(item, parameter) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, parameter) for item in value]
    raise RequestError(
        f"{parameter} holds a {type(value).__name__}, but may hold JSON values only: objects, lists, strings,"
        " numbers, booleans and null.",
        parameter,
    )


def _refuse(message: str) -> NoReturn:
    raise RequestError(message, "messages")
