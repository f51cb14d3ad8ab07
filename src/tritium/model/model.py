"""`Model`: a trained model with its signature, independent of Spark (any process)."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tritium.errors import BadSetting, UntrustedModel
from tritium.model import decoders, files
from tritium.model.bad_rows import BadRows, OnError, check_on_error
from tritium.model.calls import BatchSize, CallState, Computing, check_batch_size
from tritium.model.engine import Maker
from tritium.model.engines import registry
from tritium.model.example import signature_of
from tritium.model.forms import ANYTHING, check, list_of, mapping_of, parsed
from tritium.model.signature import Activation, Signature, Task
from tritium.model.trust import Trust, factory, importable
from tritium.shown import shown

if TYPE_CHECKING:
    import numpy as np

_SIGNATURE, _HISTORY = "signature.json", "history.json"


class Model:
    """A trained module, its signature, and the history of its training.

    module      : the framework's own object: a torch.nn.Module, a keras.Model, a lightgbm.Booster; the path of an ONNX
                  file; or a function from the batch, arrays `[rows, …]` by name, to an array, or to several by name.
    signature   : its inputs and outputs. None: inferred, by calling the module with `example`, or that of an ONNX file.
    example     : a shard, a batch of one, a mapping of arrays `[rows, …]`, or a table, whose numeric columns are packed
                  to one input. The columns of a shard keep how they were made of source columns.
    inputs      : the columns of the example that the module takes. None: those that its `forward` names.
    task        : as in `Signature`, as is `activation`.
    history     : one dict per epoch.
    origin      : the function or class without arguments that makes such a module, or its "package.module:name". A
                  saved model names it, and whoever loads the model must trust it (`load`). Without one that can be
                  imported, the module is saved by value, and loading it runs code from the file.
    seed        : the seed of torch, NumPy and `random` when `origin` made the module. `load` seeds them again, for
                  random numbers that the module draws beside its weights. Estimators set it.
    engine      : the framework that saves and calls the module: "torch", "keras", "lightgbm". None: that of its class.
    decode      : binary input → the function from bytes to an array. With an example, its columns are decoded by them;
                  they may be given as bytes or as arrays.
    transform   : a function (inputs) -> inputs of a batch's tensors by name, applied before the module is called
                  (`input_transform`). The inputs of the signature are those before it.
    label_words : the label column with the words of its classes, `{"churn": ["no", "yes"]}`, or the column of the
                  example whose vocabulary they are. Predictions then have the word beside the index.
    """

    def __init__(
        self,
        module: Any,
        signature: Signature | None = None,
        *,
        example: Any = None,
        inputs: Sequence[str] | str | None = None,
        task: Task | None = None,
        activation: Activation | None = None,
        history: Sequence[Mapping[str, Any]] = (),
        origin: Any = None,
        seed: int | None = None,
        engine: str | None = None,
        decode: Mapping[str, Callable[[bytes], Any]] | None = None,
        transform: Callable[..., Any] | None = None,
        label_words: Mapping[str, Sequence[str]] | str | None = None,
    ) -> None:
        self.engine = registry.find(registry.name_of(module) if engine is None else engine)(module)
        self.input_transform = transform
        self.decode = dict(decode or {})
        if signature is None:
            signature, self.decode = signature_of(
                self.engine, example, inputs, task, activation, self.decode, label_words
            )
        elif isinstance(label_words, str):
            raise BadSetting(
                f"label_words={label_words!r} names a column of an example. Beside a signature, give the words.",
                setting="label_words",
            )
        elif label_words is not None:
            signature = dataclasses.replace(signature, label_words=label_words)
        self.signature = signature
        self.history = [dict(epoch) for epoch in history]
        self.origin = importable(origin)
        self.seed = seed
        self._calls: dict[Any, CallState] = {}

    @property
    def module(self) -> Any:
        """The framework's own object, not a copy: for torch the torch.nn.Module."""
        return self.engine.module

    @module.setter
    def module(self, module: Any) -> None:
        self.engine.module = module

    @property
    def label_words(self) -> dict[str, list[str]]:
        """Label column of strings → its words, at the index that stands for each; empty where there is none."""
        return {column: list(words) for column, words in self.signature.label_words.items()}

    @property
    def input_transform(self) -> Callable[..., Any] | None:
        """The function of a batch's inputs that is applied before the module is called: `transform` of `tr.Model`."""
        return self.engine.transform

    @input_transform.setter
    def input_transform(self, transform: Callable[..., Any] | None) -> None:
        if transform is not None and not self.engine.takes_transform:
            raise BadSetting(
                f"A model of {self.engine.name} takes no transform; models of torch do.", setting="transform"
            )
        self.engine.transform = transform

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "transform":  # It would hide the method, and change no prediction.
            raise BadSetting("The function of a model's inputs is set by model.input_transform = function.")
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return f"Model({self.describe()})"

    def describe(self) -> str:
        """Return the module's class, inputs, outputs, task, decoders and transform as one line."""
        inputs, outputs = (
            ", ".join(one.name for one in several) for several in (self.signature.inputs, self.signature.outputs)
        )
        more = {"task": self.signature.task, "decode": self.decode, "transform": self.input_transform}
        texts = [f"{name}={shown(value)}" for name, value in more.items() if value]
        return ", ".join([f"{type(self.module).__name__}: {inputs} -> {outputs}", *texts])

    def predict(
        self,
        data: Any,
        *,
        batch_size: BatchSize = 1024,
        device: str | None = None,
        on_error: OnError = "fail",
        computes: Computing | None = None,
    ) -> np.ndarray[Any, Any] | dict[str, np.ndarray[Any, Any]]:
        """Return the predictions for a pandas DataFrame, an Arrow table, or arrays.

        `data` may be an array or a tensor `[rows, *shape]`, or a mapping of those by the names of the inputs. One
        output gives an array: float64 `[rows]` for one number a row, else `[rows, *shape]`. Classification gives a dict
        of `prediction` (the class index, float64 `[rows]`) and `probability` (float64 `[rows, classes]`), and of
        `prediction_label` (the class as a word, an object `[rows]`) where the label was a column of strings; several
        outputs a dict by their names. `device=None` is where the module is. For another device one copy of the module
        is kept there, as long as this model; each call uses the current weights of the module.

        batch_size : rows that the module is called with at once, or "auto": the size is found while it is called.
        on_error   : what becomes of a row that the model can't take (a null, a NaN, bytes that can't be decoded), or
                     for which it raises: "fail" raises BadRow or the model's error, "skip" leaves the row out, "null"
                     gives it NaN as predictions (None as a word), and "column" also its reason in `prediction_error`
                     of the dict that is returned then, which is None for all other rows.
        computes   : how numbers are computed, by torch: as `TorchModel(model, precision="bf16", compile=True)` says it.

        Raises SignatureMismatch with every difference, and BadRow for a null or a NaN.
        """
        import numpy as np

        predictions, bad = self.predict_valid(
            data, batch_size=batch_size, device=device, on_error=on_error, computes=computes
        )
        if self.signature.class_words:
            from tritium.model.score import words_of

            predictions["prediction_label"] = words_of(self.signature, predictions["prediction"])
        if bad.valid is not None and on_error != "skip":
            predictions = {name: bad.among_all(values) for name, values in predictions.items()}
        if on_error == "column":
            rows = len(next(iter(predictions.values())))
            predictions["prediction_error"] = np.array([bad.reasons.get(row) for row in range(rows)], np.object_)
        return predictions["prediction"] if len(predictions) == 1 else predictions

    def predict_valid(
        self,
        data: Any,
        *,
        batch_size: BatchSize = 1024,
        device: str | None = None,
        on_error: OnError = "fail",
        computes: Computing | None = None,
    ) -> tuple[dict[str, np.ndarray[Any, Any]], BadRows]:
        """Return every output by name for the rows that have predictions, and the other rows.

        With `on_error="fail"` such a row raises BadRow, or the model's error, as `predict` does.
        """
        from tritium.model.rows import arrays
        from tritium.model.score import Scorer

        check_batch_size(batch_size)
        check_on_error(on_error)
        computes = computes or Computing()
        self.engine.check_computing(computes)
        if device is not None:
            self.engine.check_device(device)
        inputs, bad = arrays(self.signature, data, self.decode, on_error)
        rows = len(next(iter(inputs.values()))) + (0 if bad.valid is None else int((~bad.valid).sum()))
        with self.engine.on(device) as ready:
            ready.computes = computes
            calls = self._calls.setdefault((batch_size, device, computes), CallState(batch_size))
            scorer = Scorer(ready, self.signature, calls, isolate=on_error != "fail")
            predictions, failed = scorer.score(inputs)
        return predictions, bad.with_failed(failed, rows)

    def transformer(self, **params: Any) -> Any:
        """Return the model as a Spark ML transformer, with these parameters: `transformer(batch_size=4096)`."""
        home, _, name = self.engine.transformer.partition(":")
        return getattr(importlib.import_module(home), name)(self, **params)

    def transform(self, data: Any, **params: Any) -> Any:
        """Return a Spark or pandas DataFrame with the predictions, as `transformer(**params)` adds them."""
        return self.transformer(**params).transform(data)

    def follow(self, path: str, **settings: Any) -> Any:
        """Return a transformer that scores with the newest version in `path`, as `TrainedModel.follow` describes it."""
        return self.transformer().follow(path, **settings)

    def learn_ranges(self, df: Any) -> None:
        """Keep in the signature the range and the share of nulls of each input column, as `check=` compares with them.

        df : the rows to learn from, those of the training: Spark's DataFrame, read by one job, or one of pandas.
        """
        from tritium.model.ranges import learnt

        self.signature = dataclasses.replace(self.signature, ranges=learnt(self.signature, df))

    def save(self, path: str, overwrite: bool = False) -> None:
        """Write the model as a directory at `path`, a local path or any fsspec URL ("s3://models/bikes")."""
        parts = self.engine.save(by_value=self.origin is None)
        contents: dict[str, Any] = {
            self.engine.weights_file: parts.weights.stream(),
            _SIGNATURE: [json.dumps(self.signature.to_json(), indent=2).encode()],
            _HISTORY: [json.dumps(self.history, indent=2).encode()],
        }
        maker: dict[str, Any] = {}
        if self.origin is not None:
            maker = {"import": self.origin} | ({} if self.seed is None else {"seed": self.seed})
        elif self.engine.code_file is not None and parts.code:
            contents[self.engine.code_file] = [parts.code]
            maker = {"by value": self.engine.code_file}
        facts = {"engine": self.engine.name, "versions": files.versions(), "module": maker, **parts.facts}
        for kind, functions in decoders.of_model(self.decode, self.input_transform).items():
            paths, by_value = decoders.saved(functions)
            facts |= {kind: paths} if paths else {}
            if by_value is not None:
                contents[decoders.FILES[kind]] = [by_value]
        files.save(path, contents, facts, overwrite=overwrite)


