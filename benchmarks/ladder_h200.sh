#!/usr/bin/env bash
# The ladder on a bare H200, whole, within five minutes:   ladder_h200.sh PACKS OUT [ladder.py options]
#
# PACKS holds triton-3.7.1.txz and the wheels of fla-core 0.6.0, flash-linear-attention 0.6.0 and liger-kernel 0.8.5, and,
# where there is one, cache.bin: a tar of `tri` and `ind`, the Triton and Inductor caches that an earlier call left, so
# that no rung has to tune. Into OUT go ladder-h200.json, .md and .svg, power.csv (the GPU's power and clock twice a
# second) and ladder-h200.log. It uses the first GPU that it sees.
#
# With --record it only records one step each of naive, fused and packed, four layers, for the tests of `kernelguard
# profile`:   ladder_h200.sh PACKS OUT --name traces-h200 --record
# and, here:  for name in naive fused packed; do
#               python tools/trim_trace.py OUT/$name.json.gz benchmarks/results/trace-$name-h200.json.gz; done
set -euo pipefail
packs=${1:?usage: ladder_h200.sh PACKS OUT [ladder.py options]} out=${2:?}
shift 2
here=$(cd "$(dirname "$0")" && pwd)
work=${LADDER_WORK:-/tmp}
export PYTHONUNBUFFERED=1 CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export TRITON_CACHE_DIR=$work/tri TORCHINDUCTOR_CACHE_DIR=$work/ind
if [ -e "$packs/cache.bin" ]; then tar xf "$packs/cache.bin" -C "$work"; fi
bash "$here/setup_h200.sh" "$packs" "$work/site" "$work/qla"
cp -r "$work/mamba/." "$work/site/"
nvidia-smi --id="$CUDA_VISIBLE_DEVICES" --query-gpu=timestamp,power.draw,power.limit,clocks.sm,temperature.gpu \
  --format=csv,nounits -lms 500 > "$out/power.csv" &
watcher=$!
trap 'kill "$watcher"' EXIT
python3 "$here/ladder.py" --out "$out" --name ladder-h200 --site "$work/site" --packs 8 --budget 240 --hard 285 --limit 75 \
  "$@" > "$out/ladder-h200.log" 2>&1 || echo "ladder.py: exit code $?"
grep -vE '^\||^`|^$' "$out/ladder-h200.log" | cut -c1-700 | head -60
