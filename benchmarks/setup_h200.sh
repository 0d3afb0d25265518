#!/usr/bin/env bash
# Makes the package folders that the ladder runs with, on a bare GPU machine.   setup_h200.sh PACKS SITE QLA
#
# PACKS holds wheels and *.txz archives; what a pack lacks stays as an earlier call left it, so that packs can be brought
# one after the other. SITE gets triton, flash-linear-attention, liger, causal-conv1d, mamba-ssm and TRL; QLA gets what
# qla*.txz holds (flash-qla, tilelang and what they need). With the stock Triton of torch 2.11 fla refuses its gated backward pass.
set -euo pipefail
packs=${1:?usage: setup_h200.sh PACKS SITE QLA} site=${2:?} qla=${3:?}
mkdir -p "$site" "$qla"
shopt -s nullglob
for archive in "$packs"/triton-*.txz "$packs"/conv*.txz "$packs"/mamba-*.txz "$packs"/trl-*.txz; do
  tar xf "$archive" -C "$site" &
done
for archive in "$packs"/qla*.txz; do tar xf "$archive" -C "$qla" & done
wheels=("$packs"/*.whl)
if [ ${#wheels[@]} -gt 0 ]; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "${wheels[@]}"
fi
wait
if [ -d "$site/triton/backends/nvidia/bin" ]; then chmod +x "$site"/triton/backends/nvidia/bin/*; fi
