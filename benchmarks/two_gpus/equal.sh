#!/usr/bin/env bash
# Two ranks against one, in float32 and bfloat16: `equal.sh [cuda|cpu]`, from anywhere. One JSON object on stdout; what is
# compared, and how far it may differ, stands in equal.py. PYTHON names the interpreter; on a GPU packages may come with
# PYTHONPATH.
set -euo pipefail
device=${1:-cuda}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
python=${PYTHON:-python3}
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$root/train" TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -c 'import sys, pathlib; sys.path.append(sys.argv[1]); import train_resume; train_resume.make_model(pathlib.Path(sys.argv[2]), sys.argv[3])' \
  "$root/benchmarks" "$work/model" "$device"
go() {  # go NAME RANKS DTYPE
  "$python" -m torch.distributed.run --standalone --nproc-per-node "$2" "$here/equal.py" run --dtype "$3" \
    --device "$device" --name "$1" --model "$work/model" --work "$work" >&2
}
for dtype in float32 bfloat16; do
  go one 1 "$dtype"
  go again 1 "$dtype"
  go two 2 "$dtype"
done
"$python" "$here/equal.py" compare "$work"
