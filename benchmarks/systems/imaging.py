"""What every system reads: JPEGs of 224 × 224 with a label, a binary column in Parquet, as batches of decoded pixels.

`main` is given `read(frame) -> (seconds of the loop, images, sum)`: from the DataFrame in hand, two processes take one
epoch of batches of 64 (uint8, 64 × 224 × 224 × 3), decoded by Pillow in every system. The sum over every image's first
pixel row shows that all have read the same.
"""

from __future__ import annotations

import argparse
import io
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import work

SIZE, BATCH = 224, 64
PER_FILE = 2_500


def decode(body: bytes) -> Any:
    """Pixels, uint8, 224 × 224 × 3."""
    from PIL import Image

    return np.array(Image.open(io.BytesIO(body)))


def write(folder: str, count: int) -> None:
    """Soft colours with some grain: 10 to 20 kB each, as photographs of this size have."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    random = np.random.default_rng(0)
    Path(folder).mkdir(parents=True)
    pool = []
    for _ in range(500):
        soft = Image.fromarray(random.integers(0, 256, (14, 14, 3), dtype=np.uint8)).resize((SIZE, SIZE), Image.BICUBIC)
        grain = random.normal(0, 6, (SIZE, SIZE, 3))
        pixels = np.clip(np.asarray(soft) + grain, 0, 255).astype(np.uint8)
        with io.BytesIO() as file:
            Image.fromarray(pixels).save(file, "jpeg", quality=85)
            pool.append(file.getvalue())
    for start in range(0, count, PER_FILE):
        numbers = np.arange(start, min(start + PER_FILE, count))
        table = pa.table({"image": [pool[number % len(pool)] for number in numbers], "label": numbers % 10})
        pq.write_table(table, f"{folder}/{start:06}.parquet")


def consume(batches: Iterable[Any]) -> tuple[float, int, int]:
    """A rank's loop: seconds, images and the sum of their first rows."""
    began, images, total = time.perf_counter(), 0, 0
    for pixels in batches:
        images += len(pixels)
        total += int(pixels[:, 0].sum())
    return time.perf_counter() - began, images, total


def together(ranks: list[tuple[float, int, int]]) -> tuple[float, int, int]:
    """The slowest rank's seconds; images and sums of all."""
    seconds, images, totals = zip(*ranks, strict=True)
    return max(seconds), sum(images), sum(totals)


def main(read: Callable[[Any], tuple[float, int, int]], *packages: str, **conf: str) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    options = parser.parse_args()
    work.prepare()
    spark = work.session(**conf)
    frame = spark.read.parquet(options.folder)
    read(frame.limit(4 * BATCH))
    began = time.perf_counter()
    loop, images, total = read(frame)
    seconds = time.perf_counter() - began
    found = {"seconds": seconds, "loop": loop, "images": images, "sum": total}
    print(json.dumps({**found, "versions": work.versions("pyspark", "pillow", *packages)}), flush=True)
    return 0


if __name__ == "__main__":  # imaging.py FOLDER IMAGES
    import sys

    write(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({}))
