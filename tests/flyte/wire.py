"""What a backend writes for a pod, and what the pod has written: wire.py write FLOW TASK FOLDER …, or read OUT.

Uses what is private in Flyte's SDK, as the backend is not to be had here.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from pathlib import Path

import flyte
import flyte.errors
import fsspec
from flyte._internal.runtime import convert
from flyte._internal.runtime.task_serde import translate_task_to_wire
from flyte.models import SerializationContext
from flyte.types import TypeEngine
from flyteidl2.core import execution_pb2
from flyteidl2.task import common_pb2
from google.protobuf.json_format import MessageToDict


def template(task):
    """Return the template of a task as the backend gets it."""
    context = SerializationContext(
        version="v1", project="p", domain="d", org="o", root_dir=Path(__file__).parent, interpreter_path=sys.executable
    )
    return translate_task_to_wire(task, context).task_template


def write(flow, name, folder, store, *inputs):
    """Write inputs.pb, and print the pod's command as JSON. `store`: where the pod writes."""
    module = importlib.import_module(flow)
    task = getattr(module, name)
    values = {key: eval(text, vars(module)) for key, _, text in (pair.partition("=") for pair in inputs)}
    converted = asyncio.run(convert.convert_from_native_to_inputs(task.native_interface, **values))
    Path(folder, "inputs.pb").write_bytes(converted.proto_inputs.SerializeToString())
    place = {
        "{{.input}}": f"{folder}/inputs.pb",
        "{{.outputPrefix}}": f"{store}/{Path(folder).name}/out",
        "{{.rawOutputDataPrefix}}": f"{store}/raw",
        "{{.checkpointOutputPrefix}}": f"{store}/ck",
        "{{.prevCheckpointPrefix}}": '""',
        "{{.runName}}": "r1",
        "{{.actionName}}": f"{name}-{'nested-' * 11}",  # one in all attempts, longer than Kubernetes takes
        "{{.runStartTime}}": "2026-11-22T00:00:00Z",
    }
    kind = template(task)
    main = kind.custom["mainApplicationFile"].removeprefix("local://")
    args = [place.get(text, text) for text in kind.container.args]
    print(json.dumps({"args": args, "conf": dict(kind.custom["sparkConf"]), "main": main}))


def read(out):
    """Print outputs.pb, error.pb and report.html as JSON."""
    answer = {"outputs": None, "error": None, "report": ""}
    files, folder = fsspec.core.url_to_fs(out)
    if files.exists(file := f"{folder}/report.html"):
        answer["report"] = files.cat_file(file).decode()
    if files.exists(file := f"{folder}/outputs.pb"):
        outputs = common_pb2.Outputs.FromString(files.cat_file(file))
        answer["outputs"] = {literal.name: MessageToDict(literal.value) for literal in outputs.literals}
    if files.exists(file := f"{folder}/error.pb"):
        error = execution_pb2.ErrorDocument.FromString(files.cat_file(file)).error
        answer["error"] = {
            "kind": execution_pb2.ContainerError.Kind.Name(error.kind),
            "code": error.code,
            "origin": execution_pb2.ExecutionError.ErrorKind.Name(error.origin),
            "message": error.message,
        }
    print(json.dumps(answer))


