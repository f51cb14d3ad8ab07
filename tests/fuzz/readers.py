"""Four readers of what others wrote: bytes of the real writer, damaged, and what the reader may make of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import struct
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

import tritium as tr
from tritium.checkpoint.format import Loaded, _digest, own
from tritium.checkpoint.state import Snapshot
from tritium.checkpoint.store import Store
from tritium.data.schema import Field
from tritium.data.spool import Ragged, RaggedView, Spool, SpoolReader
from tritium.errors import DataError, ModelError, TritiumError, WireError
from tritium.model.engines.function import Functions
from tritium.model.signature import Input, Output, Signature
from tritium.wire import Challenge, Codec, Message
from wire_messages import MESSAGES

from .damages import damaged, damaged_json, watched

Case = Callable[[random.Random], None]
"""One damage, and one reading. Raises the reader's documented error, or AssertionError for other content."""

KEY = b"k" * 32


@contextlib.contextmanager
def wire(folder: Path) -> Iterator[Case]:
    """Yield cases of frames: with codes nothing arrives that was not sent, without them nothing that is no message."""

    def case(chance: random.Random) -> None:
        if chance.random() < 0.1:
            Challenge(KEY).answer(chance.randbytes(chance.randrange(2 * Challenge.size)))
            raise AssertionError("a client without the secret")
        key = chance.choice([KEY, None])
        sent = chance.sample(MESSAGES, chance.randint(1, 3))
        whole = b"".join(part for codec in [Codec(key, b"c")] for m in sent for part in codec.encode(m))
        data = damaged(whole, chance)
        if key is None and chance.random() < 0.5:
            header = damaged_json(json.dumps({"kind": sent[0].kind, **sent[0].fields}).encode(), chance)
            data = struct.pack("!II", len(header), len(sent[0].blob)) + header + sent[0].blob
        codec, at = Codec(key, b"c"), 0
        received: list[Message] = []
        try:
            while at < len(data):  # As a network cuts it.
                size = chance.randint(1, len(data))
                received += codec.feed(data[at : at + size])
                at += size
            for message in received:
                assert isinstance(message.kind, str)
                if "lengths" in message.fields:
                    assert sum(map(len, message.parts())) <= len(message.blob)
        finally:
            if key is not None:
                assert received == sent[: len(received)], "messages that were not sent"
                assert len(received) < len(sent) or data.startswith(whole), "a frame arrived that was damaged"

    yield case


@contextlib.contextmanager
def checkpoint(folder: Path) -> Iterator[Case]:
    """Yield cases of two checkpoints, the newer one damaged: it is loaded as it was saved, or the older one is.

    Where the checksums were made to fit the damage, it may hold something else; no case ends by an error.
    """
    store = Store(str(folder / "run"))
    for step in (1, 2):
        name, sums = store.prepare(step), {}
        optimizer = {"state": {0: {"step": torch.tensor(float(step)), "m": torch.ones(2)}}, "groups": [(1, None)]}
        state = {
            **{"weight": torch.nn.Parameter(torch.full((5, 2), float(step))), "optimizer": optimizer, "step": step},
            **{"lr": float("inf"), "big": 1 << 70, "rate": np.float32(0.5), "rows": np.arange(step), "text": "x"},
        }
        sums.update(store.write(name, "replicated", Snapshot().take(state, "state")))
        for rank in range(2):
            sums.update(store.write(name, own(rank), Snapshot().take({"rank": rank, "at": np.arange(step)}, "own")))
        store.commit(name, 2, sums)
    whole = {path: path.read_bytes() for path in (folder / "run" / "checkpoints" / name).iterdir()}
    manifest = next(path for path in whole if path.name == "manifest.json")
    texts = [content(store.load(name)) for name in store.names()]

    def case(chance: random.Random) -> None:
        path, fits = chance.choice(list(whole)), chance.random() < 0.6
        data = reshaped(path.name, whole[path], chance) if fits else damaged(whole[path], chance)
        try:
            renew(path, data)
            if fits:
                renew(manifest, fitting(data, path.name, whole[manifest]))
            loaded, reasons = Store(str(folder / "run")).newest()
            assert loaded is not None
            assert fits or content(loaded) in texts, "other content"
            assert bool(reasons) == (loaded.step != 2 or loaded.path.endswith("1"))
            store.outline(loaded.path.rpartition("/")[2])
        finally:
            for file in (path, manifest):
                renew(file, whole[file])
        if reasons:
            raise DataError(reasons[0])

    yield case


