# To be read by other scripts: Horovod, from its source. It needs its framework and cmake < 4 in the environment.

build_horovod() {  # into the environment $1, for PYTORCH or TENSORFLOW ($2). 0.28.1 asks for C++14; torch needs C++17
  source=$1/source
  rm -rf "$source" && mkdir -p "$source"
  "$1/bin/python" -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: \
    --no-build-isolation --dest "$source" horovod==0.28.1
  tar -xzf "$source"/horovod-*.tar.gz -C "$source" --strip-components=1
  sed -i 's/CMAKE_CXX_STANDARD 14/CMAKE_CXX_STANDARD 17/' "$source/CMakeLists.txt" "$source/horovod/torch/CMakeLists.txt"
  without=$([ "$2" = PYTORCH ] && echo TENSORFLOW || echo PYTORCH)
  env PATH="$1/bin:$PATH" "HOROVOD_WITH_$2=1" "HOROVOD_WITHOUT_$without=1" HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1 \
    HOROVOD_WITHOUT_MPI=1 MAKEFLAGS="-j$(getconf _NPROCESSORS_ONLN)" \
    "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation "$source"
  rm -rf "$source"
}
