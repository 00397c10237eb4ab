"""Holds a whole result against its schema; reading makes a light check only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jsonschema import Draft202012Validator
from referencing import Registry, Resource

from jacobi_forcing.formats import common, identify, schema


def validator(kind: str, version: int) -> Draft202012Validator:
    """The validator of one kind."""
    shared: Registry[Any] = Registry().with_resource("urn:jforce:common", Resource.from_contents(common()))
    return Draft202012Validator(schema(kind, version), registry=shared)


def assert_valid(value: Mapping[str, Any], kind: str | None = None) -> None:
    """Fail with the first places where a result differs from the schema that it names.

    Args:
        value: The result, as it was before or after it went through JSON.
        kind: What it has to be; any by default.
    """
    assert "schema" in value, f"no schema is named; keys: {', '.join(value)}"
    form = json.loads(json.dumps(value))
    result = identify(form, "the result", *([kind] if kind else []))
    errors = sorted(validator(result.kind, result.version).iter_errors(form), key=lambda error: error.json_path)
    assert not errors, "\n".join(f"{error.json_path}: {error.message[:200]}" for error in errors[:5])
