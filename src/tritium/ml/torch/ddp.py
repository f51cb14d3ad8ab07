"""A module on all ranks by DDP: its options, the exchange of its gradients, and the hook for it (rank, driver)."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel

from tritium.arguments import name_of
from tritium.errors import BadSetting, RanksDiffer
from tritium.frameworks.torch_memory import host_memory
from tritium.ml.torch.ranks import Ranks, copy_of_weights
from tritium.ml.torch.setting_checks import DDP_FLAGS, NEEDS_GPUS, parts_of_hook

T = TypeVar("T")
Stepping = Callable[[torch.nn.Module], torch.nn.Module]
_LISTED = 3
_SYNC_BUFFERS = "forward_sync_buffers"  # Torch 2.13 deprecates the name before.
_OTHER_SUMS = {"sync_batch_norm": False, "broadcast_buffers": True}
"""Option → default, for those that change what is learnt."""
_MEMORIES = ("error_dict", "p_memory_dict", "q_memory_dict")
"""Attributes of a PowerSGDState that map a bucket to a tensor."""
_COUNTS = ("iter", "total_numel_before_compression", "total_numel_after_compression", "next_stats_report")

# DDP's messages for a gradient that it still waits for, the second with static_graph.
_UNFINISHED = ("Expected to have finished reduction in the prior iteration", "Your training graph has changed")
_WITHOUT_GRADIENT = (
    "Some parameters got no gradient in this step, and all did when the module was tried with zeros. A module that "
    "skips layers at random (stochastic depth) needs a train_step, which may leave out parameters: "
    "train_step=lambda module, batch: your_loss(module(batch['features']), batch['label'])."
)
_PROMISED = (
    "Some parameters got no gradient in this step, and ddp_options={{{0!r}: {1!r}}} says that the same ones get a "
    "gradient in every step. Leave that option out."
)


class ModuleOnRanks:
    """What DDP and FSDP have in common: a module that all ranks train together."""

    def __init__(self, module: torch.nn.Module, ranks: Ranks) -> None:
        self.module, self._ranks = module, ranks

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self._ranks.device

    @property
    def trainable(self) -> list[str]:
        """The names of the parameters that require a gradient."""
        return [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]

    def ungrouped(self, optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
        """Return the parameters that are in no group of the optimizer, trainable or not."""
        grouped = held_by(optimizer)
        return [parameter for parameter in self.module.parameters() if id(parameter) not in grouped]

    def train_only(self, names: Sequence[str]) -> None:
        """Freeze all parameters but these. Call `refresh` afterwards."""
        chosen = set(names)
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(name in chosen)


class Replica(ModuleOnRanks):
    """One module on all ranks: `net` is what a step calls, `gradients` the exchange of its gradients.

    DDP exchanges the gradients of the parameters that were trainable when it was made. After a callback has frozen or
    unfrozen others, every rank must call `refresh`. The parameters stay the same objects, so that the optimizer keeps
    its state.
    """

    sharded: Literal[False] = False

    def __init__(
        self,
        module: torch.nn.Module,
        ranks: Ranks,
        find_unused_parameters: bool,
        options: Mapping[str, Any] | None = None,
        stepping: Stepping | None = None,
    ) -> None:
        """Wrap the module.

        find_unused_parameters : some of the parameters that are trainable now get no gradient.
        options : the `ddp_options` of the settings.
        stepping : makes of the module what DDP wraps; None: the module itself.
        """
        super().__init__(module, ranks)
        self._find_unused = find_unused_parameters
        self._options, self._stepping = options or {}, stepping
        self.comm_hook = CommHook(self._options.get("comm_hook"))
        self._tried = set(self.trainable)  # The dry run on the driver has computed the gradients of no others.
        self._wrap()

    def refresh(self, optimizer: torch.optim.Optimizer) -> None:
        """Exchange the gradients of what is trainable now. A collective call, cheap where nothing has changed.

        After a change the parameters take rank 0's values. Raises, the same on every rank, RanksDiffer where ranks
        train different parameters, and BadSetting for one that was unfrozen and that the optimizer does not hold.
        """
        before, now = self._wrapped, self._trained()
        same = len(before) == len(now) and all(a[0] == b[0] and a[1] is b[1] for a, b in zip(before, now, strict=True))
        if not self._ranks.any(not same):
            return
        self._refuse_different()
        known, unheld = {id(parameter) for _, parameter in before}, set(outside(self.module, optimizer))
        missing = [name for name, parameter in now if name in unheld and id(parameter) not in known]
        if missing:
            raise BadSetting(
                f"{_listed(missing)} was unfrozen and is in no group of the optimizer, so that it would never learn. "
                "Give the optimizer all parameters (those that are frozen get no gradient and are left alone), or add "
                'a group in the callback: state.optimizer.add_param_group({"params": …}), whose learning rate no '
                "lr_scheduler changes.",
                parameters=missing,
            )
        self._wrap()

    @property
    def order(self) -> list[str] | None:
        """The order of the buckets, for a checkpoint; None where it is not known, or plays no part."""
        return self.gradients.order

    def restore(self, order: Sequence[str] | None) -> None:
        """Continue with the buckets of a training whose first step had this order. A collective call."""
        self.gradients.restore(order)

    def call(self, step: Callable[[Any, Any], T], batch: Any) -> T:
        """Return `step(net, batch)`."""
        return step(self.net, batch)

    def copy_of_weights(self) -> dict[str, torch.Tensor]:
        """Return a copy of the weights and buffers on the CPU."""
        return copy_of_weights(self.module)

    def train(self) -> None:
        """Set train mode."""
        self.net.train()

    def _trained(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, parameter) for name, parameter in self.module.named_parameters() if parameter.requires_grad]

    def _wrap(self) -> None:
        again = hasattr(self, "net")
        self.net: torch.nn.Module = self.module
        self.gradients = Gradients(self.module)
        if again:
            gc.collect()  # The previous DDP removes its hooks from the parameters when it is freed.
        for parameter in self.module.parameters():
            parameter.grad = None
        self._wrapped = self._trained()
        # The dry run has not tried whether what was frozen when the training began gets a gradient at all.
        find_unused = self._find_unused or not self._tried.issuperset(self.trainable)
        self.net = replicate(
            *(self.module, self._ranks),
            find_unused_parameters=find_unused,
            options=self._options,
            stepping=self._stepping,
        )
        if isinstance(self.net, DistributedDataParallel):
            self.comm_hook.register(self.net)
        self.gradients = Gradients(self.net, self.module, self._options)

    def _refuse_different(self) -> None:
        trainable = self._ranks.gather(self.trainable)
        others = [rank for rank, names in enumerate(trainable) if names != trainable[0]]
        if not others:
            return
        rank = others[0]
        more = [name for name in trainable[rank] if name not in trainable[0]]
        less = [name for name in trainable[0] if name not in trainable[rank]]
        difference = (
            f"rank {rank} trains {_listed(more)}, and rank 0 does not"
            if more
            else f"rank 0 trains {_listed(less)}, and rank {rank} does not"
        )
        raise RanksDiffer(
            f"A callback has left the ranks with different parameters to train: {difference}. Freeze and unfreeze the "
            "same layers on every rank, whatever state.rank is.",
            ranks=others,
            tensor=(more or less)[0],
        )


def replicate(
    module: torch.nn.Module,
    ranks: Ranks,
    *,
    find_unused_parameters: bool,
    options: Mapping[str, Any] | None = None,
    stepping: Stepping | None = None,
) -> torch.nn.Module:
    """Return the module with rank 0's weights, whose gradients are averaged over ranks in `backward`.

    find_unused_parameters : some parameters get no gradient, and DDP must not wait for them.
    options : the `ddp_options` of the settings.
    stepping : makes of the module what DDP wraps, whose forward must compute all that gradients are taken of.
    """
    if ranks.size == 1 or not any(p.requires_grad for p in module.parameters()):
        return module
    keywords = ddp_keywords(options, find_unused_parameters=find_unused_parameters)
    if "broadcast_buffers" in keywords and _SYNC_BUFFERS in inspect.signature(DistributedDataParallel).parameters:
        keywords[_SYNC_BUFFERS] = keywords.pop("broadcast_buffers")
    return DistributedDataParallel(module if stepping is None else stepping(module), **keywords)


def with_sync_batch_norm(module: torch.nn.Module, options: Mapping[str, Any] | None, ranks: Ranks) -> torch.nn.Module:
    """Return the module with layers that take the statistics of all ranks, if the options say so.

    Parameters and buffers stay the same objects, of the same names. Raises BadSetting where ranks compute on CPUs.
    """
    if ranks.size == 1 or not (options or {}).get("sync_batch_norm"):
        return module
    if ranks.device.type == "cpu":
        raise BadSetting(NEEDS_GPUS, setting="ddp_options")
    converted: torch.nn.Module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)  # type: ignore[no-untyped-call]
    return converted


def outside(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the trainable parameters that are in no group of the optimizer."""
    grouped = held_by(optimizer)
    return [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in grouped]


