#!/usr/bin/env bash
# Makes the package folders that measurements run with, on a bare GPU machine.   setup_h200.sh PACKS SITE QLA [TOOLS TRL]
#
# PACKS holds wheels and *.txz archives (pack_h200.sh makes three such folders); what a pack lacks stays as an earlier
# call left it, so that packs can be brought one after the other. SITE gets triton, flash-linear-attention, liger and
# causal-conv1d; `mamba` beside it mamba-ssm, which is no whole distribution and would fit no lock; QLA gets what qla*.txz holds (flash-qla, tilelang and what they need); TOOLS gets the
# wheels of PACKS/tools (what kernelguard itself needs), TRL those of PACKS/trl. With the stock Triton of torch 2.11 fla
# refuses its gated backward pass.
set -euo pipefail
packs=${1:?usage: setup_h200.sh PACKS SITE QLA [TOOLS TRL]} site=${2:?} qla=${3:?} tools=${4:-} trl=${5:-}
mamba=$(dirname "$site")/mamba
mkdir -p "$site" "$qla" "$mamba"
shopt -s nullglob
unpacking=()
unpack() {  # unpack FOLDER ARCHIVE...: beside each other; a machine that waits costs the same
  local folder=$1 archive
  shift
  for archive in "$@"; do
    tar xf "$archive" -C "$folder" &
    unpacking+=($!)
  done
}
install() {  # install FOLDER WHEEL...
  local folder=$1
  shift
  [ $# -gt 0 ] || return 0
  mkdir -p "$folder"
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$folder" "$@"
}
unpack "$site" "$packs"/triton-*.txz "$packs"/conv*.txz "$packs"/trl-*.txz
unpack "$mamba" "$packs"/mamba-*.txz
unpack "$qla" "$packs"/qla*.txz
install "$site" "$packs"/*.whl
if [ -n "$tools" ]; then install "$tools" "$packs"/tools/*.whl; fi
if [ -n "$trl" ]; then install "$trl" "$packs"/trl/*.whl; fi
for process in "${unpacking[@]}"; do wait "$process"; done
# As in a prepared image: without bytecode each import of a package compiles it anew, wherever it cannot be written.
python3 -m compileall -q -j 0 "$site" "$qla" "$mamba" ${tools:+"$tools"} ${trl:+"$trl"} > /dev/null 2>&1 || true
if [ -d "$site/triton/backends/nvidia/bin" ]; then chmod +x "$site"/triton/backends/nvidia/bin/*; fi
