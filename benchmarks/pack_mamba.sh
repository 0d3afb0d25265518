#!/usr/bin/env bash
# Brings mamba-ssm's Triton kernels (Mamba-2) to a machine that cannot compile its CUDA part.   pack_mamba.sh DEST
#
# Makes DEST/mamba-VERSION.txz for setup_h200.sh out of the published source: mamba_ssm without what it compiles. That part
# is Mamba-1's scan; mamba_ssm imports it unasked, so a module of its name stands there, and says so when it is called.
set -euo pipefail
dest=$(cd "${1:?usage: pack_mamba.sh DEST}" && pwd) version=2.3.2.post1
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
# Its setup.py imports torch even to be asked for its metadata: PYTHON has to have one.
MAMBA_SKIP_CUDA_BUILD=TRUE "$python" -m pip download --quiet --no-deps --no-build-isolation --no-binary :all: \
  "mamba-ssm==$version"
tar xzf mamba_ssm-*.tar.gz
mkdir site
mv mamba_ssm-*/mamba_ssm site/
mkdir "site/mamba_ssm-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: mamba-ssm\nVersion: %s\n' "$version" > "site/mamba_ssm-$version.dist-info/METADATA"
cat > site/selective_scan_cuda.py <<'PYTHON'
"""Stands for the compiled scan of Mamba-1, which this copy of mamba_ssm was packed without."""


def __getattr__(name):
    raise RuntimeError(f"selective_scan_cuda.{name}: mamba_ssm was packed without its compiled part (pack_mamba.sh)")
PYTHON
tar cJf "$dest/mamba-$version.txz" -C site .
