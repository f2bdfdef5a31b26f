"""JSON schemas, said in words that the grammar compiler can enforce: equal ones, never weaker ones.

llguidance knows neither `not` nor conditions, and takes `oneOf` only where it sees that no two branches can hold at
once. Much of what people write with them can be said by types, ranges, patterns and required or forbidden properties.
What cannot is left as it is, for the compiler to refuse. Names of formats that it does not know are annotations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Schema = Any
"""An object, or true (anything) or false (nothing)."""

ENFORCED_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
)

MAX_SCHEMAS = 50_000
"""Subschemas that may come out: what is said in other words may be longer by far."""

MAX_ORDERED = 4
"""Different values up to which the arrays without repetition are listed."""

MAX_DISTRIBUTED = 64
"""Alternatives that a condition may become."""

TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})

_ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "example", "comment", "$comment", "$schema", "$id", "id"),
        *("deprecated", "readOnly", "writeOnly", "$defs", "definitions"),
    }
)
_ONE = ("additionalProperties", "additionalItems", "unevaluatedProperties", "unevaluatedItems")
_MANY = ("allOf", "anyOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_COMPOSED = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "$ref", "dependentSchemas"})
_OPPOSITE = {  # keyword: type, opposite keyword, what is added to its value
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
}


def enforceable(schema: Schema, closed: bool) -> Schema:
    """An equal schema that the compiler has a better chance with.

    With `closed`, objects that list their properties and say nothing of others have no others: a model that may add
    some goes on inventing them. Objects that several schemas describe together stay as they are.
    Raises ValueError if the schema becomes too large, and RecursionError if it nests too deeply.
    """
    made = _Rewriter(schema).rewritten()
    return _closed(made) if closed else made


# -- in other words ---------------------------------------------------------------------------------


class _Rewriter:
    """Rewrites one schema; references are looked up in it."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._count = 0

    def rewritten(self) -> Schema:
        return self._rewritten(self._root)

    def _rewritten(self, schema: Schema) -> Schema:
        if not isinstance(schema, dict):
            return schema
        self._count += 1
        if self._count > MAX_SCHEMAS:
            raise ValueError("the schema is too large for its conditions; use fewer")
        made = dict(schema)
        if isinstance(made.get("format"), str) and made["format"] not in ENFORCED_FORMATS:
            del made["format"]
        more = [said for said in (self._instead(made, word) for word in _INSTEAD) if said not in (None, True)]
        for word in _ONE:
            if word in made:
                made[word] = self._rewritten(made[word])
        for word in _MANY:
            if isinstance(made.get(word), list):
                made[word] = [self._rewritten(part) for part in made[word]]
        for word in _NAMED:
            if isinstance(made.get(word), dict):
                made[word] = {name: self._rewritten(part) for name, part in made[word].items()}
        if "items" in made:
            items = made["items"]
            made["items"] = [self._rewritten(i) for i in items] if isinstance(items, list) else self._rewritten(items)
        if isinstance(made.get("oneOf"), list):
            made["oneOf"] = [self._rewritten(part) for part in made["oneOf"]]
        if more:
            made["allOf"] = [*_listed(made.get("allOf")), *map(self._rewritten, more)]
        return made

    def _instead(self, made: dict[str, Any], word: str) -> Schema | None:
        """What says the same as a word of `made`, which is taken out then; None if nothing does."""
        if word not in made:
            return None
        said: Schema | None = _INSTEAD[word](self, made, word)
        if said is not None:
            for name in ("if", "then", "else") if word == "if" else (word,):
                made.pop(name, None)
        return said

    def _not(self, made: Mapping[str, Any], word: str) -> Schema | None:
        return self._complement(made[word], self._types(made), ())

    def _condition(self, made: Mapping[str, Any], word: str) -> Schema | None:
        otherwise = self._complement(made[word], self._types(made), ())
        if otherwise is None:
            return None
        held = {"allOf": [made[word], made.get("then", True)]}
        return {"anyOf": [held, {"allOf": [otherwise, made.get("else", True)]}]}

    def _one_of(self, made: dict[str, Any], word: str) -> Schema | None:
        branches = made[word]
        if not isinstance(branches, list):
            return None
        overlaps = [
            [j for j, b in enumerate(branches) if j != k and not self._apart(a, b)] for k, a in enumerate(branches)
        ]
        if not any(overlaps) and "anyOf" not in made:
            made["anyOf"] = branches
            return True
        within = self._types(made)
        others = [self._complement(branch, within, ()) for branch in branches]
        alone: list[Schema] = []
        for branch, overlap in zip(branches, overlaps, strict=True):
            without = [others[j] for j in overlap]
            if None in without:
                return None
            alone += _distributed(branch, without)
        return {"anyOf": alone}

    def _apart(self, a: Schema, b: Schema) -> bool:
        """True if for certain no value is both: by their types, or by a property that both require."""
        types = self._types(a) & self._types(b)
        if not types:
            return True
        mine, others = self._marks(a), self._marks(b)
        return types == {"object"} and any(
            not any(_same(x, y) for x in mine[name] for y in others[name]) for name in mine.keys() & others.keys()
        )

    def _marks(self, schema: Schema) -> dict[str, list[Any]]:
        """Required properties that have one of some values."""
        if isinstance(schema, dict) and "$ref" in schema:
            schema = self._target(schema["$ref"])
        if not isinstance(schema, dict) or not isinstance(schema.get("properties"), dict):
            return {}
        found = {}
        for name in _listed(schema.get("required")):
            part = schema["properties"].get(name)
            if isinstance(part, dict) and ("const" in part or isinstance(part.get("enum"), list)):
                found[name] = [part["const"]] if "const" in part else part["enum"]
        return found

    def _dependencies(self, made: Mapping[str, Any], word: str) -> Schema | None:
        said = made[word]
        if not isinstance(said, dict):
            return None
        return not said or {
            "allOf": [
                {
                    "anyOf": [
                        {"type": sorted(TYPES - {"object"})},
                        {"type": "object", "properties": {name: False}},
                        {"required": [name, *(one for one in then if one != name)]}
                        if isinstance(then, list)
                        else {"allOf": [{"required": [name]}, then]},
                    ]
                }
                for name, then in said.items()
            ]
        }

    def _names(self, made: dict[str, Any], word: str) -> Schema | None:
        """`propertyNames` with a pattern, where nothing else speaks of properties."""
        names = made[word]
        if names is True or names == {}:
            return True
        if not isinstance(names, dict) or set(names) - _ANNOTATIONS - {"type"} != {"pattern"}:
            return None
        if {"properties", "patternProperties"} & set(made) or names.get("type", "string") != "string":
            return None
        rest = made.pop("additionalProperties", True)
        made["patternProperties"] = {names["pattern"]: rest}
        made["additionalProperties"] = False
        return True

    def _unique(self, made: Mapping[str, Any], word: str) -> Schema | None:
        if made[word] is False or made.get("maxItems", 2) in (0, 1):
            return True
        items = made.get("items")
        values = items.get("enum") if isinstance(items, dict) and "prefixItems" not in made else None
        if not isinstance(values, list) or not 0 < len(values) <= MAX_ORDERED:
            return None
        rows: list[list[Any]] = [[]]
        for row in rows:  # grows while it is read
            rows += [[*row, value] for value in values if not any(_same(value, known) for known in row)]
        listed: list[Schema] = [{"maxItems": 0}]
        for row in rows[1:]:
            listed.append({"prefixItems": [{"const": v} for v in row], "items": False, "minItems": len(row)})
        return {"anyOf": [{"type": sorted(TYPES - {"array"})}, *({"type": "array", **row} for row in listed)]}

    # -- complements ------------------------------------------------------------------------------

    def _complement(self, schema: Schema, within: frozenset[str], seen: tuple[str, ...]) -> Schema | None:
        """A schema for exactly those values of the types `within` that `schema` forbids; None if it cannot be said."""
        if isinstance(schema, bool):
            return False if schema else _of(within)
        if not isinstance(schema, dict):
            return None
        parts: list[Schema] = []
        for word, value in schema.items():
            if word in _ANNOTATIONS or (word == "format" and value not in ENFORCED_FORMATS):
                continue
            part = self._forbidden(schema, word, value, within, seen)
            if part is None:
                return None
            parts.append(part)
        parts = [part for part in parts if part is not False]
        return _any(parts)

    def _forbidden(
        self, schema: Mapping[str, Any], word: str, value: Any, within: frozenset[str], seen: tuple[str, ...]
    ) -> Schema | None:
        """What one word forbids."""
        if word in _OPPOSITE:
            type, opposite, more = _OPPOSITE[word]
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                return None
            if opposite.startswith("max") and value + more < 0 and type != "number":
                return False  # at least 0 holds always
            return {"type": type, opposite: value + more} if type in within else False
        match word:
            case "type":
                named = set(value if isinstance(value, list) else [value])
                if "integer" in named and "number" not in named and "number" in within:
                    return None  # numbers with a fraction have no word
                return _of(within - named - ({"number"} if "integer" in named else set()))
            case "const":
                return _other_than([value], within)
            case "enum":
                return _other_than(value, within) if isinstance(value, list) else None
            case "required":
                if not isinstance(value, list):
                    return None
                if "object" not in within:
                    return False
                return _any({"type": "object", "properties": {name: False}} for name in value)
            case "properties":
                if not isinstance(value, dict):
                    return None
                if "object" not in within:
                    return False
                found = {name: self._complement(part, TYPES, seen) for name, part in value.items()}
                if None in found.values():
                    return None
                return _any(
                    {"type": "object", "properties": {name: part}, "required": [name]}
                    for name, part in found.items()
                    if part is not False
                )
            case "allOf" if isinstance(value, list):
                found_parts = [self._complement(part, within, seen) for part in value]
                return None if None in found_parts else _any(part for part in found_parts if part is not False)
            case "anyOf" if isinstance(value, list):
                found_parts = [self._complement(part, within, seen) for part in value]
                if None in found_parts:
                    return None
                return False if False in found_parts else {"allOf": found_parts}
            case "not":
                return {"allOf": [value, _of(within)]}
            case "$ref":
                target = None if value in seen else self._target(value)
                return None if target is None else self._complement(target, within, (*seen, value))
        return None

    def _target(self, reference: object) -> Schema | None:
        """What a reference into the same schema means."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found = self._root
        for step in reference[1:].split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or name not in found:
                return None
            found = found[name]
        return found

    def _types(self, schema: Schema, seen: tuple[str, ...] = ()) -> frozenset[str]:
        """Types that a value of `schema` may have: these at most."""
        if schema is False:
            return frozenset()
        if not isinstance(schema, dict):
            return TYPES
        found = TYPES
        if "type" in schema:
            named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            found &= frozenset("number" if name == "integer" else name for name in named)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            found &= frozenset(map(_type, values))
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list):
                found &= frozenset().union(*(self._types(part, seen) for part in schema[word]))
        for part in _listed(schema.get("allOf")):
            found &= self._types(part, seen)
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            target = self._target(reference)
            if target is not None:
                found &= self._types(target, (*seen, reference))
        return found


_INSTEAD = {
    "not": _Rewriter._not,
    "if": _Rewriter._condition,
    "oneOf": _Rewriter._one_of,
    "dependencies": _Rewriter._dependencies,
    "dependentRequired": _Rewriter._dependencies,
    "dependentSchemas": _Rewriter._dependencies,
    "propertyNames": _Rewriter._names,
    "uniqueItems": _Rewriter._unique,
}


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _of(types: frozenset[str] | set[str]) -> Schema:
    return True if types == TYPES else {"type": sorted(types)} if types else False


def _any(parts: Iterable[Schema]) -> Schema:
    found = list(parts)
    return found[0] if len(found) == 1 else {"anyOf": found} if found else False


def _distributed(schema: Schema, others: Sequence[Schema]) -> list[Schema]:
    """`schema` and all of `others`, as alternatives without alternatives inside, if those are few."""
    choices = [other["anyOf"] if isinstance(other, dict) and other.keys() == {"anyOf"} else [other] for other in others]
    if math.prod(map(len, choices)) > MAX_DISTRIBUTED:
        return [{"allOf": [schema, *others]}]
    return [{"allOf": [schema, *chosen]} for chosen in itertools.product(*choices)]


def _type(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def _same(a: object, b: object) -> bool:
    """Equal as JSON: 1 and 1.0 are, 1 and true are not."""
    return _type(a) == _type(b) and a == b


def _other_than(values: list[Any], within: frozenset[str]) -> Schema | None:
    """All values of the types `within` but these; None if arrays or objects are among them."""
    by_type: dict[str, list[Any]] = {}
    for value in values:
        by_type.setdefault(_type(value), []).append(value)
    if {"array", "object"} & by_type.keys() & within:
        return None
    others = _of(within - by_type.keys())
    parts: list[Schema] = [] if others is False else [others]
    if "boolean" in by_type.keys() & within:
        parts += [{"const": value} for value in (False, True) if value not in by_type["boolean"]]
    if "string" in by_type.keys() & within:
        parts.append({"type": "string", "pattern": f"^(?:{_texts_other_than(by_type['string'])})$"})
    if "number" in by_type.keys() & within:
        cuts = sorted(set(by_type["number"]))
        parts.append({"type": "number", "exclusiveMaximum": cuts[0]})
        parts += [{"type": "number", "exclusiveMinimum": a, "exclusiveMaximum": b} for a, b in itertools.pairwise(cuts)]
        parts.append({"type": "number", "exclusiveMinimum": cuts[-1]})
    return _any(parts)


def _texts_other_than(texts: Iterable[str]) -> str:
    """A regular expression for all texts but these: along their tree, whatever leaves it."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return _leaving(tree)


