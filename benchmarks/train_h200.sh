#!/usr/bin/env bash
# One GPU: a run that is killed and goes on, its export, and what recompute=auto chooses for ten layers of the published
# 27B: `train_h200.sh [options of train_resume.py]`. One JSON object on stdout. Packages the machine lacks come with
# PYTHONPATH, Triton's compiled kernels with TRITON_CACHE_DIR.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$root/train" TOKENIZERS_PARALLELISM=false
exec "${PYTHON:-python3}" "$root/benchmarks/train_resume.py" --device cuda --slice-layers 10 "$@"
