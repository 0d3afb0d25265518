#!/usr/bin/env bash
# Run a command with a Docker engine of its own, and a registry to be had: `.ci/engine.sh make test-engine`.
# An engine that DOCKER_HOST names is used as it is. Otherwise Debian's docker.io and docker-registry are installed where
# they are missing, and dockerd runs with its own data root until the command ends. One such engine for each network
# namespace.
set -euo pipefail

if [[ -n "${DOCKER_HOST:-}" ]]; then
  exec "$@"
fi
if ! command -v dockerd >/dev/null || ! command -v docker-registry >/dev/null; then
  apt-get update --quiet=2
  DEBIAN_FRONTEND=noninteractive apt-get install --quiet=2 --yes --no-install-recommends -o DPkg::Lock::Timeout=300 \
    docker.io docker-registry >/dev/null
fi

# Not below the source tree: a build context must not hold an engine's files.
place=$(mktemp --directory "${TMPDIR:-/tmp}/kernelguard-engine.XXXXXX")
stop() {
  if [[ -f "$place/pid" ]]; then
    local pid
    pid=$(<"$place/pid")
    kill "$pid"
    for _ in $(seq 100); do
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.1
    done
  fi
  # What a container's network leaves mounted would keep the folder.
  findmnt --noheadings --output TARGET --list | awk -v place="$place/" 'index($0, place) == 1' | sort --reverse |
    xargs --no-run-if-empty umount
  rm -rf "$place"
}
trap stop EXIT

dockerd --data-root "$place/data" --exec-root "$place/exec" --host "unix://$place/docker.sock" \
  --pidfile "$place/pid" >"$place/log" 2>&1 &
for _ in $(seq 100); do
  docker --host "unix://$place/docker.sock" version >/dev/null 2>&1 && break
  sleep 0.1
done
if ! docker --host "unix://$place/docker.sock" version >/dev/null 2>&1; then
  tail --lines=20 "$place/log" >&2
  echo "dockerd did not come up" >&2
  exit 1
fi
export DOCKER_HOST="unix://$place/docker.sock"
"$@"