def _leaving(node: Mapping[str, Any]) -> str:
    following = [character for character in node if character]
    ways = [] if "" in node else [""]
    ways.append((f"[^{''.join(map(_escaped, following))}]" if following else r"[\s\S]") + r"[\s\S]*")
    ways += [f"{_escaped(character)}(?:{_leaving(node[character])})" for character in following]
    return "|".join(ways)


def _escaped(character: str) -> str:
    return (
        f"\\{character}"
        if character.isascii() and not character.isalnum() and character.isprintable() and character != " "
        else character
    )


# -- closed objects ---------------------------------------------------------------------------------


def _closed(root: Schema) -> Schema:
    """A copy whose objects have the properties that they list, and no others.

    What describes an object together with another schema is left open: what one lists, the other would forbid.
    """
    shared = set(_composed(root))
    if any(not reference.startswith("#") for reference in shared):
        return root  # by a name: nobody knows here what that describes

    def close(schema: Schema, pointer: str) -> Schema:
        if not isinstance(schema, dict):
            return schema
        made = dict(schema)
        for word in ("properties", "patternProperties", "$defs", "definitions"):
            if isinstance(made.get(word), dict):
                made[word] = {name: close(part, f"{pointer}/{word}/{_step(name)}") for name, part in made[word].items()}
        for word in ("items", "additionalProperties"):
            if isinstance(made.get(word), dict):
                made[word] = close(made[word], f"{pointer}/{word}")
        lists = ["prefixItems"]
        if not {"properties", "patternProperties"} & set(made):
            lists += ["anyOf", "oneOf"]  # each branch alone describes its object
        for word in lists:
            if isinstance(made.get(word), list):
                made[word] = [close(part, f"{pointer}/{word}/{k}") for k, part in enumerate(made[word])]
        if made.get("properties") and not _OPEN & set(made) and pointer not in shared:
            made["additionalProperties"] = False
        return made

    return close(root, "#")


