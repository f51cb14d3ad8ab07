"""What libraries write whatever they are told is left out of a rank's output, unless the user asks for it."""

from __future__ import annotations

import os

import pytest

import tritium as tr
from tritium.frameworks.noise import noise

# As TensorFlow 2.21 writes them on a machine without a GPU, and LightGBM 4.7.
AT_IMPORT = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795865898.162748   12079 port.cc:153] oneDNN custom operations are on. You may see other results
I0000 00:00:1795865898.231638   12079 cpu_feature_guard.cc:227] This TensorFlow binary is optimized to use available CPU
To enable the following instructions: AVX2 AVX512F FMA, in other operations, rebuild TensorFlow with the flags.
"""
NO_GPU = """\
I0000 00:00:1795865898.168110   12079 cudart_stub.cc:31] Could not find cuda drivers, GPU will not be used.
E0000 00:00:1795865906.917846   12077 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: (303)
"""
KINETO = "USDT:2026-11-29 09:09:16 21641:21641 SyncActivityProfilerHandler.cpp:52] profiler_start\n"
KINETO_NO_GPU = "ERROR:2026-11-29 09:09:16 21641:21641 DeviceProperties.cpp:50] gpuGetDeviceCount failed with code 35\n"
CONNECTING = "[LightGBM] [Info] Listening...\n[LightGBM] [Info] Finished linking network in 0.001684 seconds\n"
KEPT = """\
E0000 00:00:1795865906.917846   12077 collective_ops.cc:52] a real error
[LightGBM] [Info] Start training from score 0.5
it says: To enable the following instructions: AVX2
"""


def test_lines_that_tell_nothing_are_left_out() -> None:
    text = (AT_IMPORT + NO_GPU + CONNECTING + KEPT).encode()
    assert noise({}, gpus=False).sub(b"", text) == KEPT.encode()
    assert noise({}, gpus=True).sub(b"", text) == (NO_GPU + KEPT).encode(), (
        "who asks for a GPU is told that none is found"
    )
    assert noise({"TF_CPP_MIN_LOG_LEVEL": "3"}, gpus=False).sub(b"", text) == KEPT.encode()
    profiled = (KINETO + KINETO_NO_GPU + KEPT).encode()
    assert noise({}, gpus=False).sub(b"", profiled) == KEPT.encode()
    assert noise({}, gpus=True).sub(b"", profiled) == (KINETO_NO_GPU + KEPT).encode()
    asked = noise({"TF_CPP_MIN_LOG_LEVEL": "0"}, gpus=False)
    assert asked.sub(b"", text) == (AT_IMPORT + NO_GPU + KEPT).encode()


@pytest.mark.processes
@pytest.mark.parametrize("env", [{}, {"TF_CPP_MIN_LOG_LEVEL": "1"}])
def test_of_a_rank_of_any_framework(env: dict[str, str], capfd: pytest.CaptureFixture[str]) -> None:
    def writes() -> None:
        os.write(2, (AT_IMPORT + KEPT).encode())
        os.write(1, CONNECTING.encode())

    tr.launch(writes, on="driver", ranks=1, progress=False, output="all", env=env)
    out, err = capfd.readouterr()
    lines = [line.removeprefix("[rank 0] ") for line in (out + err).splitlines()]
    assert lines == ((AT_IMPORT if env else "") + KEPT).splitlines()
