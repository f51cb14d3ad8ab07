"""What settings of scoring cost: `on_error="column"`, with and without bad rows, and `batch_size="auto"`.

    .venv/bin/python benchmarks/scoring_settings.py [--rows 1000000] [--rounds 7]

The rows and the model of benchmarks/inference.py, `local[2]`, into nothing. All settings are in one session, in turn,
so that what else the machine does falls on all; a ratio is the median of those within a round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "systems"))

import score_batch_udf
import scoring
import work

KINDS: dict[str, dict[str, Any]] = {
    "as it is": {},
    'on_error="column"': {"on_error": "column"},
    'on_error="null"': {"on_error": "null"},
    'batch_size="auto"': {"batch_size": "auto"},
}


def frames_of(frame: Any) -> dict[str, Any]:
    """Return `frame` with the predictions by each setting, and by predict_batch_udf."""
    import tritium as tr
    from tritium.ml import TorchModel
    from tritium.model.signature import Input, Output, Signature

    signature = Signature((Input("x", ("features",), "float32", (work.WIDTH,)),), (Output("y", shape=(1,)),))
    model = tr.Model(scoring.net(), signature)
    scored = {
        name: TorchModel(model, **{"batch_size": scoring.BATCH} | settings).transform(frame)
        for name, settings in KINDS.items()
    }
    return scored | {"predict_batch_udf": score_batch_udf.transform(frame)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    work.prepare()
    spark = work.session()
    with tempfile.TemporaryDirectory(prefix="tritium-bench-") as folder:
        scoring.write(f"{folder}/rows", options.rows, spark)
        frames = frames_of(spark.read.parquet(f"{folder}/rows/array"))
        taken: dict[str, list[float]] = {name: [] for name in frames}
        for number in range(options.rounds + 1):
            for name, scored in frames.items():
                began = time.perf_counter()
                scored.write.format("noop").mode("overwrite").save()
                if number:  # The first round starts workers and imports torch.
                    taken[name].append(time.perf_counter() - began)
    print(f"\n{'setting':<24}{'median s':>10}{'speed of the first':>20}")
    for name, seconds in taken.items():
        ratios = [first / one for first, one in zip(taken["as it is"], seconds, strict=True)]
        print(f"{name:<24}{statistics.median(seconds):>10.2f}{statistics.median(ratios):>18.2f} x")
    return 0


if __name__ == "__main__":
    sys.exit(main())
