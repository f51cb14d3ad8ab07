"""`tritium serve` as a process: what it answers, refuses, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import tritium as tr

ARROW = "application/vnd.apache.arrow.stream"
ROWS = pd.DataFrame({"temp": [1.5, 2.0, -3.0], "hum": [0.5, 0.25, 0.0], "hr": [1, 2, 3]})
FEATURES = ["temp", "hum", "hr"]


@contextmanager
def served(path: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Yield the URL of a served model and its process."""
    command = [sys.executable, "-m", "tritium.cli", "serve", str(path), "--port", "0", *options]
    code = "from tritium.cli import main; main()"
    command = [sys.executable, "-c", code, *command[3:]]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stderr
            lines = []
            for line in process.stderr:
                lines.append(line)
                if "running on" in line:
                    break
            else:
                raise AssertionError("".join(lines))
            # A pipe that nobody reads would block the process.
            reader = threading.Thread(target=process.stderr.read)
            reader.start()
            yield line.partition("running on ")[2].split()[0], process
        finally:
            process.kill()
            reader.join()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[tr.Model, Path]:
    model = tr.Model(torch.nn.Sequential(torch.nn.Linear(3, 2)), example=ROWS[FEATURES], task="classification")
    path = tmp_path_factory.mktemp("served") / "model"
    model.save(str(path))
    return model, path


@pytest.fixture(scope="module")
def url(model: tuple[tr.Model, Path]) -> Iterator[str]:
    with served(model[1], "--trusted", "true", "--max-bytes", "5000") as (url, _):
        yield url


def test_records_columns_and_arrow(model: tuple[tr.Model, Path], url: str) -> None:
    expected = model[0].predict(ROWS)
    assert isinstance(expected, dict)
    records = httpx.post(f"{url}/predict", json=ROWS.to_dict("records")).json()
    assert [row["prediction"] for row in records] == expected["prediction"].tolist()
    np.testing.assert_allclose([row["probability"] for row in records], expected["probability"])
    columns = httpx.post(f"{url}/predict", json=ROWS.to_dict("list"))
    assert columns.headers["content-type"] == "application/json"
    np.testing.assert_allclose(columns.json()["probability"], expected["probability"])
    sink = pa.BufferOutputStream()
    table = pa.Table.from_pandas(ROWS, preserve_index=False)
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    arrow = httpx.post(f"{url}/predict", content=bytes(sink.getvalue()), headers={"content-type": ARROW})
    assert arrow.headers["content-type"] == ARROW
    answered = pa.ipc.open_stream(arrow.content).read_all()
    np.testing.assert_allclose(np.stack(answered["probability"].to_pylist()), expected["probability"])
    assert httpx.post(f"{url}/predict", json=[]).status_code == 422  # no columns


def test_health_and_description(url: str) -> None:
    assert httpx.get(f"{url}/health").json()["status"] == "ok"
    described = httpx.get(f"{url}/openapi.json").json()
    content = described["paths"]["/predict"]["post"]["requestBody"]["content"]
    records, columns = content["application/json"]["schema"]["oneOf"]
    assert records["items"]["properties"] == {name: {"type": "number"} for name in FEATURES}
    assert columns["properties"]["hr"] == {"type": "array", "items": {"type": "number"}}
    answers = described["paths"]["/predict"]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert set(answers["oneOf"][0]["items"]["properties"]) == {"prediction", "probability"}


@pytest.mark.parametrize(
    ("rows", "status", "error", "text"),
    [
        ([{"temp": 1, "Hum": 2, "hr": 3}], 422, "SignatureMismatch", "missing column 'hum'"),
        ([{"temp": "warm", "hum": 2, "hr": 3}], 422, "SignatureMismatch", "column 'temp' is string"),
        ([{"temp": 1, "hum": 2, "hr": 3}, {"temp": 1, "hr": 3}], 422, "BadRow", "column 'hum' is null in row 1"),
        ([{"temp": [1, 2], "hum": 2, "hr": 3}, {"temp": 1}], 400, "BadRequest", "neither a JSON list of records"),
        ({"temp": [1, 2], "hum": [1]}, 400, "BadRequest", "neither a JSON list of records"),
        (7, 400, "BadRequest", "neither a JSON list of records"),
        ([1], 400, "BadRequest", "neither a JSON list of records"),
        ([{"temp": 1.0, "hum": 2.0, "hr": 3}] * 1000, 413, "BadRequest", "more than 5,000 bytes"),
    ],
)
def test_what_does_not_fit(url: str, rows: Any, status: int, error: str, text: str) -> None:
    answer = httpx.post(f"{url}/predict", json=rows)
    assert (answer.status_code, answer.json()["error"]) == (status, error)
    assert text in answer.json()["message"]


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [(b"{", "application/json", 400), (b"nothing", ARROW, 400), (b"a,b", "text/csv", 415)],
)
def test_what_is_no_body(url: str, content: bytes, kind: str, status: int) -> None:
    answer = httpx.post(f"{url}/predict", content=content, headers={"content-type": kind})
    assert (answer.status_code, answer.json()["error"]) == (status, "BadRequest")
    assert httpx.get(f"{url}/predict").status_code == 405


class Slow(torch.nn.Module):
    """Waits as many seconds as its first input says, and raises for a negative one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import time

        time.sleep(float(x[0, 0]))
        return x.sum(1)


def test_it_answers_before_it_ends_and_has_a_limit(tmp_path: Path) -> None:
    rows = pd.DataFrame({"a": [0.0], "b": [1.0]})
    tr.Model(Slow(), example=rows).save(str(tmp_path / "slow"))
    with served(tmp_path / "slow", "--trusted", "true", "--timeout", "3") as (url, process):
        assert httpx.post(f"{url}/predict", json=[{"a": -1, "b": 1}]).status_code == 500
        assert "within 3 s" in httpx.post(f"{url}/predict", json=[{"a": 4, "b": 1}], timeout=20).json()["message"]
        host, _, port = url.removeprefix("http://").partition(":")
        body = json.dumps([{"a": 1.5, "b": 1}]).encode()
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            connection.sendall(head.encode() + body)
            while not httpx.get(f"{url}/health").is_success:  # answered after the request above has been read
                pass
            process.send_signal(signal.SIGTERM)
            answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        assert b'[{"prediction": 2.5}]' in answer
        assert process.wait(20) == 0


def test_a_model_that_is_not_trusted(tmp_path: Path, model: tuple[tr.Model, Path]) -> None:
    rows = pd.DataFrame({"a": [0.0], "b": [1.0]})
    tr.Model(Slow(), example=rows).save(str(tmp_path / "slow"))
    code = "from tritium.cli import main; main()"
    for arguments, text in (
        ([str(tmp_path / "slow")], "UntrustedModel"),
        ([str(tmp_path / "none")], "ModelError"),
        ([str(model[1]), "--trusted", "true", "--device", "tpu"], "BadSetting"),
        ([str(model[1]), "--trusted", "true", "--batch-size", "0"], "BadSetting"),
    ):
        ended = subprocess.run(
            [sys.executable, "-c", code, "serve", *arguments], capture_output=True, text=True, check=False
        )
        assert ended.returncode == 1
        assert text in ended.stderr
