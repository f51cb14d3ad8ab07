"""What a message or a page tells the user to write exists: settings, functions, variables, extras, commands.

A fragment that is not found here is a mistake in the message, or goes into one of the tables below with the reason.
"""

from __future__ import annotations

import ast
import pickle
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest

import advice
import tritium as tr
from tritium import errors

# Settings of other libraries' functions: whose they are, which is checked.
OTHERS: dict[str, str] = {
    "comm": "tritium.compat.horovod.torch.init",
    "gpu_resource_name": "tritium.compat.MirroredStrategyRunner",
    "use_gpu": "tritium.compat.MirroredStrategyRunner",
    "driver_log_verbosity": "tritium.compat.HorovodRunner",
    "num_processes": "tritium.compat.TorchDistributor",
    "root_rank": "tritium.compat.horovod.torch.broadcast",
    "splits": "tritium.compat.horovod.torch.alltoall",
    "op": "tritium.compat.horovod.torch.allreduce",
    "lr": "torch.optim.Adam",
    "reduction": "torch.nn.MSELoss",
    "persistent": "torch.nn.Module.register_buffer",
    "sparse": "torch.nn.Embedding",
    "subset": "pyspark.sql.DataFrame.dropna",
    "total_steps": "torch.optim.lr_scheduler.OneCycleLR",
    "useArrow": "pyspark.sql.functions.udf",
    "pyfile": "pyspark.sql.SparkSession.addArtifacts",
    "barrier": "pyspark.sql.DataFrame.mapInArrow",
    "realTime": "pyspark.sql.streaming.DataStreamWriter.trigger",
    "parallelism": "pyspark.ml.tuning.CrossValidator",
    "num_workers": "torch.utils.data.DataLoader",
    "numFeatures": "pyspark.ml.feature.HashingTF",
    "vocabSize": "pyspark.ml.feature.CountVectorizer",
    "rawPredictionCol": "pyspark.ml.evaluation.BinaryClassificationEvaluator",
}

