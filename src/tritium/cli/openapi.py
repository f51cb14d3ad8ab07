"""The OpenAPI description of a served model, by its signature (any process)."""

from __future__ import annotations

import base64
import importlib.metadata
from datetime import date, datetime
from typing import Any

from tritium.model.model import Model
from tritium.model.signature import Input

ARROW = "application/vnd.apache.arrow.stream"
# Type of a column at training → its type and format in JSON, and the function that reads it.
TEXTS: dict[str, tuple[str, Any]] = {
    "date": ("date", date.fromisoformat),
    "timestamp": ("date-time", datetime.fromisoformat),
    "binary": ("byte", base64.b64decode),
    "string": ("", None),
}
_REFUSED = {
    "400": "The body holds no rows",
    "413": "The body is too long",
    "415": "The content type is another",
    "422": "The rows do not fit the model",
    "504": "The prediction takes too long",
}


def openapi(model: Model) -> dict[str, Any]:
    """Return the service's description in OpenAPI's form, made of the model's signature."""
    signature = model.signature
    outputs = {o.name: _arrays({"type": "number"}, 0 if o.scalar else len(o.shape)) for o in signature.outputs}
    if signature.task == "classification":
        outputs = {"prediction": {"type": "number"}, "probability": _arrays({"type": "number"}, 1)}
        outputs |= {"prediction_label": {"type": "string"}} if signature.class_words else {}
    elif len(outputs) == 1:
        outputs = {"prediction": next(iter(outputs.values()))}
    inputs = {c: _value(i, n) for i in signature.inputs for n, c in enumerate(i.columns)}

    def content(fields: dict[str, Any]) -> dict[str, Any]:
        record = {"type": "object", "properties": fields, "required": list(fields)}
        columns = {**record, "properties": {name: _arrays(value, 1) for name, value in fields.items()}}
        either = {"oneOf": [_arrays(record, 1), columns]}
        return {"application/json": {"schema": either}, ARROW: {"schema": {"type": "string", "format": "binary"}}}

    error = {"type": "object", "properties": {"error": {"type": "string"}, "message": {"type": "string"}}}
    answers: dict[str, Any] = {"200": {"description": "Predictions", "content": content(outputs)}}
    for status, text in (
        (400, "No rows"),
        (413, "Too long"),
        (415, "Other type"),
        (422, "Bad rows"),
        (504, "Too slow"),
    ):
        answers[str(status)] = {"description": text, "content": {"application/json": {"schema": error}}}
    body = {"required": True, "content": content(inputs)}
    return {
        "openapi": "3.1.0",
        "info": {"title": model.describe(), "version": importlib.metadata.version("tritium")},
        "paths": {
            "/predict": {"post": {"requestBody": body, "responses": answers}},
            "/health": {"get": {"responses": {"200": {"description": "The model is loaded"}}}},
        },
    }


def _value(taken: Input, position: int) -> dict[str, Any]:
    """Return the schema of one source column of an input."""
    kind = taken.types[position] if taken.types else "string" if taken.codec.get("vocabulary") else "number"
    form, _ = TEXTS.get(kind, ("", None))
    value = {"type": "string" if kind in TEXTS else "number"} | ({"format": form} if form else {})
    packed = len(taken.columns) > 1 or taken.codec.get("packed") or taken.shape in ((), (1,))
    return _arrays(value, int(taken.codec.get("depth") or (0 if packed or taken.codec else len(taken.shape))))


def _arrays(value: dict[str, Any], depth: int) -> dict[str, Any]:
    return value if depth == 0 else {"type": "array", "items": _arrays(value, depth - 1)}
