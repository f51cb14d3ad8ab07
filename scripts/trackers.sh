#!/bin/sh
# Makes .envs/trackers ready, and prints it: wandb and trackio for PYTHONPATH, with only those of their packages that
# .venv lacks, as its pinned ones admit none but an old trackio.
set -eu
cd "$(dirname "$0")/.."
. scripts/pip-settings.sh

packages_in "$PWD/.envs/trackers" scripts/trackers.sh --no-deps \
  wandb==0.31.0 trackio==0.43.0 gradio-client==2.7.2 httptools==0.9.0 orjson==3.13.0 python-multipart==0.0.34 \
  uvloop==0.23.0 watchfiles==1.3.0 websockets==17.4 xxhash==4.1.0
echo "$PWD/.envs/trackers"
