#!/usr/bin/env bash
# Slurm TaskProlog: holds the job's environment against its lock, and its model against the environment, on each node,
# before the job's own script starts. Jobs that name neither are none of its business.
#
#   TaskProlog=/etc/slurm/kernelguard-prolog.sh      in slurm.conf
#   KERNELGUARD_LOCK, KERNELGUARD_MODEL, KERNELGUARD_PYTHON      set by the user, who exports them to the job
#
# It ends with kernelguard's exit code: 1 a definite no, 3 cannot be determined. Slurm then ends the job with that code.
set -euo pipefail

# Once on each node, not once for each of its ranks.
[ "${SLURM_LOCALID:-0}" = 0 ] || exit 0

# Slurm throws the prolog's stderr away; lines of its stdout that begin with `print` go to the job's output.
guard() {
  kernelguard "$@" 2>&1 | sed 's/^/print /'
}

python=${KERNELGUARD_PYTHON:-python}
if [ -n "${KERNELGUARD_LOCK:-}" ]; then
  guard lock --check "$KERNELGUARD_LOCK" --python "$python"
fi
if [ -n "${KERNELGUARD_MODEL:-}" ]; then
  guard check "$KERNELGUARD_MODEL" --python "$python" --level import
fi