def held_by(optimizer: torch.optim.Optimizer) -> set[int]:
    """Return the ids of the parameters in the groups of an optimizer."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def tell_untrained(module: torch.nn.Module, optimizer: torch.optim.Optimizer, tell: Callable[[str], Any]) -> None:
    """Tell the user about trainable parameters that are in no group of the optimizer, if there are any."""
    missing = outside(module, optimizer)
    if missing:
        count = len(list(module.named_parameters()))
        tell(
            f"{len(missing)} of {count} tensors of weights are in no group of the optimizer, and are not trained: "
            f"{_listed(missing)}"
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_LISTED])) + (", …" if len(names) > _LISTED else "")


# ---- the exchange of gradients


class Gradients:
    """DDP's exchange of gradients, and the order of its buckets.

    In its first step DDP exchanges all gradients as one bucket, in the reverse order of the module's parameters; from
    the second on in buckets that follow the order in which those of the first step arrived on rank 0. The place of a
    gradient in its bucket decides which rank's share is added first, and so the last bit of a sum of three or more. A
    training that continues at a later step needs the later buckets at once, so checkpoints hold their order.

    Without DDP (one rank, or nothing to train) there is nothing to exchange.
    """

    def __init__(
        self,
        net: torch.nn.Module,
        module: torch.nn.Module | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Handle the gradients of `net`.

        module : gives errors the parameters' names; None: the one that DDP wraps.
        options : the `ddp_options` of the settings.
        """
        self._net = net if isinstance(net, DistributedDataParallel) else None
        # With find_unused_parameters DDP never rebuilds its buckets; with static_graph it does, in an order that is
        # learnt in a real first step, for which `restore` has no stand-in.
        self._keeps = self._net is None or bool(self._net.find_unused_parameters or self._net.static_graph)
        self._without_gradient = _without_gradient(options or {})
        self._trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
        self._frozen: list[tuple[str, torch.nn.Parameter]] = []
        if self._net is not None:
            named = (module or self._net.module).named_parameters()
            self._frozen = [(name, parameter) for name, parameter in named if not parameter.requires_grad]
        self.order: list[str] | None = None
        """Names of parameters as their gradients arrived in the first step; None before it."""

    @contextmanager
    def exchanged(self, *, now: bool) -> Iterator[None]:
        """Exchange the gradients of a forward and backward; with `now=False` only accumulate them on each rank."""
        learning = self._learning_order() if now and not self._keeps and self.order is None else nullcontext()
        with nullcontext() if now or self._net is None else self._net.no_sync(), learning:
            try:
                yield
            except RuntimeError as error:
                if not any(text in str(error) for text in _UNFINISHED):
                    raise
                raise BadSetting(self._without_gradient) from error
        if now and not self._keeps and any(parameter.grad is None for parameter in self._trained):
            # DDP, and with it the other ranks, would wait for those in the next step.
            raise BadSetting(self._without_gradient)
        if self._frozen and now:
            self._refuse_unfrozen()

    def _refuse_unfrozen(self) -> None:
        """Raise BadSetting for a parameter whose gradient is not exchanged, as it was frozen when DDP was made."""
        names = [name for name, parameter in self._frozen if parameter.requires_grad]
        if names:
            raise BadSetting(
                f"{names[0]!r} was unfrozen within a step ({len(names)} tensors in all), and its gradient is not "
                "exchanged between the ranks. Freeze and unfreeze layers in a callback: in on_train_start or "
                "on_epoch_end.",
                parameters=names,
            )

    @contextmanager
    def _learning_order(self) -> Iterator[None]:
        """Set `order` to that in which gradients arrive within the block."""
        assert self._net is not None
        arrived: list[str] = []
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
            for name, parameter in self._net.module.named_parameters()
            if parameter.requires_grad
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        self.order = arrived

    def norms(self) -> list[torch.Tensor]:
        """Return the L2 norm of each exchanged gradient, the same on every rank."""
        arrived = [_numbers(parameter.grad) for parameter in self._trained if parameter.grad is not None]
        # Without get_total_norm, which would group them first, in 0.05 ms.
        return list(torch._foreach_norm(arrived)) if arrived else []

    def clip(self, largest: float) -> None:
        """Scale the gradients so that their norm is at most `largest`."""
        torch.nn.utils.clip_grad_norm_(self._trained, largest)

    def restore(self, order: Sequence[str] | None) -> None:
        """Continue with the buckets of a training whose first step had this order. A collective call, over zeros.

        Must be called before the weights and the optimizer are restored, as hooks on parameters are called.
        """
        self.order = None if order is None else list(order)
        if self._keeps or not order:
            return
        net = self._net
        assert net is not None
        module = net.module
        net.module = _Arriving(module, order)
        try:
            loss = net()
            loss.backward(torch.zeros_like(loss))
        finally:
            net.module = module
        net.zero_grad(set_to_none=True)  # So that the next forward rebuilds the buckets.


