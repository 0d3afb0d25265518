#!/usr/bin/env bash
# Makes what a bare H200 machine (Python 3.12, torch 2.11+cu130, transformers 5.17, no package registry) lacks, as three
# folders of less than 58 MB each, because one transfer there is limited:   pack_h200.sh DEST CAUSAL_CONV1D_WHEEL
#
#   DEST/1  triton 3.7.1 without debug symbols and profiler files, flash-linear-attention, liger
#   DEST/2  causal-conv1d (the wheel that is given: none is published for that torch), mamba-ssm's Triton part, what
#           kernelguard itself needs (tools/), TRL (trl/)
#   DEST/3  flash-qla with tilelang, without what is for other devices
#
# setup_h200.sh unpacks each there. Needs pip, unzip, strip and xz here; PYTHON has to have a torch (pack_mamba.sh).
set -euo pipefail
dest=$(realpath -m "${1:?usage: pack_h200.sh DEST CAUSAL_CONV1D_WHEEL}")
conv=$(realpath "${2:?usage: pack_h200.sh DEST CAUSAL_CONV1D_WHEEL}")
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$dest"/1 "$dest"/2/tools "$dest"/2/trl "$dest"/3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fetch() {  # fetch FOLDER REQUIREMENT...
  local folder=$1 platforms=() one
  shift
  for one in manylinux_2_28 manylinux_2_27 manylinux_2_24 manylinux_2_17 manylinux2014 manylinux1; do
    platforms+=(--platform "${one}_x86_64")
  done
  python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    "${platforms[@]}" -d "$folder" "$@"
}
lean() {  # lean FOLDER: libraries without their symbols
  find "$1" -name '*.so*' -type f -exec strip --strip-unneeded {} + 2>/dev/null || true
}

fetch "$dest/1" fla-core==0.6.0 flash-linear-attention==0.6.0 liger-kernel==0.8.5
fetch "$work" triton==3.7.1
mkdir "$work/triton"
unzip -q "$work"/triton-*.whl -d "$work/triton"
(
  cd "$work/triton"
  rm -rf triton/backends/amd/lib/* triton/backends/nvidia/lib/cupti triton/backends/nvidia/bin/ptxas-blackwell \
    triton/instrumentation triton/plugins triton/_C/libproton.so
  lean triton/_C
  tar cf - . | xz -T0 -6 > "$dest/1/triton-3.7.1.txz"
)

cp "$conv" "$dest/2/"
PYTHON=${PYTHON:-python3} bash "$here/pack_mamba.sh" "$dest/2"
fetch "$dest/2/tools" 'typer>=0.26,<0.29' rich jsonschema pyelftools packaging nvidia-ml-py shellingham annotated-doc \
  markdown-it-py mdurl pygments attrs jsonschema-specifications referencing rpds-py click jinja2 markupsafe pyyaml
fetch "$dest/2/trl" trl==1.16.0 datasets multiprocess dill

fetch "$work" flash-qla==0.1.3 tilelang==0.1.15 'z3-solver>=4.13.0,<4.15.5' 'apache-tvm-ffi>=0.1.11,<0.1.13'
mkdir "$work/qla"
for wheel in "$work"/flash_qla-*.whl "$work"/tilelang-*.whl "$work"/z3_solver-*.whl "$work"/apache_tvm_ffi-*.whl; do
  unzip -qo "$wheel" -d "$work/qla"
done
(
  cd "$work/qla"
  # The solver comes twice under two names, and once more as a program.
  rm -rf z3_solver-*.data z3/bin
  if [ -e z3/lib/libz3.so.4.15 ]; then ln -sf libz3.so.4.15 z3/lib/libz3.so; fi
  # Compilers' sources and samples: of what tilelang brings along, it needs TVM's Python, and CUDA code CUTLASS' headers.
  find tilelang/3rdparty -mindepth 1 -maxdepth 1 ! -name cutlass ! -name tvm -exec rm -rf {} +
  rm -rf tilelang/3rdparty/tvm/src
  find tilelang/3rdparty/cutlass -mindepth 1 -maxdepth 1 ! -name include -exec rm -rf {} +
  lean .
  tar cf - . | xz -T0 -6 > "$dest/3/qla.txz"
)
du -sm "$dest"/1 "$dest"/2 "$dest"/3