# What is no advice about Python or Spark, or a name that the text itself explains.
REASONS: dict[str, str] = {
    "overwrite_cache": "a setting of a run on a backend of Flyte's",
    "env_vars": "of flyte.TaskEnvironment",
    "FLYTE_AWS_ENDPOINT": "of Flyte",
    "AWS_ACCESS_KEY_ID": "of Amazon's SDKs, s3fs and obstore",
    "AWS_SECRET_ACCESS_KEY": "of Amazon's SDKs, s3fs and obstore",
    "AWS_ENDPOINT_URL": "of Amazon's SDKs, s3fs and obstore",
    "AWS_ALLOW_HTTP": "of obstore",
    "TaskEnvironment": "of flyte",
    "NonRecoverableError": "of flyte.errors",
    "FlyteRecoverableException": "of flytekit.exceptions.user",
    "IgnoreOutputs": "of flytekit.core.base_task",
    "MPI4PY_LIBMPI": "of mpi4py",
    "ChildFailedError": "of torch.distributed.elastic",
    "allow_retries": "of Dagster's Failure",
    "Failure": "of Dagster",
    "AirflowFailException": "of Airflow",
    "OutOfMemoryError": "of Java",
    "MetricCollection": "of torchmetrics, which need not be there",
    "PowerSGDState": "of torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    "GradScaler": "of torch.amp",
    "report_to": "of transformers.TrainingArguments",
    "MLFlowLogger": "of Lightning",
    "WandbLogger": "of Lightning",
    "wandb.finish": "of W&B",
    "wandb.init": "of W&B",
    "wandb.log": "of W&B",
    "tritium.run": "a tag of MLflow's runs",
    "tritium.run_dir": "a tag of MLflow's runs",
    "BatchNorm": "a kind of layer, of several classes",
    "between": "a method of a column, Spark's and pandas': followed in test_advice_works.py and test_advice_spark.py",
    "try_cast": "a method of a column of Spark's",
    "openjdk": "a package of conda, with its version",
    "define": "of the program of processes that a rank spawns",
    "Batch": "how a batch prints itself",
    "GlobalBatch": "how a batch of JAX prints itself",
    "jax.devices": "of JAX, which stays in a process that imports it",
    "sample_weight": "of Shard.keras, which hands it on",
    "steps_per_epoch": "of Keras's fit",
    "jit_compile": "of Keras's compile",
    "model.fit": "of Keras",
    "BackupAndRestore": "a callback of Keras",
    "TensorBoard": "a callback of Keras",
    "RemoteMonitor": "a callback of Keras",
    "from_logits": "of Keras's losses",
    "ignore_class": "of Keras's losses",
    "StringLookup": "a layer of Keras",
    "train": "of LightGBM",
    "lightgbm.train": "of LightGBM",
    "lightgbm.reset_parameter": "of LightGBM",
    "CallbackEnv": "of LightGBM",
    "EarlyStopException": "of LightGBM",
    "LGBMClassifier": "of LightGBM",
    "construct": "a method of LightGBM's Dataset",
    "num_data": "a method of LightGBM's Dataset",
    "hvd.init": "of Horovod",
    "hvd.start_timeline": "of Horovod, which the message is about",
    "hvd.rank": "of Horovod",
    "horovod.run": "of Horovod, which the page is about",
    "horovod.spark.run_elastic": "of Horovod, which the page is about",
    "TorchDistributor": "of pyspark, which the page is about",
    "_train_on_dataframe": "a private method of pyspark's, to compare with",
    "ProcessSet": "how a process set of Horovod's prints itself",
    "process_set_id": "how a process set of Horovod's prints itself",
    "process_set.included": "a method of Horovod's process sets",
    "synchronize": "of Horovod",
    "loss.backward": "of torch",
    "optimizer.synchronize": "of Horovod's DistributedOptimizer",
    "optimizer.skip_synchronize": "of Horovod's DistributedOptimizer",
    "hvd.size": "of Horovod",
    "hvd.shutdown": "of Horovod",
    "hvd.local_rank": "of Horovod",
    "DistributedOptimizer": "of Horovod",
    "np": "of HorovodRunner, to compare with",
    "num_proc": "of horovod.spark.run, to compare with",
    "HorovodRunner": "of sparkdl, to compare with",
    "horovod.spark.run": "of Horovod, to compare with",
    "InitializeForProcessSet": "a function of Horovod's C++, which its page explains",
    "HorovodInternalError": "an exception of Horovod, which is recognized",
    "LightGBM": "a library",
    "LightGBMError": "an exception of LightGBM, which is recognized",
    "TensorFlow": "a library",
    "UnavailableError": "an exception of TensorFlow, which is recognized",
    "AbortedError": "an exception of TensorFlow, which is recognized",
    "CancelledError": "an exception of TensorFlow, which is recognized",
    "InternalError": "an exception of TensorFlow, which is recognized",
    "Dist": "a sentence of torch.distributed, which is recognized",
    "nccl": "a sentence of NCCL, which is recognized",
    "main": "the program that a rank is started with",
    "token": "a parameter of a URL",
    "fn": "the user's function",
    "forward": "a method of the user's module",
    "output.unsqueeze": "a method of the user's tensor",
    "scored.where": "a DataFrame of the page",
    "SparkSession.builder.config": "of pyspark, which this process need not import",
    "to_spark": "a method of pandas-on-Spark, which this process need not have",
    "overwrite": "a method of Spark ML's writer",
    "cancelAllJobs": "a method of Spark's context",
    "init_process_group": "of torch.distributed",
    "MPI_Abort": "of MPI",
    "PR_SET_PDEATHSIG": "of Linux (prctl)",
    "your_loss": "the user's function",
    "net": "the user's module",
    "register_buffer": "a method of the user's module",
    "layer.requires_grad_": "a method of the user's module",
    "module.loss": "a method of the user's module",
    "sig": "a part of an address",
    "FetchFailed": "a word of Spark's scheduler, which is recognized",
    "DIVIDE_BY_ZERO": "one of Spark's error conditions",
    "CAST_INVALID_INPUT": "one of Spark's error conditions",
    "s": "the end of a pattern",
    "PYTHON_VERSION_MISMATCH": "one of Spark's error conditions, which is recognized",
    "FileScan": "a node of Spark's plans",
    "BatchScan": "a node of Spark's plans",
    "ResultStage": "a word of Spark's scheduler, which is recognized",
    "TaskKilled": "a word of Spark's scheduler, which is recognized",
    "TaskResultLost": "a word of Spark's scheduler, which is recognized",
    "UnknownReason": "a word of Spark's scheduler, which is recognized",
    "NetworkPolicies": "of Kubernetes",
    "NaN": "a number",
    "TiB": "a unit",
    "HashingTF": "a class of pyspark.ml.feature",
    "CountVectorizer": "a class of pyspark.ml.feature",
    "NumPy": "a library",
    "OpenMP": "a library",
    "DataFrames": "several of them",
    "UnhandledCuda": "a word of NCCL, which is recognized",
    "ExecutorLostFailure": "a word of Spark's scheduler, which is recognized",
    "ArrowEvalPython": "a node of Spark's plans",
    "dataloader_num_workers": "a setting of transformers.TrainingArguments",
    "use_cpu": "a setting of transformers.TrainingArguments",
    "devices": "a setting of Lightning's Trainer",
    "num_nodes": "a setting of Lightning's Trainer",
    "strategy": "a setting of Lightning's Trainer",
    "plugins": "a setting of Lightning's Trainer",
    "LightningEnvironment": "of lightning.pytorch.plugins.environments",
    "accelerator": "a setting of Lightning's Trainer",
    "enable_progress_bar": "a setting of Lightning's Trainer",
    "ckpt_path": "a setting of Lightning's Trainer.fit",
    "Trainer": "of lightning, and of transformers",
    "accumulate_grad_batches": "a setting of Lightning's Trainer",
    "LightningModule": "of lightning",
    "LeafSpec": "of torch, in a warning that is left out",
    "lightning.LightningModule": "of lightning",
    "DDPStrategy": "of lightning.pytorch.strategies",
    "LearningRateMonitor": "a callback of Lightning",
    "StochasticWeightAveraging": "a callback of Lightning",
    "ReduceLROnPlateau": "of torch and of Keras",
    "training_step": "a method of the user's module",
    "validation_step": "a method of the user's module",
    "configure_optimizers": "a method of the user's module",
    "self.log": "a method of the user's module",
    "ModelCheckpoint": "of lightning.pytorch.callbacks",
    "dispatch_batches": "a setting of accelerate.DataLoaderConfiguration",
    "DataLoader": "of torch.utils.data",
    "loader.state_dict": "a method of tritium.data.views.torch.ShardLoader",
    "loader.load_state_dict": "a method of tritium.data.views.torch.ShardLoader",
    "dataset.set_epoch": "a method of tritium.data.views.torch.ShardDataset",
    "state_dict": "a method of the user's module",
    "full_tensor": "a method of torch's DTensor",
    "MultiWorkerMirroredStrategy": "of tf.distribute",
    "ReduceOp": "of tf.distribute",
    "unbatch": "a method of tf.data.Dataset",
    "batch": "a method of tf.data.Dataset",
    "DeadlineExceeded": "an error of TensorFlow, which is recognized",
    "FailedPrecondition": "an error of TensorFlow, which is recognized",
    "num_slots": "of spark-tensorflow-distributor, to compare with",
    "use_custom_strategy": "of spark-tensorflow-distributor, to compare with",
    "local_mode": "of spark-tensorflow-distributor, to compare with",
    "MirroredStrategyRunner": "of spark-tensorflow-distributor, to compare with",
    "input_mode": "of TensorFlowOnSpark, to compare with",
    "num_ps": "of TensorFlowOnSpark, to compare with",
    "TFCluster.run": "of TensorFlowOnSpark, to compare with",
    "tf_feed.next_batch": "of TensorFlowOnSpark, to compare with",
    "InputMode": "of TensorFlowOnSpark, to compare with",
    "tensorboard": "of TensorFlowOnSpark, see tritium_compat/tensorflowonspark",
    "qname": "of TensorFlowOnSpark, see tritium_compat/tensorflowonspark",
    "ssc": "of TensorFlowOnSpark, see tritium_compat/tensorflowonspark",
    "qname_in": "of TensorFlowOnSpark, see tritium_compat/tensorflowonspark",
    "qname_out": "of TensorFlowOnSpark, see tritium_compat/tensorflowonspark",
    "use_barrier": "of TensorFlowOnSpark, see tritium_compat/tensorflowonspark",
    "cluster.train": "of TensorFlowOnSpark, see tritium_compat/tensorflowonspark",
    "cluster.shutdown": "of TensorFlowOnSpark, see tritium_compat/tensorflowonspark",
    "DataFeed": "of TensorFlowOnSpark, see tritium_compat/tensorflowonspark",
    "TFParallel.run": "of TensorFlowOnSpark, see tritium_compat/tensorflowonspark",
    "should_stop": "of TensorFlowOnSpark, see tritium_compat/tensorflowonspark",
    "main_fun": "of TensorFlowOnSpark, see tritium_compat/tensorflowonspark",
    "cluster.tensorboard_url": "of TensorFlowOnSpark, see tritium_compat/tensorflowonspark",
    "ctx.release_port": "of TensorFlowOnSpark, see tritium_compat/tensorflowonspark",
    "cluster.inference": "of TensorFlowOnSpark, see tritium_compat/tensorflowonspark",
    "shutdown": "of TensorFlowOnSpark, see tritium_compat/tensorflowonspark",
    "num_epochs": "of TensorFlowOnSpark, see tritium_compat/tensorflowonspark",
    "localMode": "of pyspark.ml.deepspeed, see tritium_compat/deepspeed_distributor.py",
    "nnodes": "of pyspark.ml.deepspeed, see tritium_compat/deepspeed_distributor.py",
    "deepspeedConfig": "of pyspark.ml.deepspeed, see tritium_compat/deepspeed_distributor.py",
    "DeepspeedTorchDistributor": "of pyspark.ml.deepspeed, see tritium_compat/deepspeed_distributor.py",
    "DeepSpeed": "the name of a library",
    "prog_name": "an argument of a command of click, in a script that is written",
    "validation_data": "a setting of Keras's fit",
    "model.export": "a method of a Keras model",
    "sc.cancelAllJobs": "a method of pyspark's SparkContext",
    "sc.union": "a method of pyspark's SparkContext",
    "state.commit": "of horovod's elastic modules, see tritium_compat/horovod/elastic",
    "kept": "of horovod's elastic modules, see tritium_compat/horovod/elastic",
    "take_kept": "of horovod's elastic modules, see tritium_compat/horovod/elastic",
    "TorchState": "of horovod's elastic modules, see tritium_compat/horovod/elastic",
    "HostsUpdatedInterrupt": "of horovod's elastic modules, see tritium_compat/horovod/elastic",
    "ObjectState": "of horovod's elastic modules, see tritium_compat/horovod/elastic",
    "ElasticSampler": "of horovod's elastic modules, see tritium_compat/horovod/elastic",
    "SparkAsyncDL": "of sparkflow, to compare with",
    "SparkAsyncDLModel": "of sparkflow, to compare with",
    "PysparkPipelineWrapper": "of sparkflow, to compare with",
    "RUN_DIR": "an argument of `tritium report`",
    "RUN_ID": "a part of a path, which the page explains",
    "gradient_accumulation_steps": "a setting of Keras's optimizers",
    "experimental_run_tf_function": "a setting of Keras 2's compile, to compare with",
    "save_best_only": "a setting of Keras's ModelCheckpoint",
    "Reshape": "of keras.layers",
    "SGD": "of keras.optimizers",
    "model.build": "a method of a Keras model",
    "model.getModel": "of Horovod's models",
    "PyTorch": "a library",
    "OpenCV": "a library",
    "tf.compat.v1.disable_eager_execution": "of TensorFlow",
}

