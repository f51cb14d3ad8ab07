#!/bin/sh
# Makes .bench/NAME ready, the environment of a peer that the benchmarks compare with, and prints its Python:
# benchmarks/environments/NAME.txt by uv; horovod is built from its source, with what it lacks for today's torch.
# A stamp remembers what it was made from: a second call only looks. .bench may be a link, which several clones share.
set -eu
cd "$(dirname "$0")/.."
. scripts/pip-settings.sh
. scripts/horovod-build.sh

name=$1
needs=benchmarks/environments/$name.txt
overrides=benchmarks/environments/$name.overrides.txt
[ -f "$needs" ] || { echo "peers: there is no $needs" >&2; exit 1; }
mkdir -p .bench
place=$(cd .bench && pwd -P)/$name
stamp=$place/tritium-stamp
[ -f "$overrides" ] || overrides=/dev/null
made_from="$(cat "$needs" "$overrides" scripts/peers.sh scripts/horovod-build.sh | cksum) $place"

if [ "$(cat "$stamp" 2>/dev/null)" != "$made_from" ]; then
  lend_pip_settings
  echo "peers: $name, as $needs says" >&2
  .venv/bin/python -m venv --clear "$place" >&2
  .venv/bin/uv pip install --quiet --compile-bytecode --python "$place/bin/python" --overrides "$overrides" \
    --requirements "$needs" >&2
  case $name in
    horovod) build_horovod "$place" PYTORCH >&2 ;;
    horovod-tensorflow) build_horovod "$place" TENSORFLOW >&2 ;;
  esac
  echo "$made_from" >"$stamp"
fi
echo "$place/bin/python"
