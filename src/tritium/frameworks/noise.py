"""Lines that libraries write whatever their settings, and that are left out of output (supervisor, rank)."""

from __future__ import annotations

import re
from collections.abc import Mapping

_LEVEL = "TF_CPP_MIN_LOG_LEVEL"
# TensorFlow 2.21 writes these at its import, whatever TF_CPP_MIN_LOG_LEVEL says: that it uses oneDNN.
_TENSORFLOW = (
    rb"WARNING: All log messages before absl::InitializeLog",
    rb"[IWE]\d{4} \S+ +\d+ (?:port|cpu_feature_guard)\.cc:",
    rb"To enable the following instructions: ",
)
# It finds no GPU, which matters only to a user who has asked for one.
_NO_GPU = (rb"[IWE]\d{4} \S+ +\d+ (?:cudart_stub|cuda_platform)\.cc:",)
# Kineto, torch's profiler, writes these at its start and end (torch 2.13), the second where it finds no GPU.
_KINETO = (rb"USDT:\S+ \S+ \S+ SyncActivityProfilerHandler\.cpp:",)
_KINETO_NO_GPU = (rb"ERROR:\S+ \S+ \S+ DeviceProperties\.cpp:",)
# LightGBM writes the first in a thread of its own, to which no verbosity applies, the second when ranks part.
_LIGHTGBM = (rb"\[LightGBM\] \[Info\] (?:Listening\.\.\.|Finished linking network in )",)


def noise(env: Mapping[str, str], *, gpus: bool) -> re.Pattern[bytes]:
    """Return the pattern of whole lines to leave out of a rank's output.

    env  : the rank's. TF_CPP_MIN_LOG_LEVEL of 0 or 1 there asks for TensorFlow's lines.
    gpus : whether the rank has GPUs of its own.
    """
    lines = _LIGHTGBM + _KINETO + (() if gpus else _KINETO_NO_GPU)
    if env.get(_LEVEL, "2") not in ("0", "1"):
        lines += _TENSORFLOW + (() if gpus else _NO_GPU)
    return re.compile(rb"^(?:" + b"|".join(lines) + rb").*\n?", re.MULTILINE)
