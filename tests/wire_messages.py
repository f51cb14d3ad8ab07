"""Messages of a run, for tests of what they are on the wire."""

from __future__ import annotations

from tritium.wire import Message

MESSAGES = [
    Message("hello", {"partition": 3, "host": "b", "gpus": ["0"]}),
    Message("output", {}, b"epoch 1\n" * 40),
    Message("gather", {"number": 0, "operation": "barrier"}),
    Message("result", {"last": True}, bytes(range(256)) * 300),
    Message("gathered", {"lengths": [3, 0, 5]}, b"abcdefgh"),
    Message("log", {"values": {"loss": 0.25}, "step": 7}),
]
