"""`KerasSettings`: the settings of a training with Keras 3 (any process)."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from tritium.arguments import name_of, needed_arguments, takes_vocabulary
from tritium.errors import BadSetting
from tritium.frameworks.keras import BACKENDS, Keras
from tritium.gang.settings import Gang
from tritium.hints import question
from tritium.ml.epoch_settings import EpochSettings
from tritium.ml.fields import setting
from tritium.ml.keras.metrics import of_rows
from tritium.ml.keras.portable import Portable, PortableModel, compile_arguments, packed, unpacked
from tritium.ml.settings import LABEL
from tritium.model.engines.keras_here import fresh_names, imported

_RATE = " The learning rate is the optimizer's, the first argument of keras.optimizers.Adam; give that as optimizer=."
_WEIGHTS = " weight_col= names a column of weights; compute one from the class for weights by class."
_CALLBACK = ("set_model", "on_train_begin", "on_epoch_end", "on_train_end")
_PROBABILITIES = ("binarycrossentropy", "sparsecategoricalcrossentropy", "categoricalcrossentropy")
_REDUCTIONS = ("sum_over_batch_size", "mean", "auto")


@dataclass(frozen=True, kw_only=True)
class KerasSettings(EpochSettings):
    """The settings of a training with Keras 3: every field is also a Spark ML Param of `KerasEstimator`."""

    framework: ClassVar[str] = "keras"
    choices: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **EpochSettings.choices,
        "shuffle": ("full", False, True),
        "backend": (None, *BACKENDS),
        "jit_compile": ("auto", True, False),
        "run_eagerly": (False, True),
    }
    hints: ClassVar[Mapping[str, str]] = {
        **EpochSettings.hints,
        **dict.fromkeys(("lr", "learning_rate"), _RATE),
        **dict.fromkeys(("sample_weight", "sample_weight_col", "sample_weight_column"), question("weight_col")),
        **dict.fromkeys(("validation_freq", "validation_steps", "validation_batch_size"), question("validation")),
        "class_weight": _WEIGHTS,
        "weighted_metrics": question("metrics"),
        "initial_epoch": " A training continues from its run_dir= by itself.",
        "steps_per_epoch": question("batch_size"),
        "gradient_accumulation": " Keras's optimizers have it, as gradient_accumulation_steps.",
        "lr_scheduler": " Give the optimizer a keras.optimizers.schedules object, or callbacks= a ReduceLROnPlateau.",
    }
    loss_of_numbers: ClassVar[str] = '"mse"'
    words_in_model: ClassVar[str] = (
        " vocabulary= takes the place of a StringLookup in the model, which is left out: its Embedding gets the index."
    )

    model: Any = setting(
        "A keras.Model, compiled or not, or a function without arguments that makes one. A function is called in every "
        "rank after all generators are seeded with `seed`, and all ranks start from the weights of rank 0. One whose "
        "argument is called vocabulary is given the words of each column of strings, for the size of an embedding.",
        resume="code",
    )
    backend: str | None = setting(
        'What Keras runs on in the ranks: "torch", "jax" or "tensorflow". None: that of the driver.', None, resume="any"
    )
    optimizer: Any = setting(
        "A name, a Keras optimizer, or a function without arguments that makes one; it begins without a state. The "
        "learning rate is never scaled with the number of ranks. None: that of the compiled model.",
        None,
        resume="code",
    )
    loss: Any = setting(
        "As in compile: a name, a Loss or a function (label, output); for several outputs a mapping by their names, or "
        "a list in their order. None: that of the compiled model.",
        None,
        resume="code",
    )
    loss_weights: Any = setting(
        "As in compile: numbers by the names of the outputs, or in their order.", None, resume="same"
    )
    metrics: Any = setting(
        "As in compile: names, Metrics or functions in a list, or by the names of the outputs. Each row counts once, "
        "whatever the number of ranks, and by its weight where there is a weight_col; a function that returns one "
        "number for a batch counts for each of its rows. None: those of the compiled model.",
        None,
        resume="code",
    )
    callbacks: Sequence[Any] = setting(
        "Keras's callbacks, or your own. Every rank calls them with the same logs at the end of an epoch; those of "
        "Keras that write files are called on rank 0 alone.",
        (),
        resume="any",
    )
    custom_objects: Mapping[str, Any] | None = setting(
        "Name -> a class or function of the model's configuration that Keras does not know, as in "
        "keras.saving.load_model. Those of the model's layers are found without.",
        None,
        resume="code",
    )
    jit_compile: Literal["auto"] | bool = setting(
        "As in compile: whether XLA, or torch's compiler, is used.", "auto", resume="any"
    )
    run_eagerly: bool = setting(
        "As in compile: TensorFlow and JAX then run a step without compiling it.", False, resume="any"
    )
    shuffle: Literal["full"] | bool = setting(
        'The order of rows: "full" (a new permutation each epoch), or False (by row id).', "full", resume="same"
    )
    task: Literal["auto", "regression", "classification"] | None = setting(
        'What predictions are: "regression" (a double for one output, else an array), "classification" (a class '
        'index, with "probability" beside it), or None (arrays). "auto": "classification" for one label column with '
        'sparse_categorical_crossentropy or binary_crossentropy; else "regression".',
        "auto",
        resume="same",
    )

    def problems(self) -> Iterator[str]:
        """Yield a sentence for each error of the settings."""
        yield from super().problems()
        yield from _model(self)
        yield from _callbacks(self.callbacks)
        yield from loss_problems(self.loss)
        if self.custom_objects is not None and not isinstance(self.custom_objects, Mapping):
            yield f"custom_objects={self.custom_objects!r:.80} must be a mapping from names to classes and functions."
        if self.metrics is not None and not isinstance(self.metrics, list | tuple | Mapping):
            yield f"metrics={self.metrics!r} must be a list, or a mapping by the names of the outputs."

    def history_names(self) -> Sequence[str] | None:
        """Return None: the names of metrics depend on the model's outputs, which the dry run sees."""
        return None

    def gang_framework(self, given: Any) -> Keras:
        """Return the framework of the ranks: on the back end of the driver where none is chosen. Raises BadSetting."""
        chosen = given.backend if isinstance(given, Keras) else None
        model = None if chosen is None or self.model_given is None else imported().backend.backend()
        for name, other in (("backend", self.backend), ("the model's back end", model)):
            if chosen is not None and other not in (None, chosen):
                raise BadSetting(
                    f"framework=tr.Keras(backend={chosen!r}), and {name} is {other!r}. Leave framework= out.",
                    setting="framework",
                )
        return Keras(backend=chosen or self.backend or imported().backend.backend())

    def check_gang(self, gang: Gang) -> None:
        """Raise BadSetting when a gang can't train with these settings."""
        super().check_gang(gang)
        if gang.most > 1 and self.run_eagerly and getattr(gang.framework, "backend", None) == "jax":
            from tritium.frameworks.keras_jax import NOT_EAGERLY

            raise BadSetting(NOT_EAGERLY, setting="run_eagerly")

    def check_ranks(self, ranks: int) -> None:
        """Raise BadSetting for a loss whose mean several ranks can't compute."""
        super().check_ranks(ranks)
        known = self.loss is not None or isinstance(self.model, PortableModel) or self.model_given is not None
        refuse_ignored(self.whole_loss() if known else None, ranks)

    def travelling(self) -> KerasSettings:
        """Return the settings as they are sent to ranks: Keras's objects as configurations, without variables."""
        model = self.model
        if is_keras_model(model):
            model = PortableModel.of(model, self.custom_objects or {})
        packed_settings = {name: packed(getattr(self, name)) for name in ("optimizer", "metrics", "loss")}
        return dataclasses.replace(
            self, model=model, callbacks=[without_model(c) for c in self.callbacks], **packed_settings
        )

    def make_model(self) -> Any:
        """Return a new model, with the weights of the one that was given. Raises BadSetting where there is none."""
        if isinstance(self.model, PortableModel):
            return self.model.model()
        if is_keras_model(self.model):
            return PortableModel.of(self.model, self.custom_objects or {}).model()
        keras = imported(self.backend)
        with fresh_names(), keras.saving.custom_object_scope(dict(self.custom_objects or {})):
            model = self.maker()
        if not isinstance(model, keras.Model):
            raise BadSetting(f"model={name_of(self.model)} returned a {type(model).__name__}, not a keras.Model.")
        return model

    @property
    def maker(self) -> Callable[[], Any]:
        """The function that makes a model, without arguments."""
        maker: Any = self.model
        return functools.partial(maker, self.words()) if takes_vocabulary(maker) else maker

    def compiled(self, model: Any) -> Any:
        """Compile a new model by these settings, and for those left out by its own compile(). Raises BadSetting.

        Metrics become weighted metrics: a row that only keeps a rank in step has the weight 0.
        """
        of_model = self._compiled_with(model)
        of_settings = {"optimizer": self._new_optimizer()}
        of_settings |= {name: getattr(self, name) for name in ("loss", "loss_weights", "metrics")}
        chosen = {name: unpacked(of_model.get(name) if value is None else value) for name, value in of_settings.items()}
        if chosen["optimizer"] is None or chosen["loss"] is None:
            missing = "optimizer" if chosen["optimizer"] is None else "loss"
            raise BadSetting(f"there is no {missing}, and the model is not compiled. Give {missing}=.", setting=missing)
        metrics = chosen.pop("metrics")
        keras = imported()
        with keras.saving.custom_object_scope(dict(self.custom_objects or {})):
            options = {"jit_compile": self.jit_compile, "run_eagerly": self.run_eagerly}
            model.compile(**chosen, weighted_metrics=of_rows(metrics or None), **options)
        if not isinstance(model.optimizer, keras.optimizers.Optimizer):
            raise BadSetting(
                f"optimizer={self.optimizer!r:.80} gives a {type(model.optimizer).__name__}, no optimizer."
            )
        return model

    def _compiled_with(self, model: Any) -> dict[str, Any]:
        """Return the arguments of the compile() of the model that was given, or of one that the function has made."""
        if isinstance(self.model, PortableModel):
            return self.model.compiled
        return {name: packed(one) for name, one in compile_arguments(self.model_given or model).items()}

    @property
    def model_given(self) -> Any:
        """The model that was given; None where it is a function that makes one."""
        return self.model if is_keras_model(self.model) else None

    def _new_optimizer(self) -> Any:
        optimizer = self.optimizer
        if isinstance(optimizer, Portable | str | Mapping | None) or hasattr(optimizer, "get_config"):
            return packed(optimizer)
        return optimizer()

    # ---- The loss, from which the task follows

    def whole_loss(self) -> Any:
        """Return the loss: that of the settings, else the compiled model's; None where there is none."""
        if self.loss is not None:
            return self.loss
        known = isinstance(self.model, PortableModel) or self.model_given is not None
        return self._compiled_with(None if known else self.make_model()).get("loss")

    def whole_loss_weights(self) -> Any:
        """Return the weights of the losses: those of the settings, else of the compiled model; None: no weights."""
        if self.loss_weights is not None:
            return self.loss_weights
        known = isinstance(self.model, PortableModel) or self.model_given is not None
        return self._compiled_with(None if known else self.make_model()).get("loss_weights")

    def loss_of(self, label: str) -> Any:
        """Return the loss of a label, in a list by the order of the labels; None where there is none."""
        loss, labels = self.whole_loss(), list(self.label_sources())
        if isinstance(loss, Mapping):
            return loss.get(label)
        if isinstance(loss, list | tuple):
            return dict(zip(labels, loss, strict=False)).get(label)
        return loss

    def is_of_one_score(self, label: str = LABEL) -> bool:
        """Return whether the loss of this label is Keras's own for one score a row against 0 or 1."""
        return loss_name(self.loss_of(label)) == "binarycrossentropy"

    def is_by_class(self) -> bool:
        """Return whether the loss is Keras's own for class indices against a score for each class."""
        return loss_name(self.whole_loss()) == "sparsecategoricalcrossentropy"

    def gives_probabilities(self) -> bool:
        """Return whether the loss is Keras's own for probabilities (from_logits=False)."""
        loss = self.whole_loss()
        return loss_name(loss) in _PROBABILITIES and not loss_option(loss, "from_logits")


