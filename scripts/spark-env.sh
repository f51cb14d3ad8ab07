#!/bin/sh
# `spark-env.sh 4.0.5` makes .envs/spark-4.0.5 ready and prints its Python: another pyspark over everything that is in
# .venv, 0.5 GB. `spark-env.sh 4.2.1 3.13` makes .envs/spark-4.2.1-python3.13, with all of its own that `make matrix`
# needs, for another Python. A stamp remembers what it was made from: a second call only looks.
set -eu
cd "$(dirname "$0")/.."
. scripts/pip-settings.sh

version=$1 python=${2:-}
place=$PWD/.envs/spark-$version${python:+-python$python}
stamp=$place/tritium-stamp
made_from="$(cat scripts/spark-env.sh pyproject.toml constraints.txt | cksum) $(.venv/bin/python --version) $place"

if [ "$(cat "$stamp" 2>/dev/null)" != "$made_from" ]; then
  lend_pip_settings
  echo "spark: $place" >&2
  if [ -z "$python" ]; then
    .venv/bin/python -m venv --without-pip --clear "$place" >&2
    purelib='import sysconfig; print(sysconfig.get_path("purelib"))'
    # Not a plain path: the .pth files of .venv, by which it finds Tritium itself, count then, too.
    echo "import site; site.addsitedir('$(.venv/bin/python -c "$purelib")')" >"$("$place/bin/python" -c "$purelib")/tritium.pth"
    .venv/bin/uv pip install --quiet --no-deps --python "$place/bin/python" "pyspark==$version" >&2
  else
    .venv/bin/uv venv --quiet --clear --python "$python" "$place" >&2
    grep -v '^pyspark==' constraints.txt >"$place/constraints.txt"
    .venv/bin/uv pip install --quiet --python "$place/bin/python" --constraints "$place/constraints.txt" \
      --editable '.[spark,torch,tls]' "pyspark[connect]==$version" psutil pytest pytest-timeout hypothesis >&2
  fi
  .venv/bin/uv cache prune --quiet || echo "spark: uv's cache could not be pruned and stays as it is" >&2  # See setup.sh.
  echo "$made_from" >"$stamp"
fi
echo "$place/bin/python"