# Environment variables of others, and where they are documented; ours and those that we set are found in the code.
VARIABLES = {
    "PYSPARK_PYTHON": "https://spark.apache.org/docs/latest/configuration.html#environment-variables",
    "SPARK_LOCAL_DIRS": "https://spark.apache.org/docs/latest/spark-standalone.html",
    "PYTHONSAFEPATH": "https://docs.python.org/3/using/cmdline.html#envvar-PYTHONSAFEPATH",
    "UV_TORCH_BACKEND": "https://docs.astral.sh/uv/guides/integration/pytorch/",
    "TF_USE_LEGACY_KERAS": "https://keras.io/getting_started/",
    "JAX_PLATFORMS": "https://docs.jax.dev/en/latest/config_options.html#jax_platforms",
    "JAX_NUM_CPU_DEVICES": "https://docs.jax.dev/en/latest/config_options.html#jax_num_cpu_devices",
    "JAX_ENABLE_X64": "https://docs.jax.dev/en/latest/config_options.html#jax_enable_x64",
    "HOROVOD_GPU_OPERATIONS": "https://horovod.readthedocs.io/en/stable/gpus_include.html",
    "HOROVOD_WITH_GLOO": "https://horovod.readthedocs.io/en/stable/install_include.html",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html",
    "CUDA_VISIBLE_DEVICES": "https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-environment-variables",
}


