"""Optimizers of Keras 3 and tf_keras that reduce gradients over the ranks before they apply them (rank)."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

from tritium_compat.horovod._keras.reducers import reducer_for
from tritium_compat.horovod.options import Options


def distribute(optimizer: Any, options: Options) -> Any:
    """Return an optimizer like this one that reduces gradients over all ranks.

    One that has no state yet is made again from its config; one that has is changed itself, so that it keeps its state.
    Its class has the same name, so that a saved model is loaded without Horovod too.
    Raises TypeError for what is no optimizer of Keras, ValueError for one that is distributed already.
    """
    if isinstance(optimizer, Distributed) or isinstance(getattr(optimizer, "inner_optimizer", None), Distributed):
        raise ValueError(f"This {type(optimizer).__name__} is a DistributedOptimizer already.")
    keras = _keras_3()
    if keras is not None and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer.inner_optimizer = distribute(optimizer.inner_optimizer, options)
        return optimizer
    kind: type = _OfKeras3 if keras is not None and isinstance(optimizer, keras.optimizers.Optimizer) else _OfTfKeras
    if kind is _OfTfKeras and not hasattr(optimizer, "apply_gradients"):
        raise TypeError(f"hvd.DistributedOptimizer: {optimizer!r} is no optimizer of Keras.")
    if kind is _OfKeras3:
        _hook_loss_scale(keras)
    base = type(optimizer)
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "_hvd_options": options}
    made = type(base.__name__, (kind, base), names)
    if kind is _OfKeras3:
        _register_like(made, base)
    if not getattr(optimizer, "built", getattr(optimizer, "_built", False)):
        return _from_config(made, optimizer)
    object.__setattr__(optimizer, "__class__", made)
    optimizer._hvd_begin()
    return optimizer


def _keras_3() -> Any:
    keras = sys.modules.get("keras")
    return keras if keras is not None and hasattr(keras, "backend") and keras.__version__ >= "3" else None


def _from_config(made: Any, optimizer: Any) -> Any:
    """Make the optimizer again, also with a schedule of the user's own for its learning rate."""
    schedule = type(getattr(optimizer, "_learning_rate", None))
    return made.from_config(optimizer.get_config(), custom_objects={schedule.__name__: schedule})


def _register_like(made: type, base: type) -> None:
    """Give a class the name under which the user has registered its base for saved models."""
    from keras.src.saving import object_registration

    if base in object_registration.GLOBAL_CUSTOM_NAMES:
        object_registration.GLOBAL_CUSTOM_NAMES[made] = object_registration.GLOBAL_CUSTOM_NAMES[base]


class Distributed:
    """What all distributed optimizers have."""

    _hvd_options: Options
    _hvd: Any

    def register_local_var(self, var: Any) -> None:
        """Leave the gradients of this variable to this rank."""
        self._hvd.register_local_var(var)


class CallableList(list[Any]):
    """A list that old code may also call: `optimizer.variables()`."""

    def __call__(self) -> CallableList:
        return self


class _OfKeras3(Distributed):
    """What is put before the class of an optimizer of Keras 3."""

    def __init__(self, *args: Any, **options: Any) -> None:
        passes = self._hvd_options.backward_passes_per_step
        if passes > 1:
            given = options.get("gradient_accumulation_steps")
            if given not in (None, passes):
                raise ValueError(
                    f"backward_passes_per_step={passes} and the optimizer's gradient_accumulation_steps={given} both "
                    "sum gradients. Give one of them."
                )
            options["gradient_accumulation_steps"] = passes
        super().__init__(*args, **options)
        self._hvd_begin()

    def _hvd_begin(self) -> None:
        steps = getattr(self, "gradient_accumulation_steps", None)
        passes = self._hvd_options.backward_passes_per_step
        if passes > 1 and steps != passes:
            raise ValueError(
                f"backward_passes_per_step={passes} needs an optimizer that has no state yet: make it anew."
            )
        self._hvd = reducer_for(_keras_3().backend.backend(), self._hvd_options)

    @property
    def variables(self) -> CallableList:
        """Its variables."""
        return CallableList(super().variables)  # type: ignore[misc]

    @property
    def lr(self) -> Any:
        """The learning rate, by its older name."""
        return self.learning_rate

    @lr.setter
    def lr(self, value: Any) -> None:
        self.learning_rate = value

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> Any:
        self._hvd.variables = trainable_variables
        return super()._backend_apply_gradients(grads, trainable_variables)  # type: ignore[misc]

    def _clip_gradients(self, grads: Sequence[Any]) -> Any:
        # Keras calls this with the gradients of a step, or with the mean of several steps when it has summed those of
        # all, and applies what it returns.
        reduced = self._hvd.reduce(grads, self._hvd.variables)
        if self._hvd_options.backward_passes_per_step > 1 and not self._hvd_options.average_aggregated_gradients:
            reduced = [gradient * self._hvd_options.backward_passes_per_step for gradient in reduced]
        return super()._clip_gradients(reduced)  # type: ignore[misc]


class _OfTfKeras(Distributed):
    """What is put before the class of an optimizer of tf_keras, also of its legacy ones."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._hvd_begin()

    def _hvd_begin(self) -> None:
        from tritium_compat.horovod.tensorflow.gradients import Aggregation

        self._hvd = reducer_for("tensorflow", self._hvd_options)
        self._agg_helper = Aggregation(self._hvd) if self._hvd_options.backward_passes_per_step > 1 else None

    def _hvd_reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        step = self._hvd.reduce if self._agg_helper is None else self._agg_helper.add
        return list(step(list(gradients), list(variables)))

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[Any]:
        """Return pairs of gradient and variable, reduced."""
        return self._compute_gradients(loss, var_list, None, tape)

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> list[Any]:
        base: Any = super()
        if hasattr(base, "_compute_gradients"):  # a legacy one
            if tape is None and not callable(loss):
                raise ValueError("`tape` is required when a `Tensor` loss is passed.")
            pairs = base._compute_gradients(loss, var_list, grad_loss, tape=tape)
        else:
            pairs = base.compute_gradients(loss, var_list, tape=tape)
        gradients, variables = zip(*pairs, strict=True)
        return list(zip(self._hvd_reduce(gradients, variables), variables, strict=True))

    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """Return the gradients of a loss of TensorFlow 1, reduced."""
        return self._hvd_reduce(super().get_gradients(loss, params), params)  # type: ignore[misc]

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **options: Any) -> Any:
        """Apply gradients; with several backward passes, those of the last one."""
        apply, pairs = super().apply_gradients, list(grads_and_vars)  # type: ignore[misc]
        if self._agg_helper is None:
            return apply(pairs, *args, **options)
        return self._agg_helper.apply(lambda: apply(pairs, *args, **options), self)


def _hook_loss_scale(keras: Any) -> None:
    """Let all ranks skip a step in which the gradients of one are not finite, as a collective needs all of them.

    Keras puts a LossScaleOptimizer around ours, which looks at a rank's own gradients, under the policy mixed_float16.
    """
    kind = keras.optimizers.LossScaleOptimizer
    check_finite = kind.check_finite
    if hasattr(check_finite, "_hvd"):
        return

    @functools.wraps(check_finite)
    def check_all(self: Any, grads: Any) -> Any:
        finite = check_finite(self, grads)
        inner = self.inner_optimizer
        return inner._hvd.all_ranks(finite) if isinstance(inner, Distributed) else finite

    check_all._hvd = True  # type: ignore[attr-defined]
    kind.check_finite = check_all
