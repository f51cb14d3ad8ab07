"""The defaults of torch, which a program may change and a rank has as in a new process (driver)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Let torch have the defaults of a new process within the block, whatever this process has set.

    Its default dtype and device, and that it records gradients. Does nothing where torch is not imported.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    with ExitStack() as stack:
        if (dtype := torch.get_default_dtype()) != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, dtype)
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield
