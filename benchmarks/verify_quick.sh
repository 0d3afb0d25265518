#!/usr/bin/env bash
# Measures `kernelguard verify` on a bare GPU machine with an empty and with a filled cache, then item 1 with that cache.
#
#   verify_quick.sh PACKS SITE OUT [SECONDS]
#
# PACKS is as for verify_h200.sh and holds new/ (triton 3.7.1, fla 0.6.0, liger, causal-conv1d). SITE is a folder with
# kernelguard's own requirements. Where one transfer is limited, run `verify_h200.sh PACKS NONE --items 0` for the first
# pack and this for the second: what a pack lacks stays as the earlier call left it.
set -euo pipefail
packs=${1:?usage: verify_quick.sh PACKS SITE OUT [SECONDS]}
site=$(realpath "${2:?usage: verify_quick.sh PACKS SITE OUT [SECONDS]}")
out=${3:?usage: verify_quick.sh PACKS SITE OUT [SECONDS]}
seconds=${4:-420}
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
export VERIFY_WORK=${VERIFY_WORK:-/tmp/verify-h200}
mkdir -p "$out"
began=$(date +%s)
PYTHONPATH=$site bash "$here/verify_h200.sh" "$packs" "$VERIFY_WORK/none" --items 0 --budget 5
rm -rf "$VERIFY_WORK/warm"
PYTHONUNBUFFERED=1 PYTHONPATH=$VERIFY_WORK/new:$site:$root/src python3 "$here/verify_quick.py" \
  --out "$out" --cache "$VERIFY_WORK/warm" --budget "$((seconds - 70))"
left=$((seconds - ($(date +%s) - began)))
if [ "$left" -gt 40 ]; then
  PYTHONUNBUFFERED=1 PYTHONPATH=$site python3 "$here/verify_h200.py" --out "$out" --work "$VERIFY_WORK" --items 1 \
    --budget "$left" --cache "$VERIFY_WORK/warm" --light 5
fi
