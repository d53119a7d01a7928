"""The author's options: a dataclass, its JSON Schema, and strict decoding into it."""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

_KINDS = {bool: "boolean", int: "integer", float: "number", str: "string"}


class BadOptions(Exception):
    """Options that the operator has to mend. The text names the option."""


def check_config(config: Any) -> None:
    """Refuse what the author cannot have meant. Raises BadOptions."""
    if config is not None and (isinstance(config, type) or not dataclasses.is_dataclass(config)):
        raise BadOptions(
            f"Info.config is {config!r}; it must be None or an instance of a dataclass that holds the defaults"
        )


def schema(config: Any) -> str:
    """The JSON Schema (draft 2020-12) of the options, with their defaults."""
    out = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    if config is None:
        out.update(type="object", additionalProperties=False)
    else:
        out.update(_object(type(config), config))
    return json.dumps(out, separators=(",", ":"))


def _object(cls: type, defaults: Any) -> "dict[str, Any]":
    hints = typing.get_type_hints(cls)
    properties = {}
    for f in dataclasses.fields(cls):
        properties[f.name] = _property(f"{cls.__name__}.{f.name}", hints[f.name])
        if f.metadata.get("description"):
            properties[f.name]["description"] = f.metadata["description"]
        if defaults is not None:
            properties[f.name]["default"] = _plain(getattr(defaults, f.name))
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _property(name: str, t: Any) -> "dict[str, Any]":
    t, optional = _unwrap(t)
    if dataclasses.is_dataclass(t):
        out = _object(t, None)
    elif typing.get_origin(t) is list:
        out = {"type": "array", "items": _property(name, typing.get_args(t)[0])}
    elif typing.get_origin(t) is dict:
        out = {"type": "object", "additionalProperties": _property(name, typing.get_args(t)[1])}
    elif t is Any:
        return {}
    elif t in _KINDS:
        out = {"type": _KINDS[t]}
    else:
        raise BadOptions(
            f"option {name} is of type {t}; bool, int, float, str, list[…], dict[str, …], "
            "Optional[…] and dataclasses are served"
        )
    if optional:
        out["type"] = [out["type"], "null"]
    return out


def _unwrap(t: Any) -> "tuple[Any, bool]":
    """Optional[T] is T and True."""
    args = typing.get_args(t)
    if type(None) in args and len(args) == 2:
        return next(a for a in args if a is not type(None)), True
    return t, False


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value


def decode(raw: bytes, config: Any) -> Any:
    """Return config with the options applied, strictly: an unknown option is an error that says what was
    probably meant. Raises BadOptions."""
    if not raw.strip():
        return config
    try:
        tree = json.loads(raw)
    except ValueError as e:
        raise BadOptions(f"not JSON: {e}") from None
    if not isinstance(tree, dict):
        raise BadOptions(f"must be an object, not {_kind(tree)}")
    if config is None:
        for key in tree:
            raise BadOptions(f'unknown option "{key}": this backend has no options')
        return None
    return _decode_object("", tree, type(config), config)


def _decode_object(path: str, tree: "dict[str, Any]", cls: type, defaults: Any) -> Any:
    fields = {f.name for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    values = {}
    for key in sorted(tree):
        name = f"{path}.{key}" if path else key
        if key not in fields:
            raise BadOptions(f'unknown option "{name}"{suggest(key, sorted(fields))}')
        before = getattr(defaults, key, None)
        values[key] = _decode_value(name, tree[key], hints[key], before)
    try:
        return dataclasses.replace(defaults, **values) if defaults is not None else cls(**values)
    except (TypeError, ValueError) as e:  # a required field is missing, or __post_init__ refused it
        raise BadOptions(f'option "{path}": {e}' if path else str(e)) from None


def _decode_value(name: str, v: Any, t: Any, before: Any) -> Any:
    t, optional = _unwrap(t)
    if v is None and optional or t is Any:
        return v
    if dataclasses.is_dataclass(t) and isinstance(v, dict):
        return _decode_object(name, v, t, before)
    if typing.get_origin(t) is list and isinstance(v, list):
        return [_decode_value(f"{name}[{i}]", e, typing.get_args(t)[0], None) for i, e in enumerate(v)]
    if typing.get_origin(t) is dict and isinstance(v, dict):
        return {key: _decode_value(f"{name}.{key}", e, typing.get_args(t)[1], None) for key, e in v.items()}
    if t is float and type(v) is int:
        return float(v)
    if type(v) is t:
        return v
    raise BadOptions(f'option "{name}" must be {_wanted(t)}, not {_kind(v)}')


def _wanted(t: Any) -> str:
    if typing.get_origin(t) is list:
        return "an array"
    if typing.get_origin(t) is dict or dataclasses.is_dataclass(t):
        return "an object"
    return "an integer" if t is int else f"a {_KINDS.get(t, t)}"


def _kind(v: Any) -> str:
    if v is None:
        return "null"
    return {bool: "a boolean", list: "an array", str: "a string", dict: "an object"}.get(type(v), "a number")


def suggest(key: str, names: "list[str]") -> str:
    """Name the closest of names, or all of them when none is close."""
    best, distance = "", 4
    for name in names:
        d = edit_distance(key.lower(), name.lower())
        if d < distance and d < len(name):
            best, distance = name, d
    if best:
        return f': did you mean "{best}"?'
    return ": known are " + ", ".join(names) if names else ": there are no options here"


def edit_distance(a: str, b: str) -> int:
    """Levenshtein's."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a):
        last, row[0] = row[0], i + 1
        for j, y in enumerate(b):
            last, row[j + 1] = row[j + 1], last if x == y else 1 + min(last, row[j], row[j + 1])
    return row[len(b)]
