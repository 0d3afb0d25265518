#!/usr/bin/env bash
# Two ranks train, one is killed, one goes on from their checkpoint, exports, and the export is loaded:
# `resume.sh [cuda|cpu] [options of train_resume.py]`. One JSON object on stdout; train_resume.py says what has to hold.
set -euo pipefail
device=${1:-cuda}
shift || true
root=$(cd "$(dirname "$0")/../.." && pwd)
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$root/train" TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "${PYTHON:-python3}" "$root/benchmarks/train_resume.py" --device "$device" --ranks 2 --resumed-ranks 1 "$@"