def other(setting: str) -> bool:
    """Return whether the function of another library that OTHERS names has this setting."""
    if setting not in OTHERS:
        return False
    home, _, name = OTHERS[setting].rpartition(".")
    try:
        value = getattr(__import__(home, fromlist=["x"]), name)
    except ImportError:
        outer, _, cls = home.rpartition(".")
        value = getattr(getattr(__import__(outer, fromlist=["x"]), cls), name)
    return setting in advice.parameters(value)


CHECKS: dict[str, Callable[[str], bool]] = {
    "setting": lambda name: name in advice.settings() or other(name),
    "name": lambda name: advice.exists(name, advice.roots),
    "spark": lambda name: True,  # tests/spark/test_advice_spark.py
    "call": lambda name: advice.exists(name, advice.roots),
    "class": advice.is_class,
    "method": lambda name: bool(advice.roots(name)),
    "env": lambda name: name in VARIABLES or re.search(rf"[\"'{{( @]{name}\b[\"')= ]", advice.code()) is not None,
    "extra": lambda names: set(names.split(",")) <= advice.extras(),
    "command": lambda name: name in advice.commands(),
    "target": lambda names: set(names.split()) <= advice.targets(),
}


def unknown(kind: str, texts: Any) -> list[str]:
    found = advice.fragments(texts)[kind]
    return [
        f"{fragment} ({', '.join(places[:3])})"
        for fragment, places in found.items()
        if fragment not in REASONS and not CHECKS[kind](fragment) and not advice.is_shims(fragment, places)
    ]


