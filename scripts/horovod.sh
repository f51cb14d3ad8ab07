#!/bin/sh
# Makes .envs/horovod ready, in which the tests of framework="horovod" run, and prints its Python: Horovod, compiled
# (5 minutes on 2 cores), over everything that is in .venv. A stamp remembers what it was made from: a second call only looks.
set -eu
cd "$(dirname "$0")/.."
. scripts/pip-settings.sh
. scripts/horovod-build.sh

place=$PWD/.envs/horovod
stamp=$place/tritium-stamp
torch=$(.venv/bin/python -c 'import importlib.metadata as m, sys; print(m.version("torch"), *sys.version_info[:2])')
made_from="$(cat scripts/horovod.sh scripts/horovod-build.sh | cksum) $torch $place"

if [ "$(cat "$stamp" 2>/dev/null)" != "$made_from" ]; then
  lend_pip_settings
  echo "horovod: $place, compiled for torch and Python $torch" >&2
  .venv/bin/python -m venv --clear "$place" >&2
  purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
  # Not a plain path: the .pth files of .venv, by which it finds Tritium itself, count then, too.
  echo "import site; site.addsitedir('$(.venv/bin/python -c "$purelib")')" >"$("$place/bin/python" -c "$purelib")/tritium.pth"
  .venv/bin/uv pip install --quiet --python "$place/bin/python" cmake==3.31.6 >&2
  build_horovod "$place" PYTORCH >&2
  echo "$made_from" >"$stamp"
fi
echo "$place/bin/python"
