#!/bin/sh
# Makes .bench/NAME ready, the environment of a peer that the benchmarks compare with, and prints its Python:
# benchmarks/environments/NAME.txt by uv; horovod is built from its source, with what it lacks for today's torch.
# A stamp remembers what it was made from: a second call only looks.
set -eu
cd "$(dirname "$0")/.."
. scripts/pip-settings.sh

name=$1
needs=benchmarks/environments/$name.txt
overrides=benchmarks/environments/$name.overrides.txt
[ -f "$needs" ] || { echo "peers: there is no $needs" >&2; exit 1; }
place=$PWD/.bench/$name
stamp=$place/tritium-stamp
[ -f "$overrides" ] || overrides=/dev/null
made_from="$(cat "$needs" "$overrides" scripts/peers.sh | cksum) $place"

build_horovod() {  # 0.28.1, the last release, asks for C++14; torch's headers need C++17
  source=$place/source
  rm -rf "$source" && mkdir -p "$source"
  "$place/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: \
    --no-build-isolation --dest "$source" horovod==0.28.1
  tar -xzf "$source"/horovod-*.tar.gz -C "$source" --strip-components=1
  sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 17/' "$source/CMakeLists.txt" "$source/horovod/torch/CMakeLists.txt"
  PATH="$place/bin:$PATH" HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITHOUT_TENSORFLOW=1 \
    HOROVOD_WITHOUT_MXNET=1 "$place/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps \
    --no-build-isolation "$source"
  rm -rf "$source"
}

if [ "$(cat "$stamp" 2>/dev/null)" != "$made_from" ]; then
  lend_pip_settings
  echo "peers: $name, as $needs says" >&2
  .venv/bin/python -m venv --clear "$place" >&2
  .venv/bin/uv pip install --quiet --compile-bytecode --python "$place/bin/python" --overrides "$overrides" \
    --requirements "$needs" >&2
  if [ "$name" = horovod ]; then build_horovod >&2; fi
  echo "$made_from" >"$stamp"
fi
echo "$place/bin/python"