def _without_gradient(options: Mapping[str, Any]) -> str:
    """Return the message for parameters that got no gradient in some step."""
    for name, value in (("static_graph", True), ("find_unused_parameters", False)):
        if options.get(name) is value:
            return _PROMISED.format(name, value)
    return _WITHOUT_GRADIENT


def _numbers(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient's values, dense and in a type that can hold the norm of many."""
    numbers = gradient.coalesce().values() if gradient.is_sparse else gradient
    return numbers.float() if numbers.dtype == torch.float16 else numbers


class _Arriving(torch.nn.Module):
    """A stand-in for a module in one step, whose gradients arrive in the given order, those not named last."""

    def __init__(self, module: torch.nn.Module, order: Sequence[str]) -> None:
        super().__init__()
        self.module = module  # DDP broadcasts its buffers.
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._arriving = [trained.pop(name) for name in order if name in trained] + list(trained.values())
        self._sparse = {
            id(part.weight)
            for part in module.modules()
            if isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag) and part.sparse
        }

    def forward(self) -> Any:
        """Return a sum whose gradients are computed from its last term to its first."""
        total: Any = 0.0
        for parameter in reversed(self._arriving):
            total = total + self._touched(parameter).sum()
        return total

    def _touched(self, parameter: torch.Tensor) -> torch.Tensor:
        if id(parameter) not in self._sparse:
            return parameter
        first = torch.zeros(1, dtype=torch.long, device=parameter.device)
        # DDP fails where a gradient is dense that it knows as sparse.
        return torch.nn.functional.embedding(first, parameter, sparse=True)