def renew(file: Path, data: bytes) -> None:
    """Write a file anew: one that is truncated instead is written to the disk at once, by ext4."""
    file.unlink()
    file.write_bytes(data)


def fitting(data: bytes, name: str, manifest: bytes) -> bytes:
    """Return a checkpoint's manifest whose checksums fit this file, which may be the manifest itself."""
    if name == "manifest.json":
        with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):  # no object, and no checksum
            body = json.loads(data)
            return json.dumps({**body, "sha256": _digest(body)}).encode()
        return data
    body = json.loads(manifest)
    body["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    return json.dumps({**body, "sha256": _digest(body)}).encode()


def reshaped(name: str, data: bytes, chance: random.Random) -> bytes:
    """Return a file with other JSON in it: itself, or the header of a safetensors file."""
    if name.endswith(".json"):
        return damaged_json(data, chance) if chance.random() < 0.9 else damaged(data, chance)
    if not name.endswith(".safetensors") or chance.random() < 0.2:
        return damaged(data, chance)
    size = int.from_bytes(data[:8], "little")
    header = damaged_json(data[8 : 8 + size], chance)
    return len(header).to_bytes(8, "little") + header + data[8 + size :]


def content(loaded: Loaded) -> str:
    """Return all that a checkpoint holds as text."""
    return repr([loaded, loaded.own, loaded.step, loaded.size])


FIELDS = [
    Field(name=name, sources=(name,), kind=kind, dtype=dtype, shape=shape, nulls=("mask",) if name == "y" else (None,))  # type: ignore[arg-type]
    for name, kind, dtype, shape in [
        ("x", "fixed", "float32", (3,)),
        ("y", "fixed", "int64", ()),
        ("r", "bytes", "float64", None),
        ("b", "bytes", "uint8", None),
    ]
]


@contextlib.contextmanager
def spool(folder: Path) -> Iterator[Case]:
    """Yield cases of a spool: its files hold other bytes, or its description other JSON. It has no checksums."""
    rows = 20
    ids, lengths = np.arange(rows), np.arange(rows) % 4
    columns: dict[str, Any] = {
        **{"x": np.ones((rows, 3), "f4"), "y": ids * 10, "y_mask": ids % 2 == 0},
        "r": Ragged(np.ones(lengths.sum()), lengths),
        "b": Ragged(np.ones(lengths.sum(), np.uint8), lengths),
    }

    def case(chance: random.Random) -> None:
        written = Spool(FIELDS, str(folder))
        try:
            written.append(ids, columns)
            count, description = written.commit(), json.dumps(written.describe()).encode()
            if chance.random() < 0.5:
                description = damaged_json(description, chance)
            else:
                fd = chance.choice(written.fds)
                data = damaged(os.pread(fd, 1 << 20, 0), chance)
                os.ftruncate(fd, len(data))
                os.pwrite(fd, data, 0)
            if chance.random() < 0.1:
                count = chance.choice([0, 1, rows + 1, 10**6, 10**15, 2**62])
            try:
                parsed = json.loads(description)
            except (ValueError, RecursionError) as error:
                raise DataError("no JSON") from error  # which is the wire's
            reader = SpoolReader(parsed, count)
            assert reader.ids.dtype == np.int64
            assert len(reader.ids) == count
            assert reader.row_bytes >= 0
            for name in reader.names:
                column = reader.column(name)
                assert len(column) == count
                if isinstance(column, RaggedView):
                    assert len(column.take(np.arange(count)).rows()) == count
                else:
                    column[-1:].tobytes()
            reader.close()
        finally:
            written.close()

    yield case


ROWS = pd.DataFrame({"a": [1.0, 2.0], "b": [0.5, 0.25], "word": ["x", "y"], "text": ["abc", "z"]})
AB = Signature((Input("x", ("a", "b"), "float32", (2,)),), (Output("prediction", "float64"),))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(3, 2), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor, word: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.last(torch.cat([x, self.words(word), text], 1))


class Two(nn.Sequential):
    """A module that a saved model names as its origin."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(2, 1), nn.Flatten(0))


def of_torch() -> tr.Model:
    """Return a model with all that a manifest and a signature can hold, by value."""

    def train() -> Any:
        return tr.Model(
            Net(),
            example=tr.world().shard("train"),
            task="classification",
            transform=lambda inputs: inputs,
            label_words={"y": ["no", "yes"]},
            history=[{"loss": 1.0}],
            inputs=["x", "word", "text"],
        )

    data = tr.Data(
        ROWS,
        columns={"x": ["a", "b"], "word": "word", "text": "text"},
        vocabulary={"word": ["x", "y"]},
        nulls={"a": 1.0},
        unknown_words="keep",
        decode={"text": lambda text: np.float32([len(text)])},
    )
    (model,) = tr.launch(train, on="here", data={"train": data}, progress=False, output="none")
    return model


def models() -> dict[str, tr.Model]:
    """Return a model by value, one of a state, one of a class, and one of torch's own, which needs no trust."""
    functions = Functions({"weights": np.arange(2.0)}, lambda state, batch: batch["x"] @ state["weights"])
    own = Signature(AB.inputs, (Output("y", shape=(2,)),))
    return {
        "torch": of_torch(),
        "function": tr.Model(functions, AB, engine="function"),
        "class": tr.Model(Two(), AB, origin=Two, seed=3),
        "own": tr.Model(nn.Identity(), own, origin=nn.Identity),
    }


@contextlib.contextmanager
def model(folder: Path) -> Iterator[Case]:
    """Yield cases of saved models: files that do not fit their checksums are refused; no code runs without trust."""
    saved = folder / "saved"
    before = {}
    for name, one in models().items():
        one.save(str(saved / name))
        before[name] = predicted(one)

    def case(chance: random.Random) -> None:
        name, trusted = chance.choice(list(before)), chance.choice([True, False])
        place = folder / f"{chance.random()}"
        shutil.copytree(saved / name, place)
        path, fits = chance.choice(sorted(place.iterdir())), chance.random() < 0.7
        fits &= not (trusted and path.suffix == ".pkl")  # A pickle that somebody trusts may do anything.
        data = reshaped(path.name, path.read_bytes(), chance) if fits else damaged(path.read_bytes(), chance)
        fits |= path.name == "manifest.json"  # It has no checksum itself.
        try:
            path.write_bytes(data)
            if fits and path.name != "manifest.json":
                manifest = json.loads((place / "manifest.json").read_text())
                manifest["files"][path.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
                (place / "manifest.json").write_text(json.dumps(manifest))
            if not trusted:
                with watched():
                    loaded = tr.load(str(place))
            else:
                loaded = tr.load(str(place), trusted=True)
            if fits:
                try:
                    loaded.predict(ROWS)
                except TritiumError:
                    return
                except Exception as error:
                    if not any(frame.name == "call" for frame in traceback.extract_tb(error.__traceback__)):
                        raise  # The module's own is the documented one for rows that it can't take.
            else:
                assert predicted(loaded) == before[name], "other predictions"
        finally:
            shutil.rmtree(place)

    yield case


def predicted(loaded: tr.Model) -> str:
    return repr(loaded.predict(ROWS))


READERS = {
    "wire": (wire, (WireError,)),
    "checkpoint": (checkpoint, (DataError,)),  # by which a case says that the checkpoint was skipped
    "spool": (spool, (DataError,)),
    "model": (model, (ModelError,)),
}
"""Reader → its cases, and the errors that it documents."""
