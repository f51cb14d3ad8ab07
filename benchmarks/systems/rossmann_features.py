"""Writes what rossmann.py's systems train on, by examples/rossmann: CSV files, then their features in Parquet."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import work

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "rossmann"


def main() -> int:
    """Print the rows and the seconds as one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--stores", type=int, required=True)
    options = parser.parse_args()
    sys.path.insert(0, str(EXAMPLE))
    import features
    import generate

    rows = generate.write(f"{options.folder}/csv", stores=options.stores)
    work.prepare()
    spark = work.session()
    began = time.perf_counter()
    made = features.indexed(features.prepare(spark, f"{options.folder}/csv"))
    made.train.drop("Date").write.parquet(f"{options.folder}/train")
    seconds = time.perf_counter() - began
    assert made.vocabulary is not None
    facts = {
        "max_sales": made.max_sales,
        "words": {name: len(words) for name, words in made.vocabulary.items()},
        "continuous": features.CONTINUOUS,
    }
    Path(options.folder, "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    parts = {str(row["Validation"]).lower(): row["count"] for row in made.train.groupBy("Validation").count().collect()}
    spark.stop()
    print(json.dumps({"seconds": seconds, "read": rows, "trained": parts["false"], "validated": parts["true"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
