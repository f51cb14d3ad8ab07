"""`ddp_options`: what is wrong with them, and what they are for DDP (any process)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from tritium.arguments import argument_names, name_of, takes
from tritium.errors import BadSetting
from tritium.hints import suggest
from tritium.ml.fields import is_number

HOOKS = ("fp16", "bf16", "power_sgd")
_OF_DDP = ("static_graph", "find_unused_parameters", "broadcast_buffers", "gradient_as_bucket_view")
_FLAGS = (*_OF_DDP, "sync_batch_norm")
NAMES = ("bucket_cap_mb", *_FLAGS, "comm_hook")
_OTHER_SUMS = {"sync_batch_norm": False, "broadcast_buffers": True}  # option → default, where it changes what is learnt

NEEDS_GPUS = (
    'ddp_options={"sync_batch_norm": True} needs ranks on GPUs, as torch.nn.SyncBatchNorm can\'t compute on a CPU. Ask '
    "for gpus=1, or leave it out: BatchNorm then sees a rank's own batch."
)


def ddp_problems(given: Any) -> Iterator[str]:
    """Yield what is wrong with `ddp_options`."""
    if given is None:
        return
    if not isinstance(given, Mapping):
        yield f'ddp_options={given!r} must be a mapping from options to values: {{"bucket_cap_mb": 50}}.'
        return
    for name, value in given.items():
        if name not in NAMES:
            yield f"ddp_options has no {name!r}.{suggest(str(name), NAMES)}"
        elif name == "comm_hook":
            yield from _hook_problems(value)
        elif name == "bucket_cap_mb" and not (is_number(value) and 0 < value < math.inf):
            yield f"ddp_options[{name!r}] is {value!r}, and must be a number of megabytes above 0."
        elif name in _FLAGS and not isinstance(value, bool):
            yield f"ddp_options[{name!r}] is {value!r}, and must be True or False."
    if given.get("static_graph") is True and given.get("find_unused_parameters") is True:
        yield (
            "ddp_options: with static_graph DDP finds the unused parameters in the first step; leave out "
            "find_unused_parameters."
        )


def _hook_problems(given: Any) -> Iterator[str]:
    if given is None or (isinstance(given, str) and given in HOOKS):
        return
    known = (
        f"Choose one of {', '.join(map(repr, HOOKS))}, or give a function (state, bucket) -> Future, or (state, it)."
    )
    if isinstance(given, str):
        yield f"ddp_options['comm_hook'] is {given!r}, which is unknown.{suggest(given, HOOKS)}"
        return
    if isinstance(given, tuple | list) and len(given) != 2:
        yield f"ddp_options['comm_hook'] has {len(given)} parts. {known}"
        return
    state, hook = parts_of_hook(given)
    if not callable(hook):
        yield f"ddp_options['comm_hook'] is {hook!r}, and no function. {known}"
    elif not takes(hook, 2):
        arguments = ", ".join(argument_names(hook)) or "nothing"
        yield f"ddp_options['comm_hook'], {name_of(hook)}, takes {arguments}; it is called with (state, bucket)."
    elif type(state).__name__ == "PowerSGDState":
        yield (
            "ddp_options['comm_hook'] has as its state a PowerSGDState, which only a rank can make. Give a function "
            "that makes it there: (lambda: PowerSGDState(None, 2), powerSGD_hook)."
        )


def parts_of_hook(given: Any) -> tuple[Any, Any]:
    """Return state and function of a `comm_hook` that is no name."""
    return tuple(given) if isinstance(given, tuple | list) else (None, given)


def refuse_unused(given: Mapping[str, Any] | None, unused: list[str]) -> None:
    """Raise BadSetting where the options say that all parameters get a gradient, and these don't."""
    if unused and (given or {}).get("find_unused_parameters") is False:
        raise BadSetting(
            f"{unused[0]!r} gets no gradient ({len(unused)} tensors in all), and ddp_options="
            '{"find_unused_parameters": False} says that every parameter gets one. Leave that option out, or freeze '
            "them: layer.requires_grad_(False).",
            setting="ddp_options",
            parameters=unused,
        )


def ddp_identity(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return, by name, the options that change more than the last bit of a sum."""
    options = given or {}
    hook = options.get("comm_hook")
    found = {f"ddp_options {name}": options.get(name, default) for name, default in _OTHER_SUMS.items()}
    named = hook if hook is None or isinstance(hook, str) else name_of(parts_of_hook(hook)[1])
    return found | {"ddp_options comm_hook": named}


def ddp_keywords(given: Mapping[str, Any] | None, *, find_unused_parameters: bool) -> dict[str, Any]:
    """Return the keywords of DDP. `find_unused_parameters`: where the options do not say it."""
    options = given or {}
    chosen = {name: options[name] for name in ("bucket_cap_mb", *_OF_DDP) if name in options}
    found = find_unused_parameters and not options.get("static_graph")  # which finds them by itself
    return {"gradient_as_bucket_view": True, "find_unused_parameters": found, **chosen}