def is_keras_model(value: Any) -> bool:
    """Return whether it is a model of the Keras that this process has imported."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(value, keras.Model)


def without_model(callback: Any) -> Any:
    """Return the callback, or where it holds the model of an earlier training, a copy that does not."""
    if getattr(callback, "_model", None) is None:
        return callback
    again = copy.copy(callback)
    again._model = None
    return again


def loss_name(loss: Any) -> str:
    """Return the name of a loss of Keras's in small letters without underscores; "" for any other."""
    if isinstance(loss, str):
        return loss.lower().replace("_", "")
    home = str(getattr(loss, "__module__", ""))
    return name_of(loss).lower().replace("_", "") if home.startswith("keras.") else ""


def loss_option(loss: Any, name: str) -> Any:
    """Return an option of a loss of Keras's; None where it has none of that name."""
    config = loss.get_config() if hasattr(loss, "get_config") else {}
    return config.get(name)


def refuse_ignored(loss: Any, ranks: int) -> None:
    """Raise BadSetting for a loss that leaves out rows, by whose number on its own each of several ranks divides."""
    ignoring = {option: one for one in losses_in(loss) if (option := loss_option(one, "ignore_class")) is not None}
    if ranks > 1 and ignoring:
        option, one = next(iter(ignoring.items()))
        raise BadSetting(
            f"the loss {name_of(one)} has ignore_class={option}, and its mean is over the labels that are left, those "
            f"of a rank: {ranks} ranks would learn otherwise than one. Train with ranks=1, or leave such rows out: "
            "df.where(…), or a weight_col that is 0 for them.",
            setting="loss",
        )


