#!/usr/bin/env bash
# The guarded launch on a bare machine with two GPUs; one command, one JSON object.
#
#   launch_h200.sh SITE KGSITE OUT [launch.py options] [-- SCRIPT ARGS]
#
# SITE holds triton, fla, liger and causal-conv1d (benchmarks/setup_h200.sh makes it), KGSITE what kernelguard itself
# needs (typer, rich, jsonschema, packaging, pyelftools, nvidia-ml-py). Run in the repository's root. Steps can be done
# in several calls on one machine: `--only verify,lock`, then `--only train,changed`; WORK keeps what they share.
set -euo pipefail
site=${1:?usage: launch_h200.sh SITE KGSITE OUT [options] [-- SCRIPT ARGS]} kgsite=${2:?} out=${3:?}
shift 3
work=${WORK:-/tmp/kernelguard-launch-bench}
mkdir -p "$work" "$out"
options=() script=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do options+=("$1"); shift; done
[ $# -eq 0 ] || shift
script=("$@")
if [ ${#script[@]} -eq 0 ]; then
  script=(-m kernelguard_train train/examples/qwen3.5-27b-slice.toml "train.output=$work/train" train.steps=6
    data.synthetic_samples=20000 checkpoint.every=3 checkpoint.at_end=true report.progress=false)
fi
export PYTHONPATH="$site:$kgsite:$PWD/src:$PWD/train" PYTHONUNBUFFERED=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
# A triton without its debug symbols is another build: its RECORD has to say so.
if [ -d "$site/triton" ]; then python3 benchmarks/two_gpus/rerecord.py "$site" triton; fi
exec python3 benchmarks/two_gpus/launch.py --out "$out" --site "$site" --work "$work" \
  --warm-cache "$work/triton-cache" "${options[@]}" -- "${script[@]}"
