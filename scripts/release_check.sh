#!/bin/sh
# Tries the packages that `make wheel` has made as strangers get them: wheels and source archives of all three, each in a
# fresh environment of each Python, used by a small program, which a stranger's type checkers read, too.
# Settings: PYTHONS, the versions to try, or paths of Pythons; one that is not installed is left out, and said.
set -eu
cd "$(dirname "$0")/.."
uv=.venv/bin/uv

for extra in spark torch mpi keras tensorflow jax lightning huggingface lightgbm; do
  $uv pip compile --quiet --no-header --python-version 3.11 --extra "$extra" pyproject.toml >/dev/null
done
echo "release-check: each extra resolves"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
tried=""
cp scripts/release_smoke.py "$folder/stranger.py"
for version in ${PYTHONS:-3.10 3.11 3.13}; do
  environment="$folder/environment"
  if ! $uv venv --quiet --clear --python "$version" "$environment" 2>"$folder/why"; then
    echo "release-check: Python $version is left out: $(head -n 1 "$folder/why")"
    continue
  fi
  for kind in tar.gz whl; do
    $uv venv --quiet --clear --python "$version" "$environment"
    $uv pip install --quiet --python "$environment" dist/tritium-[0-9]*."$kind" \
      dist/tritium_compat-*."$kind" dist/tritium_flyte-*."$kind"
    (cd "$folder" && environment/bin/python stranger.py)
  done
  $uv pip install --quiet --python "$environment" mypy basedpyright
  (
    cd "$folder"
    environment/bin/mypy --strict stranger.py
    environment/bin/basedpyright --level error --pythonpath environment/bin/python stranger.py
  )
  tried="$tried $version"
done
[ -n "$tried" ] || { echo "release-check: no Python was tried" >&2; exit 1; }
echo "release-check: wheels and source archives work on Python$tried"
