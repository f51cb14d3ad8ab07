"""What both sides of real_tables.py read and train: rows with a word, a number with nulls, and a JPEG."""

from __future__ import annotations

import argparse
import io
import json
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import work

WORDS, SIZE, POOL = 1000, 48, 200


def decode(body: bytes) -> Any:
    """Pixels in [0, 1], float32, 3 × 48 × 48."""
    from PIL import Image

    return np.array(Image.open(io.BytesIO(body)), dtype="float32").transpose(2, 0, 1) / 255


def write(folder: str, rows: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    random = np.random.default_rng(0)
    pool = []
    for _ in range(POOL):
        with io.BytesIO() as file:
            soft = Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize((SIZE, SIZE))
            soft.save(file, "jpeg")
            pool.append(file.getvalue())
    for part in range(8):
        ids = np.arange(part, rows, 8)
        number = np.where(ids % 10 == 0, None, random.random(len(ids)).astype("float32"))
        word = ids * 7 % WORDS
        label = np.where(ids % 10 == 0, 0.0, number.astype("float64", copy=True)) + word / WORDS
        columns = {
            "word": [f"word {each}" for each in word],
            "number": pa.array(list(number), pa.float32()),
            "image": [pool[each % POOL] for each in ids],
            "y": label.astype("float32"),
        }
        pq.write_table(pa.table(columns), f"{folder}/{part}.parquet")


def make_net(words: int = WORDS) -> Any:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(words, 8)
            self.image = torch.nn.Sequential(
                torch.nn.Conv2d(3, 8, 3, stride=2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten()
            )
            self.out = torch.nn.Linear(8 + 32 + 1, 1)

        def forward(self, word: Any, number: Any, image: Any) -> Any:
            image = image.reshape(-1, 3, SIZE, SIZE)
            return self.out(torch.cat([self.words(word.reshape(-1)), self.image(image), number], 1))

    return Net()


def settings(epochs: int) -> dict[str, Any]:
    import torch

    return {
        "loss": torch.nn.MSELoss(),
        "optimizer": lambda parameters: torch.optim.Adam(parameters, work.RATE),
        "label_cols": ["y"],
        "batch_size": 256,
        "epochs": epochs,
        "ranks": work.RANKS,
        "progress": False,
        "verbose": False,
    }


def main(fit: Callable[[Any, int], Any]) -> int:
    """Run one side once and print what was measured as one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    work.prepare()
    spark = work.session()
    with tempfile.TemporaryDirectory(prefix="tables-") as folder:
        write(folder, options.rows)
        frame = spark.read.parquet(folder)
        fit(frame.limit(2000), 1)
        began = time.perf_counter()
        model = fit(frame, options.epochs)
        seconds = time.perf_counter() - began
    spark.stop()
    versions = work.versions("pyspark", "torch", "pillow")
    print(json.dumps({"seconds": seconds, "loss": model.history[-1]["loss"], "versions": versions}), flush=True)
    return 0
