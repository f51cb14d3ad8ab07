"""From Kafka append to Kafka append: a model in a streaming query, beside the same query with nothing in its place.

    .venv/bin/python benchmarks/stream.py [--rate 2000] [--seconds 40] [--rounds 3] [--only NAME …] [--save]

A real broker; a producer that writes `--rate` events a second (JSON of 64 features); a query that parses, scores by an
MLP 64-256-256-1 and writes, `local[2]`, one micro-batch after the other. The broker stamps what it appends, in both
topics, so that latency is by one clock. The first events, and five seconds of the others, warm up. Printed:
milliseconds at the 50th and 99th percentile and events a second. Floors are the same query with a constant in the
model's place, and with an Arrow UDF there that returns zeros: what Spark takes for any function in Python. `--save`
writes benchmarks/results/stream.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from functools import partial
from typing import Any

import _suite

sys.path.insert(0, str(_suite.ROOT / "tests"))  # the broker of the tests is a real one

MODELS = {"nothing": "nothing", "no-op UDF": "zeros", "Tritium": "tritium", "predict_batch_udf": "batch_udf"}
WARM = 5  # seconds of events that are not counted


def one(model: str, rate: int, seconds: int) -> dict[str, Any]:
    """A broker, a query and a producer of its own."""
    from broker import broker, jars

    python = _suite.python_of("kafka")

    def events(*words: object) -> dict[str, Any]:
        command = [python, str(_suite.SYSTEMS / "streaming_events.py"), address, *map(str, words)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"streaming_events.py {words[0]} ended with {done.returncode}")
        return json.loads(done.stdout.splitlines()[-1])

    with tempfile.TemporaryDirectory(prefix="tritium-bench-") as folder, broker() as address:
        events("topics")
        command = [
            sys.executable,
            str(_suite.SYSTEMS / "stream_query.py"),
            address,
            str(jars("connector")),
            folder,
            model,
        ]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as query:
            assert query.stdin
            assert query.stdout
            try:
                first = events("produce", rate, 2, 0)["sent"]
                if query.stdout.readline() != "ready\n":
                    raise RuntimeError(f"the query with {model} did not start")
                sent = first + events("produce", rate, seconds, first)["sent"]
                found = events("measure", sent, first + rate * WARM)
            finally:
                query.stdin.close()
                query.wait(60)
    return found


def main() -> int:
    parser = _suite.arguments(__doc__, MODELS, rounds=3)
    parser.add_argument("--rate", type=int, default=2000)
    parser.add_argument("--seconds", type=int, default=40)
    options = parser.parse_args()
    sides = {name: partial(one, MODELS[name], options.rate, options.seconds) for name in options.only}
    found = _suite.in_turn(sides, dict.fromkeys(sides, options.rounds))
    floor = _suite.median(found.get("nothing", []), "p99 ms")
    print(f"\n{'model':<20}{'p50 ms':>9}{'p99 ms':>9}{'x floor':>9}{'events/s':>10}")
    for name, runs in found.items():
        p50, p99, rate = (_suite.median(runs, key) for key in ("p50 ms", "p99 ms", "events/s"))
        if p50 is None or p99 is None:
            print(f"{name:<20}  failed")
        else:
            print(f"{name:<20}{p50:>9.0f}{p99:>9.0f}{p99 / (floor or p99):>9.2f}{rate:>10,.0f}")
    if options.save:
        _suite.save("stream", {"rate": options.rate, "systems": found})
    return _suite.failed(found)


if __name__ == "__main__":
    sys.exit(main())