def losses_in(loss: Any) -> list[Any]:
    """Return the losses of all outputs."""
    if isinstance(loss, Mapping):
        return [one for part in loss.values() for one in losses_in(part)]
    if isinstance(loss, list | tuple):
        return [one for part in loss for one in losses_in(part)]
    return [] if loss is None else [loss]


def _model(settings: KerasSettings) -> Iterator[str]:
    model = settings.model
    if isinstance(model, PortableModel):
        return
    homes = {str(base.__module__).partition(".")[0] for base in type(model).__mro__}
    if "tf_keras" in homes:
        yield "model is one of tf_keras, which is Keras 2: make it with Keras 3 (import keras)."
    elif is_keras_model(model):
        here = imported().backend.backend()
        if settings.backend not in (None, here):
            yield (
                f"the model was made on Keras's back end {here!r}, and backend={settings.backend!r}. Leave backend= "
                f"out, or set KERAS_BACKEND={settings.backend} before Keras is imported; a function that makes the "
                "model can be called on either."
            )
    elif "torch" in homes:
        yield f"model is a {type(model).__name__}, which TorchEstimator trains: it is a torch module."
    elif not callable(model):
        yield f"model={model!r:.80} is neither a keras.Model nor a function that makes one."
    elif not takes_vocabulary(model) and (needed := needed_arguments(model)):
        yield f"model={name_of(model)} needs {', '.join(needed)}; it is called without arguments."
    optimizer = settings.optimizer
    known = isinstance(optimizer, str | Mapping | Portable | None) or hasattr(optimizer, "get_config")
    if isinstance(optimizer, type) or not (known or callable(optimizer)):
        yield (
            f"optimizer={optimizer!r:.80} is no optimizer of Keras. Give its name, an object of keras.optimizers, or "
            "a function without arguments that makes one."
        )
    elif not known and (needed := needed_arguments(optimizer)):
        yield f"optimizer={name_of(optimizer)} needs {', '.join(needed)}; it is called without arguments."


