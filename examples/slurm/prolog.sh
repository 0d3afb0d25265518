#!/usr/bin/env bash
# Slurm TaskProlog: holds the job's environment against its lock, and its model against the environment, on each node,
# before the job's own script starts. Jobs that name neither are none of its business.
#
#   TaskProlog=/etc/slurm/kernelguard-prolog.sh      in slurm.conf
#   KERNELGUARD_LOCK, KERNELGUARD_MODEL, KERNELGUARD_PYTHON      set by the user, who exports them to the job
#
# It ends with kernelguard's exit code: 1 a definite no, 3 cannot be determined. Slurm then ends the task.
set -euo pipefail

python=${KERNELGUARD_PYTHON:-python}
if [ -n "${KERNELGUARD_LOCK:-}" ]; then
  kernelguard lock --check "$KERNELGUARD_LOCK" --python "$python" >&2
fi
if [ -n "${KERNELGUARD_MODEL:-}" ]; then
  kernelguard check "$KERNELGUARD_MODEL" --python "$python" --level import >&2
fi
