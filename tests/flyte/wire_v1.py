"""What a backend of Flyte's first version writes for a pod, and what the pod has written.

wire_v1.py write FLOW TASK FOLDER NAME=EXPRESSION …, read OUT, facts, or play EXPRESSION. FLOW is a file.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections import OrderedDict
from pathlib import Path

from flyteidl.core import errors_pb2, execution_pb2, literals_pb2
from flytekit import FlyteContextManager
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.core.type_engine import TypeEngine
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.tools.translator import get_serializable
from google.protobuf.json_format import MessageToDict


def template(task):
    """Return the template of a task as the backend gets it."""
    image = ImageConfig.auto(img_name="registry/image:1")
    settings = SerializationSettings(image, project="p", domain="d", version="v1", python_interpreter=sys.executable)
    return get_serializable(OrderedDict(), settings, task).template.to_flyte_idl()


def loaded(flow):
    """Return the module of a file, by whose name a pod imports it, too."""
    sys.path.insert(0, str(Path(flow).parent))
    return importlib.import_module(Path(flow).stem)


def write(flow, name, folder, *inputs):
    """Write inputs.pb, and print the pod's command and Spark's settings as JSON."""
    module = loaded(flow)
    task = getattr(module, name)
    values = {key: eval(text, vars(module)) for key, _, text in (pair.partition("=") for pair in inputs)}
    kinds = task.python_interface.inputs
    literals = TypeEngine.dict_to_literal_map(FlyteContextManager.current_context(), values, kinds)
    Path(folder, "inputs.pb").write_bytes(literals.to_flyte_idl().SerializeToString())
    place = {
        "{{.input}}": f"{folder}/inputs.pb",
        "{{.outputPrefix}}": f"{folder}/out",
        "{{.rawOutputDataPrefix}}": f"{folder}/raw",
        "{{.checkpointOutputPrefix}}": f"{folder}/ck",
        "{{.prevCheckpointPrefix}}": '""',
    }
    kind = template(task)
    custom = MessageToDict(kind.custom)
    args = [place.get(text, text) for text in kind.container.args]
    print(json.dumps({"args": args, "conf": custom.get("sparkConf"), "main": custom.get("mainApplicationFile")}))


def read(out):
    """Print outputs.pb and error.pb as JSON."""
    answer = {"outputs": None, "error": None}
    if (file := Path(out, "outputs.pb")).exists():
        outputs = literals_pb2.LiteralMap.FromString(file.read_bytes())
        answer["outputs"] = {name: MessageToDict(literal) for name, literal in outputs.literals.items()}
    if (file := Path(out, "error.pb")).exists():
        error = errors_pb2.ErrorDocument.FromString(file.read_bytes()).error
        answer["error"] = {
            "kind": errors_pb2.ContainerError.Kind.Name(error.kind),
            "code": error.code,
            "origin": execution_pb2.ExecutionError.ErrorKind.Name(error.origin),
            "message": error.message,
        }
    print(json.dumps(answer))


def is_tried_again(errors_by_class, error):
    """Return whether a task that raises this error is."""
    try:
        with errors_by_class():
            raise error
    except FlyteRecoverableException:
        return True
    except type(error):
        return False


def facts():
    """Print what a backend gets of the tasks of `basics_v1`, which errors are tried again, what is refused, as JSON."""
    from tritium.errors import BadSetting, RankFailed, Stalled
    from tritium_flyte.v1 import Gang, Spark, errors_by_class

    basics = importlib.import_module("basics_v1")
    tasks = {}
    for name in ("rows", "total", "meets"):
        kind = MessageToDict(template(getattr(basics, name)))
        kind["metadata"]["runtime"].pop("version")
        kind["container"] = [text for text in kind["container"]["args"] if not text.startswith("/")]
        for machine in ("mainApplicationFile", "executorPath"):
            kind["custom"].pop(machine, None)
        tasks[name] = kind
    errors = {
        "lost": RankFailed("text", lost=True),
        "out of memory": RankFailed("text", lost=True, out_of_memory=True),
        "stalled": Stalled("text"),
        "the user's": RankFailed("text"),
        "a setting": BadSetting("text"),
        "value": ValueError("text"),
        "connection": ConnectionResetError("text"),
        "missing": FileNotFoundError("text"),
    }
    again = [name for name, error in errors.items() if is_tried_again(errors_by_class, error)]
    try:
        Gang(ranks=4, spark=Spark(spark_conf={"spark.executor.instances": 3}))
        refused = ""
    except BadSetting as error:
        refused = str(error)
    print(json.dumps({"tasks": tasks, "again": again, "refused": refused, "flyte 2": "flyte" in sys.modules}))


def play(flow, expression):
    """Print what an expression is in a flow's module, whose tasks run in this process."""
    print(f"ANSWER {json.dumps(eval(expression, vars(loaded(flow))))}")


if __name__ == "__main__":
    {f.__name__: f for f in (write, read, facts, play)}[sys.argv[1]](*sys.argv[2:])
