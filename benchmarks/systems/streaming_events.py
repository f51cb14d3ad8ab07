"""Events into a Kafka topic at a steady rate, and how long each took to come out of another one (confluent-kafka).

    streaming_events.py ADDRESS topics                        makes both topics
    streaming_events.py ADDRESS produce RATE SECONDS FIRST    writes RATE events a second, numbered from FIRST on
    streaming_events.py ADDRESS measure EVENTS WARM           reads what came out until all are there

Both topics are stamped by the broker when it appends (LogAppendTime), by one clock. An event that comes out carries the
stamp it went in with, so that the difference is from append to append. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

WIDTH, PARTITIONS, PATIENCE = 64, 2, 60.0


def produce(address: str, rate: int, seconds: int, first: int) -> dict[str, int]:
    """In slices of 10 ms. An event is JSON: its number and 64 features."""
    rows = np.random.default_rng(0).random((1000, WIDTH)).round(4).tolist()
    producer = Producer({"bootstrap.servers": address, "linger.ms": 2})
    began, sent = time.monotonic(), 0
    while sent < rate * seconds:
        for number in range(first + sent, first + min(rate * seconds, int((time.monotonic() - began) * rate))):
            event = json.dumps({"id": number, "features": rows[number % len(rows)]})
            producer.produce("events", event, str(number))
            sent += 1
        producer.poll(0.01)
    producer.flush()
    return {"sent": sent}


def topics(address: str) -> dict[str, int]:
    """Both, empty."""
    admin = AdminClient({"bootstrap.servers": address})
    config = {"message.timestamp.type": "LogAppendTime"}
    wanted = [NewTopic(name, PARTITIONS, 1, config=config) for name in ("events", "scored")]
    for future in admin.create_topics(wanted).values():
        future.result(30)
    return {}


def measure(address: str, events: int, warm: int) -> dict[str, float]:
    """Milliseconds from append to append of all events but the first `warm`."""
    settings = {"bootstrap.servers": address, "group.id": "measure", "auto.offset.reset": "earliest"}
    consumer = Consumer({**settings, "enable.auto.commit": False})
    consumer.subscribe(["scored"])
    latencies, stamps, seen, until = [], [], 0, time.monotonic() + PATIENCE
    while seen < events and time.monotonic() < until:
        for message in consumer.consume(10_000, timeout=1.0):
            if message.error():
                raise RuntimeError(str(message.error()))
            event = json.loads(message.value())
            seen += 1
            if event["id"] >= warm:
                latencies.append(message.timestamp()[1] - event["appended"])
                stamps.append(message.timestamp()[1])
    consumer.close()
    if seen < events:
        raise RuntimeError(f"{seen} of {events} events came out")
    p50, p99 = np.percentile(latencies, [50, 99])
    rate = len(stamps) / max(1e-3, (max(stamps) - min(stamps)) / 1e3)
    return {"seconds": p99 / 1e3, "p50 ms": p50, "p99 ms": p99, "events": len(latencies), "events/s": rate}


if __name__ == "__main__":
    address, step, *numbers = sys.argv[1:]
    steps = {"topics": topics, "produce": produce, "measure": measure}
    print(json.dumps(steps[step](address, *map(int, numbers))), flush=True)
