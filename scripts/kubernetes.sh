#!/bin/sh
# Compiles the Kubernetes of tests/kubernetes_cluster.py from Go modules, once for a version of its source, and prints its
# path: 11 minutes of one core and 4 GB of Go's caches the first time (JOBS=2: of two cores).
set -eu
cd "$(dirname "$0")/.."
binary=$(cd tests && ../.venv/bin/python -c 'import kubernetes_cluster as k; print(k.HYPER)')
if [ ! -x "$binary" ]; then
  command -v go >/dev/null || { echo "make kubernetes needs Go, 1.25 or newer (https://go.dev/dl)" >&2; exit 1; }
  version=$(sed -n 's|^\tk8s.io/kubernetes v||p' tests/kubernetes/hyper/go.mod)
  minor=${version#1.}
  name=k8s.io/component-base/version
  mkdir -p "$(dirname "$binary")"
  echo "kubernetes $version: compiled into $binary" >&2
  (cd tests/kubernetes/hyper && CGO_ENABLED=0 GOMAXPROCS=${JOBS:-1} nice -n 10 go build -p "${JOBS:-1}" -trimpath -o "$binary.new" \
    -ldflags "-s -w -X $name.gitVersion=v$version -X $name.gitMajor=1 -X $name.gitMinor=${minor%%.*}" .) >&2
  mv "$binary.new" "$binary"
fi
echo "$binary"