@pytest.mark.parametrize("kind", CHECKS)
def test_what_a_message_names_exists(kind: str) -> None:
    assert unknown(kind, advice.messages()) == []


@pytest.mark.parametrize("kind", CHECKS)
def test_what_a_page_names_exists(kind: str) -> None:
    assert unknown(kind, advice.in_pages()) == []


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("setting", "Ask for more: say nann='keep', or give num_ranks=3."),
        ("name", "Call world.checkpoints.save(), or tr.lunch."),
        ("name", "Use torch.nn.MSELos, or F.dayofweeek"),
        ("call", "Convert it with df.toArow()"),
        ("class", "Make indices with Spark's StringIndex er or WordHasher"),
        ("env", "Set SPARK_LOKAL_DIRS"),
        ("extra", "pip install tritium[kears]"),
        ("command", "tritium docter"),
        ("target", "`make demos`"),
        ("method", "write().overwrote().save(path)"),
    ],
)
def test_a_misspelt_advice_is_found(kind: str, text: str) -> None:
    assert unknown(kind, (("here:1", text),))


def test_texts_are_found_wherever_they_are() -> None:
    texts = dict(advice.messages())
    joined = "\n".join(texts.values())
    for words in (
        "Drop such rows (`df.dropna(subset=[{0!r}])`)",  # a constant of a module
        'the same call with run_dir="…" continues',  # an f-string
        "Seconds within which every rank must have started",  # the meaning of a setting
    ):
        assert words in joined, words


