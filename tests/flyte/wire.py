"""What a backend writes for a pod, and what the pod has written: wire.py write FLOW TASK FOLDER …, or read OUT.

Uses what is private in Flyte's SDK, as the backend is not to be had here.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from pathlib import Path

from flyte._internal.runtime import convert
from flyte._internal.runtime.task_serde import translate_task_to_wire
from flyte.models import SerializationContext
from flyteidl2.core import execution_pb2
from flyteidl2.task import common_pb2
from google.protobuf.json_format import MessageToDict


def template(task):
    """Return the template of a task as the backend gets it."""
    context = SerializationContext(
        version="v1", project="p", domain="d", org="o", root_dir=Path(__file__).parent, interpreter_path=sys.executable
    )
    return translate_task_to_wire(task, context).task_template


def write(flow, name, folder, *inputs):
    """Write inputs.pb, and print the pod's command as JSON."""
    module = importlib.import_module(flow)
    task = getattr(module, name)
    values = {key: eval(text, vars(module)) for key, _, text in (pair.partition("=") for pair in inputs)}
    converted = asyncio.run(convert.convert_from_native_to_inputs(task.native_interface, **values))
    Path(folder, "inputs.pb").write_bytes(converted.proto_inputs.SerializeToString())
    place = {
        "{{.input}}": f"{folder}/inputs.pb",
        "{{.outputPrefix}}": f"{folder}/out",
        "{{.rawOutputDataPrefix}}": str(Path(folder).parent / "raw"),
        "{{.checkpointOutputPrefix}}": f"{folder}/ck",
        "{{.prevCheckpointPrefix}}": '""',
        "{{.runName}}": "r1",
        "{{.actionName}}": f"action-{name}",  # one action in all attempts
        "{{.runStartTime}}": "2026-11-22T00:00:00Z",
    }
    kind = template(task)
    main = kind.custom["mainApplicationFile"].removeprefix("local://")
    args = [place.get(text, text) for text in kind.container.args]
    print(json.dumps({"args": args, "conf": dict(kind.custom["sparkConf"]), "main": main}))


def read(out):
    """Print outputs.pb and error.pb as JSON."""
    answer = {"outputs": None, "error": None}
    if (file := Path(out, "outputs.pb")).exists():
        outputs = common_pb2.Outputs.FromString(file.read_bytes())
        answer["outputs"] = {literal.name: MessageToDict(literal.value) for literal in outputs.literals}
    if (file := Path(out, "error.pb")).exists():
        error = execution_pb2.ErrorDocument.FromString(file.read_bytes()).error
        answer["error"] = {
            "kind": execution_pb2.ContainerError.Kind.Name(error.kind),
            "code": error.code,
            "origin": execution_pb2.ExecutionError.ErrorKind.Name(error.origin),
            "message": error.message,
        }
    print(json.dumps(answer))


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](*sys.argv[2:])
