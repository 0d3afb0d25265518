#!/usr/bin/env bash
# The pages in a real browser: Debian's Chromium, driven by Playwright. Installs what is missing, and the zsh whose
# completion is tried later.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v chromium >/dev/null || ! command -v zsh >/dev/null; then
  apt-get update -q -o DPkg::Lock::Timeout=300
  apt-get install -q -y --no-install-recommends -o DPkg::Lock::Timeout=300 chromium fonts-dejavu-core zsh
fi
.venv/bin/python -m pip install --quiet --editable '.[browser]'
.venv/bin/python -m pytest -m browser tests/browser