# --- code in the pages

PYTHON = [
    pytest.param(page, line, code, id=f"{page.name}:{line}")
    for page in advice.PAGES
    for line, code in advice.blocks(page, "python", "py")
]
SHELL = [
    pytest.param(code, id=f"{page.name}:{line}")
    for page in advice.PAGES
    for line, code in advice.blocks(page, "sh", "bash", "shell", "console")
]


@pytest.mark.parametrize(("page", "line", "code"), PYTHON)
def test_a_block_of_python_calls_what_exists_with_what_it_takes(page: Any, line: int, code: str) -> None:
    tree = ast.parse(code)
    wrong = []
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = _dotted(call.func)
        if name is None or name.split(".")[0] in _defined(tree):
            continue
        for function in advice.callables(name):
            taken = advice.keywords(function)
            wrong += [f"{name}({k.arg}=…)" for k in call.keywords if k.arg and taken and k.arg not in taken]
    assert wrong == []


def _dotted(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute):
        below = _dotted(node.value)
        return f"{below}.{node.attr}" if below else None
    return node.id if isinstance(node, ast.Name) else None


def _defined(tree: ast.AST) -> set[str]:
    """Return the names that a block defines, or imports from another distribution's module."""
    names = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    imports = (
        n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module in ("tritium.flyte", "tritium.flyte.v1")
    )
    return names | {alias.name for node in imports for alias in node.names}


@pytest.mark.parametrize("code", SHELL)
def test_a_block_of_shell_uses_targets_commands_and_extras_that_exist(code: str) -> None:
    lines = [line.partition("#")[0].strip() for line in code.splitlines()]
    for line in filter(None, lines):
        words = line.split()
        names = [word for word in words[1:] if word.isalpha()]
        if words[0] == "make":
            assert set(names) <= advice.targets(), line
        elif words[0].rpartition("/")[2] == "tritium":
            assert words[1].startswith("-") or words[1] in advice.commands(), line
        for extra in re.findall(r"tritium\[([\w,]+)\]|\.\[([\w,]+)\]", line):
            assert set("".join(extra).split(",")) <= advice.extras(), line


def test_the_collector_sees_code_in_pages() -> None:
    assert len(PYTHON) > 15
    assert len(SHELL) >= 2
    assert advice.keywords(advice.callables("TorchEstimator")[0]) >= {"epochs", "ranks", "stall_timeout"}
    assert advice.keywords(advice.callables("tr.launch")[0]) >= {"args", "data", "ranks"}
    code = "est = TorchEstimator(model=m, rank=2)"
    with pytest.raises(AssertionError, match=r"rank=…"):
        test_a_block_of_python_calls_what_exists_with_what_it_takes(None, 1, code)


def test_no_message_ends_twice() -> None:
    twice = [(place, text) for place, text in advice.messages() if errors.one_stop(text) != text]
    assert not twice


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("It fails: no file.. Choose another.", "It fails: no file. Choose another."),
        ("It fails: which one?.", "It fails: which one?"),
        ("It fails: 'x'..\n\nIts output:\nloading..", "It fails: 'x'.\n\nIts output:\nloading.."),
        ("Loading... from ../data, a/.. and .. to 1..", "Loading... from ../data, a/.. and .. to 1."),
    ],
)
def test_a_quoted_message_and_the_one_around_it_share_a_full_stop(text: str, shown: str) -> None:
    assert str(errors.BadSetting(text)) == str(errors.TritiumWarning(text)) == shown
    assert str(pickle.loads(pickle.dumps(errors.TritiumWarning(text)))) == shown
    with pytest.warns(errors.TritiumWarning) as caught:
        warnings.warn(text, errors.TritiumWarning, stacklevel=1)
    assert str(caught[0].message) == shown


@pytest.mark.processes
def test_the_text_of_a_ranks_exception_ends_once() -> None:
    def train() -> None:
        raise ValueError("the loss is too high.")

    with pytest.raises(errors.RankFailed, match=r"raised ValueError: the loss is too high\.\n"):
        tr.launch(train, ranks=1, on="driver", progress=False, output="none")