def load(path: str, trusted: bool | str | Sequence[str] = False) -> Model:
    """Return the model that was saved at `path`, by `Model.save` or by `TorchModel.save`.

    Every file is checked against its SHA-256 first. A model is made by code: by the function or class that it names,
    or by code within it. Without `trusted` only the modules of torch.nn are made. `trusted="package.module:make_net"`
    (or several of those) also allows this function or class to be imported and called, `trusted="package"` every
    module class in the package and every function there whose annotation says that it returns one. Unless your
    program has imported them, they are not imported from the current directory. `trusted=True` runs any code of the
    files, which a model by value needs. A model that this process has saved itself is trusted, by its checksums.

    Raises UntrustedModel, whose text says how to trust the model, and ModelError for a model that is damaged or does
    not fit its code.
    """
    trust = Trust.of(trusted)
    path = files.located(str(path))
    manifest, saved_here = files.read_manifest(path)
    if saved_here:
        trust = Trust.of(True)
    engine = registry.find(manifest.get("engine", registry.DEFAULT))
    check(manifest, engine.facts, f"{files.MANIFEST} of the model at {path!r}")
    origin, seed = manifest["module"].get("import"), manifest["module"].get("seed")
    by_value = manifest["module"].get("by value") if origin is None else None
    if by_value is not None and not trust.everything:
        raise UntrustedModel(
            f"The model at {path!r} holds its code by value: loading it runs code from that file, with your rights, "
            "on this machine and on every executor that scores with it. If you know who made it and that nobody "
            "changed it since, say so: tr.load(path, trusted=True), or spark.tritium.trustModels=true for Spark ML's "
            "loaders.",
            path=path,
        )
    by: Maker | bytes = b""
    if origin is None and not trust.everything and (why := engine.runs_code(manifest)):
        raise UntrustedModel(
            f"The model at {path!r} would be made by {why}. Upgrade it; or if you know who made the model, say so: "
            "tr.load(path, trusted=True), or spark.tritium.trustModels=true for Spark ML's loaders.",
            path=path,
        )
    if origin is not None:
        by = Maker(origin, factory(origin, trust, path, engine), seed)
    signature = Signature.from_json(_json(path, _SIGNATURE, manifest))
    history = _json(path, _HISTORY, manifest)
    check({"epochs": history}, {"epochs": list_of(mapping_of(ANYTHING))}, f"{_HISTORY} of the model at {path!r}")
    weights = files.read(path, engine.weights_file, manifest)
    if by_value is not None and engine.code_file is not None:
        by = bytes(files.read(path, engine.code_file, manifest))
    decode = decoders.load(path, manifest, trust)
    transform = decoders.load_transform(path, manifest, trust)
    module = engine.restore(weights, manifest, by).module
    known: dict[str, Any] = {"origin": origin, "seed": seed, "decode": decode, "transform": transform}
    return Model(module, signature, history=history, engine=engine.name, **known)


def _json(path: str, name: str, manifest: Mapping[str, Any]) -> Any:
    return parsed(bytes(files.read(path, name, manifest)), f"{name} of the model at {path!r}")
