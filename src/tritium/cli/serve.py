"""`tritium serve`: a saved model behind HTTP, for one process without Spark (any process)."""

from __future__ import annotations

import functools
import json
import signal
import sys
from typing import Any

import click
import numpy as np
import pyarrow as pa

from tritium.cli.openapi import ARROW, TEXTS, openapi
from tritium.errors import BadRow, SetupError, SignatureMismatch, TritiumError, WrongVersion
from tritium.model.calls import check_batch_size
from tritium.model.model import Model, load


class BadRequest(Exception):
    """A request is answered with this status and text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@click.command()
@click.argument("model")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on; 0.0.0.0 for all.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0: one that is free.")
@click.option("--trusted", multiple=True, help="What loading may run, as trusted= of tr.load; `true` for all.")
@click.option("--batch-size", default=1024, show_default=True, help="Rows that the module is called with at once.")
@click.option("--device", help="Where to compute: cpu, or cuda.")
@click.option("--max-bytes", default=16 << 20, show_default=True, help="The largest body of a request.")
@click.option("--timeout", default=30.0, show_default=True, help="Seconds for a request, from its body to its answer.")
def serve(model: str, host: str, port: int, trusted: tuple[str, ...], **limits: Any) -> None:
    """Serve the model in directory MODEL: POST /predict, GET /health, GET /openapi.json.

    One process, one prediction at a time, without Spark. SIGTERM ends it, after the requests that it is answering.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ModuleNotFoundError as error:
        raise WrongVersion(f"Serving needs {error.name}: pip install 'tritium[serve]'.", library=error.name) from error
    check_batch_size(limits["batch_size"])
    loaded = load(model, trusted=True if trusted == ("true",) else list(trusted))
    if limits["device"] is not None:
        loaded.engine.check_device(limits["device"])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # Uvicorn raises it again when it has ended.
    uvicorn.run(application(loaded, **limits), host=host, port=port, timeout_graceful_shutdown=int(limits["timeout"]))


def application(model: Model, *, batch_size: int, device: str | None, max_bytes: int, timeout: float) -> Any:
    """Return the model as an ASGI application."""
    import anyio
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    one_at_a_time = anyio.CapacityLimiter(1)
    run = functools.partial(model.predict, batch_size=batch_size, device=device)

    async def predict(request: Any) -> Response:
        body, kind = bytearray(), request.headers.get("content-type", "application/json").partition(";")[0].strip()
        try:
            with anyio.fail_after(timeout):
                async for piece in request.stream():
                    body += piece
                    if len(body) > max_bytes:
                        raise BadRequest(413, f"The body has more than {max_bytes:,} bytes. Send fewer rows at once.")
                answer = functools.partial(_answer, model, run, kind, bytes(body))
                content = await anyio.to_thread.run_sync(answer, limiter=one_at_a_time, abandon_on_cancel=True)
        except TimeoutError:
            raise BadRequest(504, f"No prediction within {timeout:g} s. Send fewer rows at once.") from None
        return Response(content, media_type=kind)

    async def refuse(request: Any, error: Exception) -> JSONResponse:
        status = getattr(error, "status", 422 if isinstance(error, SignatureMismatch | BadRow | SetupError) else 500)
        known = isinstance(error, TritiumError | BadRequest)
        text = str(error) if known else "The model could not be applied; the server's log has more."
        return JSONResponse({"error": type(error).__name__, "message": text}, status)

    routes = [
        Route("/predict", predict, methods=["POST"]),
        Route("/health", lambda _: JSONResponse({"status": "ok", "model": model.describe()})),
        Route("/openapi.json", lambda _: JSONResponse(openapi(model))),
    ]
    return Starlette(routes=routes, exception_handlers={BadRequest: refuse, TritiumError: refuse, Exception: refuse})


def _answer(model: Model, run: Any, kind: str, body: bytes) -> bytes:
    """Return the predictions in the form of the rows: an Arrow stream, a JSON list of records, or columns."""
    if kind == ARROW:
        try:
            rows = pa.ipc.open_stream(body).read_all()
        except (pa.ArrowException, OSError) as error:
            raise BadRequest(400, f"The body is no Arrow stream: {error}") from None
        table = pa.table({name: pa.array(values.tolist()) for name, values in _by_column(run(rows)).items()})
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return bytes(sink.getvalue())
    if kind != "application/json":
        raise BadRequest(415, f"The content type is {kind!r}. It is application/json or {ARROW}.")
    are_records, table = _table(model, body)
    lists = {name: _json(values) for name, values in _by_column(run(table)).items()}
    records = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
    return json.dumps(records if are_records else lists).encode()


def _json(values: Any) -> list[Any]:
    """Return an array as lists, with null for NaN and infinity, of which JSON has neither."""
    values = np.where(np.isfinite(values), values.astype(object), None) if values.dtype.kind == "f" else values
    return list(values.tolist())


def _by_column(predictions: Any) -> Any:
    return predictions if isinstance(predictions, dict) else {"prediction": predictions}


def _table(model: Model, body: bytes) -> tuple[bool, pa.Table]:
    """Return whether a JSON body is a list of records, and its rows. Raises BadRequest for what is neither form."""
    kinds = {c: kind for i in model.signature.inputs for c, kind in zip(i.columns, i.types, strict=False)}
    try:
        rows = json.loads(body)
        lists: dict[str, list[Any]] = rows
        if isinstance(rows, list):
            names = dict.fromkeys(name for record in rows for name in dict(record))
            lists = {name: [record.get(name) for record in rows] for name in names}
        for name, (_, read) in [(name, TEXTS.get(kinds.get(name, ""), ("", None))) for name in lists]:
            if read is not None:
                lists[name] = [None if value is None else read(value) for value in lists[name]]
        return isinstance(rows, list), pa.table(lists)
    except (ValueError, TypeError, AttributeError, pa.ArrowException) as error:
        raise BadRequest(400, f"The body is neither a JSON list of records nor an object of columns: {error}") from None
