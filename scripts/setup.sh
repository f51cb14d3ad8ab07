#!/bin/sh
# Makes .venv ready to work in: the system's python3 makes it, pip puts uv into it, uv puts in the pinned
# dependencies and Tritium itself (editable). `setup.sh demo` puts in only what the demo needs; without it, all that
# the tests need, tritium-compat and tritium-flyte among it. A stamp remembers what is there and what it was made from: a second call only looks.
# Settings: PYTHON (which Python makes .venv where there is none), JAVA_HOME, pip's and uv's own configuration.
set -eu
cd "$(dirname "$0")/.."
. scripts/pip-settings.sh

stop() {  # what is wrong, what was found, then one command a platform
  printf '\nsetup: %s\n  found: %s\n\n  Debian, Ubuntu   %s\n  macOS            %s\n  conda            %s\n\n' "$@" >&2
  exit 1
}

check_java() {  # Spark takes $JAVA_HOME before the PATH, so this does too
  java="${JAVA_HOME:+$JAVA_HOME/bin/}java"
  version=""
  if command -v "$java" >/dev/null 2>&1; then
    version=$("$java" -version 2>&1 | sed -n 's/.* version "\([^"]*\)".*/\1/p' | head -n 1)
    found="Java ${version:-that says no version}, $(command -v "$java")"
  else
    found="no $java${JAVA_HOME:+ (from JAVA_HOME)}"
  fi
  number=${version#1.}  # Java 8 calls itself 1.8
  number=${number%%[!0-9]*}
  [ "${number:-0}" -ge 17 ] || stop "Spark needs Java 17 or newer." "$found" \
    "sudo apt-get install openjdk-17-jre-headless    (Debian 13: openjdk-21-jre-headless)" \
    "brew install --cask temurin@17" \
    "conda install -c conda-forge openjdk=17"
}

check_python() {
  python="${PYTHON:-python3}"
  command -v "$python" >/dev/null 2>&1 && found="$("$python" --version 2>&1), $(command -v "$python")" || found="no $python"
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
    stop "Tritium needs Python 3.10 or newer; name another one with PYTHON=/path/to/python3." "$found" \
      "sudo apt-get install python3 python3-venv" "brew install python@3.12" "conda install -c conda-forge python=3.12"
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    stop "this Python can't make a virtual environment." "$found, without ensurepip or venv" \
      "sudo apt-get install python3-venv" "brew install python@3.12" "conda install -c conda-forge python=3.12"
}

part=${1:-dev}
case $part in
  demo) packages="" contents="PyTorch and Spark: 5.6 GB, 3.9 of them PyTorch's CUDA libraries" ;;
  dev) packages="--editable packages/tritium-compat --editable packages/tritium-flyte" contents="all frameworks: about 10 GB" ;;
  *) echo "setup: $part: it is demo, or dev" >&2; exit 2 ;;
esac

check_java
made_from=$(cat pyproject.toml packages/*/pyproject.toml constraints.txt scripts/setup.sh scripts/pip-settings.sh | cksum)
made_from="$made_from $(pwd)"
stamp=.venv/tritium-stamp
there=$(cat "$stamp" 2>/dev/null) || there=""
# What the tests need includes what the demo needs.
if [ -x .venv/bin/python ] && { [ "$there" = "dev $made_from" ] || [ "$there" = "$part $made_from" ]; }; then exit 0; fi

if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
  check_python
  echo "setup: $("$python" --version), making .venv"
  "$python" -m venv --clear .venv
fi
echo "setup: uv"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
lend_pip_settings
echo "setup: the dependencies of constraints.txt ($contents the first time)"
# Compiled now, once: every rank imports torch, and where Python may not write bytecode each would compile it again.
.venv/bin/uv pip install --quiet --compile-bytecode --python .venv/bin/python --constraints constraints.txt \
  --build-constraints constraints.txt --editable ".[$part]" $packages
# PySpark comes as source. Where a registry's answers may not be kept, uv unpacks and builds it anew for each environment,
# 2 GB a time, and keeps every one: what nothing refers to any more goes, or a fresh clone a day fills the disk.
.venv/bin/uv cache prune --quiet || echo "setup: uv's cache could not be pruned and stays as it is" >&2
echo "$part $made_from" >"$stamp"
echo "setup: done"