_OPEN = _COMPOSED | {
    *("additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"),
    *("dependencies", "dependentRequired", "minProperties"),
}


def _composed(root: Schema) -> Iterable[str]:
    """Where schemas stand that describe a value together with others: parts of such, and what those refer to."""
    waiting = [(root, "#", False)]
    while waiting:
        schema, pointer, together = waiting.pop()
        if isinstance(schema, list):
            waiting += [(part, f"{pointer}/{k}", together) for k, part in enumerate(schema)]
        if not isinstance(schema, dict):
            continue
        if together:
            yield pointer
            if isinstance(schema.get("$ref"), str):
                yield schema["$ref"]
        for word, part in schema.items():
            if word in ("properties", "patternProperties", "$defs", "definitions") and isinstance(part, dict):
                waiting += [(one, f"{pointer}/{word}/{_step(name)}", False) for name, one in part.items()]
            elif word in _COMPOSED or word == "dependencies":
                alone = word in ("anyOf", "oneOf") and not (_OPEN | {"properties"}) - {word} & set(schema)
                waiting.append((part, f"{pointer}/{word}", together or not alone))
            else:
                waiting.append((part, f"{pointer}/{word}", False))
        if isinstance(schema.get("$ref"), str) and {"properties", *_OPEN} - {"$ref"} & set(schema):
            yield schema["$ref"]


def _step(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