class CommHook:
    """A `comm_hook` of the settings; None: the mean over ranks, in memory where they are on one host."""

    def __init__(self, hook: Any) -> None:
        self._hook = hook
        self._state: Any = None

    def register(self, net: DistributedDataParallel) -> None:
        """Let DDP exchange gradients by the hook. A state that is made here begins empty, as buckets may be others."""
        if self._hook is None:
            host_memory(net)
            return
        state, function = _parts_in_rank(self._hook)
        self._state = state

        def exchange(_: Any, bucket: Any) -> Any:
            future = function(state, bucket)
            if not hasattr(future, "then"):  # Torch does not export the class of its own hooks' futures.
                raise BadSetting(
                    f"ddp_options['comm_hook'], {name_of(function)}, returned a {type(future).__name__}, and must "
                    "return a torch.futures.Future of the bucket's exchanged gradients.",
                    setting="ddp_options",
                )
            return future

        # Torch refuses annotations that are texts, and where there is no NCCL its hook for bfloat16, by the name.
        exchange.__annotations__ = {}
        net.register_comm_hook(None, exchange)

    def state_dict(self) -> dict[str, Any] | None:
        """Return this rank's state for a checkpoint; None for a hook without, or whose state can't be saved."""
        state = self._state
        if _is_power_sgd(state):
            values = {name: getattr(state, name) for name in (*_MEMORIES, *_COUNTS) if hasattr(state, name)}
            return {**values, "rng": state.rng.get_state()}
        return state.state_dict() if hasattr(state, "state_dict") else None

    def load_state_dict(self, values: Mapping[str, Any] | None, device: torch.device) -> None:
        """Restore what `state_dict` returned. Called when DDP has its buckets."""
        state = self._state
        if values is None or state is None:
            return
        if not _is_power_sgd(state):
            state.load_state_dict(values)
            return
        for name in _COUNTS:
            if name in values:
                setattr(state, name, values[name])
        for name in _MEMORIES:
            setattr(state, name, {bucket: tensor.to(device) for bucket, tensor in values[name].items()})
        state.rng.set_state(values["rng"])


