"""JSON as evidence holds it: UTF-8, no key twice, finite numbers, bounded in depth; checked by a schema."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from ..text import plain
from .form import DEEPEST, LONGEST_NUMBER, EvidenceError


def parsed(content: bytes, where: str) -> Any:
    """The value that ``content`` holds. Raises :class:`EvidenceError`, its sentence beginning with ``where``."""
    try:
        value = json.loads(
            content.decode(), object_pairs_hook=_object, parse_constant=_no_number, parse_float=_float, parse_int=_int
        )
    except UnicodeDecodeError:
        raise EvidenceError(f"{where} is not UTF-8") from None
    except RecursionError:
        raise EvidenceError(f"{where} holds values more than {DEEPEST} deep inside one another") from None
    except json.JSONDecodeError as error:
        raise EvidenceError(f"{where} is not JSON: {plain(error.msg)} in line {error.lineno}") from None
    except ValueError as error:
        raise EvidenceError(f"{where} {plain(error)}") from None
    if _is_deep(value):
        raise EvidenceError(f"{where} holds values more than {DEEPEST} deep inside one another")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"holds the key {next(key for key in keys if keys.count(key) > 1)!r} twice in one object")
    return found


def _no_number(text: str) -> Any:
    raise ValueError(f"holds {text}, which is no number")


def _float(text: str) -> float:
    value = float(text) if len(text) <= LONGEST_NUMBER else math.inf
    if not math.isfinite(value):
        raise ValueError(f"holds the number {text[:LONGEST_NUMBER]}, which is too large or too long")
    return value


def _int(text: str) -> int:
    if len(text) > LONGEST_NUMBER:
        raise ValueError(f"holds the number {text[:LONGEST_NUMBER]}.., which is too long")
    return int(text)


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [child for item in level for child in _children(item)]
        if not level:
            return False
    return True


def _children(value: Any) -> Iterator[Any]:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (child for child in inside if isinstance(child, (dict, list)))


def check_schema(value: Any, kind: str, schema: str, where: str) -> None:
    """Raise :class:`EvidenceError` unless ``value`` is what the schema ``kind`` asks; its version is ``schema``."""
    if not isinstance(value, dict):
        raise EvidenceError(f"{where} must hold a JSON object")
    if value.get("schema") != schema:
        raise EvidenceError(f"{where} has schema {plain(value.get('schema'), limit=80)}, and not {schema}")
    # Late: a machine that only writes evidence does without the package.
    try:
        from jsonschema.exceptions import relevance
    except ImportError:
        raise EvidenceError("to read evidence needs the package jsonschema: pip install jsonschema") from None
    # Not best_match, which would go through every error of a document that is wrong throughout.
    if errors := [error for error, _ in zip(_validator(kind).iter_errors(value), range(20), strict=False)]:
        worst = max(errors, key=relevance)
        path = "/".join(str(step) for step in worst.absolute_path)
        raise EvidenceError(f"{where}: {plain(path, limit=120) or 'it'} {_said(worst)}")


@cache
def _validator(kind: str) -> Any:
    from jsonschema import Draft202012Validator

    text = (files("ropecheck.ci") / "schemas" / f"{kind}.schema.json").read_text()
    return Draft202012Validator(json.loads(text))


def _said(error: Any) -> str:
    """What is wrong, without the value, which may be as large as the document."""
    rule, asked, given = error.validator, error.validator_value, error.instance
    if rule == "required":
        return f"lacks {next(name for name in asked if name not in given)}"
    if rule == "additionalProperties" and isinstance(given, dict):
        known = set(error.schema.get("properties", ()))
        unknown = sorted(set(given) - known)
        return f"holds {plain(unknown[0], limit=80)}, which evidence has not" if unknown else "holds an unknown key"
    if rule == "type":
        return f"must be {' or '.join(asked) if isinstance(asked, list) else asked}"
    if rule in ("enum", "const"):
        shown = ", ".join(str(value) for value in asked) if isinstance(asked, list) else asked
        return f"must be {'one of ' if rule == 'enum' else ''}{shown}, not {plain(given, limit=80)}"
    if rule == "pattern":
        return f"is {plain(given, limit=80)}, which is not of its form"
    if rule == "propertyNames":
        return "has a key that is not of its form"
    return f"breaks the rule {rule} {plain(asked, limit=80)}"