def _callbacks(callbacks: Any) -> Iterator[str]:
    if not isinstance(callbacks, list | tuple):
        yield f"callbacks={type(callbacks).__name__}(…) must be a list: callbacks=[…]."
        return
    for callback in callbacks:
        if isinstance(callback, type):
            yield f"the callback {name_of(callback)} is a class; give an instance, {name_of(callback)}()."
        elif missing := [method for method in _CALLBACK if not hasattr(callback, method)]:
            yield f"the callback {callback!r:.80} has no {', '.join(missing)}; derive it from keras.callbacks.Callback."
        elif name_of(callback) == "BackupAndRestore":
            yield (
                "BackupAndRestore would continue a training from files of its own, beside its checkpoints: leave it "
                "out, and give run_dir=."
            )


def loss_problems(losses: Any) -> Iterator[str]:
    """Yield a sentence for each error of the losses of all outputs."""
    for loss in losses_in(losses):
        if isinstance(loss, type):
            yield f"loss={name_of(loss)} is a class; give an instance, {name_of(loss)}()."
        elif (reduction := getattr(loss, "reduction", None)) not in (None, *_REDUCTIONS):
            yield (
                f'the loss {name_of(loss)} has reduction="{reduction}", with which N ranks can\'t agree with one. Use '
                '"sum_over_batch_size".'
            )
        elif not (isinstance(loss, str) or callable(loss)):
            yield f"loss={loss!r:.80} is neither a name nor a function (label, output)."