def _parts_in_rank(hook: Any) -> tuple[Any, Any]:
    """Return state and function of a hook, with a state that is made here where the setting is a function for it."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    if hook == "power_sgd":
        return powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook
    if isinstance(hook, str):
        return None, {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}[hook]
    state, function = parts_of_hook(hook)
    return (state() if callable(state) else state), function


def _is_power_sgd(state: Any) -> bool:
    return type(state).__name__ == "PowerSGDState"


# ---- options


def refuse_unused(options: Mapping[str, Any] | None, unused: list[str]) -> None:
    """Raise BadSetting where the options say that all parameters get a gradient, and these don't."""
    if unused and (options or {}).get("find_unused_parameters") is False:
        raise BadSetting(
            f"{unused[0]!r} gets no gradient ({len(unused)} tensors in all), and ddp_options="
            '{"find_unused_parameters": False} says that every parameter gets one. Leave that option out, or freeze '
            "them: layer.requires_grad_(False).",
            setting="ddp_options",
            parameters=unused,
        )


def ddp_identity(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return, by name, the options that change more than the last bit of a sum."""
    options = options or {}
    hook = options.get("comm_hook")
    name = hook if hook is None or isinstance(hook, str) else name_of(parts_of_hook(hook)[1])
    values = {f"ddp_options {option}": options.get(option, default) for option, default in _OTHER_SUMS.items()}
    return values | {"ddp_options comm_hook": name}


def ddp_keywords(options: Mapping[str, Any] | None, *, find_unused_parameters: bool) -> dict[str, Any]:
    """Return the keywords of DDP. `find_unused_parameters`: where the options do not say it."""
    options = options or {}
    chosen = {name: options[name] for name in ("bucket_cap_mb", *DDP_FLAGS) if name in options}
    # With static_graph DDP finds them by itself.
    find_unused_parameters = find_unused_parameters and not options.get("static_graph")
    return {"gradient_as_bucket_view": True, "find_unused_parameters": find_unused_parameters, **chosen}