def fates():
    """Print, of every error of Tritium's and of some others, what error.pb would say of it: kind, code, origin."""
    import tritium.errors
    from tritium_flyte.driver.outcomes import in_flytes_terms
    from tritium_flyte.tables import TableGone

    classes = [value for value in vars(tritium.errors).values() if isinstance(value, type)]
    errors = {c.__name__: c("text") for c in classes if issubclass(c, tritium.errors.TritiumError)}
    errors |= {c.__name__: c("text") for c in (TableGone, ValueError, KeyError, FileNotFoundError, PermissionError)}
    errors |= {c.__name__: c("text") for c in (ConnectionResetError, TimeoutError, MemoryError)}
    errors["lost RankFailed"] = tritium.errors.RankFailed("text", lost=True)
    errors["lost JobFailed"] = tritium.errors.JobFailed("text", lost=True)
    errors["JobFailed without JVM"] = tritium.errors.JobFailed("text", jvm_gone=True)
    errors["RankFailed out of memory"] = tritium.errors.RankFailed("text", lost=True, out_of_memory=True)
    errors["RankFailed of a KeyError"] = tritium.errors.RankFailed("text")
    errors["RankFailed of a KeyError"].__cause__ = KeyError("k")
    errors["Flyte's own"] = flyte.errors.RuntimeSystemError("Theirs", "text")
    fates = {name: _fate(in_flytes_terms(error)) for name, error in errors.items()}
    raised = in_flytes_terms(errors["RankFailed out of memory"], raises_memory=True)
    fates["RankFailed out of memory, on_oom"] = _fate(raised)
    print(json.dumps(fates))


def _fate(error):
    """Return whether it is tried again, the code, and the class that the calling task catches."""
    converted = convert.convert_from_native_to_error(error)
    return [converted.recoverable, converted.err.code, type(convert.convert_error_to_native(converted)).__name__]


def golden():
    """Print what a backend gets of the tasks of `basics` and of values, as JSON."""
    import basics

    from tritium.flyte import SavedModel, Table

    tasks = {}
    for name in ("rows", "total", "loads"):
        kind = MessageToDict(template(getattr(basics, name)))
        kind["custom"].pop("mainApplicationFile"), kind["custom"].pop("executorPath")
        kind.pop("container")
        kind["metadata"].pop("discoveryVersion", None), kind["metadata"].get("runtime", {}).pop("version", None)
        tasks[name] = kind
    values = {
        "parquet": (Table("s3://bucket/rows", hash="abc"), Table),
        "delta": (Table("s3://bucket/rows", "delta", 7, "delta:7:abc"), Table),
        "model": (SavedModel(path="s3://bucket/model", name="model", format="tritium", hash="def"), SavedModel),
    }
    literals = {}
    for name, (value, kind) in values.items():
        literal = asyncio.run(TypeEngine.to_literal(value, kind, TypeEngine.to_literal_type(kind)))
        back = asyncio.run(TypeEngine.to_python_value(literal, kind))
        assert (back, getattr(back, "hash", "")) == (value, value.hash)
        literals[name] = MessageToDict(literal)
    print(json.dumps({"tasks": tasks, "literals": literals}))


def configured(*codes):
    """Print what becomes of each expression of a configuration: the text of its error, or Spark's settings."""
    from tritium.errors import BadSetting
    from tritium.flyte import Gang, Spark

    answers = []
    for code in codes:
        try:
            answers.append(eval(code, {"Gang": Gang, "Spark": Spark}).spark_conf)
        except BadSetting as error:
            answers.append(str(error))
    print(json.dumps(answers))


def versions(*codes):
    """Print the version of a function's cached results with each configuration, as a backend gets it."""
    from tritium.flyte import Gang, Spark, cache

    def identity(x: int) -> int:
        return x

    answers = []
    for code in codes:
        config = eval(code, {"Gang": Gang, "Spark": Spark})
        task = flyte.TaskEnvironment("versions", plugin_config=config, cache=cache()).task(identity)
        answers.append(template(task).metadata.discovery_version)
    print(json.dumps(answers))


def after_oom(url):
    """Print the memory of the first three attempts, each of which runs out of it."""
    from tritium_flyte.driver import memory

    count, answers = memory.Count(url), []
    for _ in range(3):
        conf = {"spark.executor.memory": "4g", "spark.executor.memoryOverhead": "512"}
        answers.append(memory.raised(dict.fromkeys(conf, 1.5), conf, count.read()))
        count.add()
    print(json.dumps(answers))


if __name__ == "__main__":
    {f.__name__: f for f in (write, read, fates, golden, configured, versions, after_oom)}[sys.argv[1]](*sys.argv[2:])
