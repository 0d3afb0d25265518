#!/usr/bin/env bash
# Sets up the three package folders on a bare GPU machine and runs verify_h200.py there.
#
#   verify_h200.sh PACKS OUT [verify_h200.py options]
#
# PACKS is a folder of wheels and of *.txz archives (a triton without its debug symbols, too large as a wheel):
#   new/    triton-3.7.1.txz, fla_core-0.6.0, flash_linear_attention-0.6.0, liger_kernel, causal_conv1d-1.7.0
#   old/    fla_core-0.4.1
# The stock folder gets fla 0.6.0 alone, so that the machine's own triton is used. What a pack lacks stays as an earlier
# call left it, so that two packs can be brought one after the other where one transfer is limited: first one without
# triton for `--items 2,3`, then one with it for `--items 1,4`.
set -euo pipefail
packs=${1:?usage: verify_h200.sh PACKS OUT [options]}
out=${2:?usage: verify_h200.sh PACKS OUT [options]}
shift 2
here=$(cd "$(dirname "$0")" && pwd)
work=${VERIFY_WORK:-/tmp/verify-h200}
mkdir -p "$work/new" "$work/stock" "$work/old" "$work/out" "$out"

shopt -s nullglob
install() {  # install FOLDER WHEEL...
  local folder=$1
  shift
  [ $# -gt 0 ] || return 0
  python3 -m pip install -q --no-index --no-deps --no-cache-dir --no-compile --upgrade --target "$folder" "$@"
}
for archive in "$packs"/new/*.txz; do
  tar xf "$archive" -C "$work/new"
done
if [ -d "$work/new/triton/backends/nvidia/bin" ]; then
  chmod +x "$work"/new/triton/backends/nvidia/bin/*
fi
install "$work/new" "$packs"/new/*.whl
install "$work/stock" "$packs"/new/fla_core-*.whl "$packs"/new/flash_linear_attention-*.whl
install "$work/old" "$packs"/old/*.whl
move() {  # move FROM TO: the documents of earlier calls on the same machine stay beside the new ones
  local documents=("$1"/*.json "$1"/*.json.gz)
  [ ${#documents[@]} -eq 0 ] || cp -f "${documents[@]}" "$2/"
}
move "$work/out" "$out"
trap 'move "$out" "$work/out"' EXIT
PYTHONUNBUFFERED=1 python3 "$here/verify_h200.py" --out "$out" --work "$work" "$@" 2>&1 | tee "$out/verify-h200.log"
