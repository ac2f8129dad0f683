#!/usr/bin/env bash
# Installs what the project needs and a fresh machine lacks: uv, a few Debian packages, the Python environment.
# usage: setup.sh [uv sync options]
set -euo pipefail
cd "$(dirname "$0")"

say() { echo "setup: $*" >&2; }

missing=()
# Mooncake's wheels link against the RDMA user library, also on machines without RDMA.
[ -e /usr/lib/x86_64-linux-gnu/libibverbs.so.1 ] || [ -e /usr/lib/aarch64-linux-gnu/libibverbs.so.1 ] || missing+=(libibverbs1)
command -v openssl >/dev/null || missing+=(openssl)
command -v uv >/dev/null || python3 -m pip --version >/dev/null 2>&1 || missing+=(python3-pip)
# The worker compiles its CPU kernels at its first start; without a compiler it computes with torch, several times slower.
if [ "$(uname -m)" = x86_64 ] && ! command -v g++ >/dev/null; then
  if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then missing+=(g++); else say "no g++: the worker will compute with torch"; fi
fi
if [ ${#missing[@]} -gt 0 ]; then
  if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    say "these Debian packages are needed: ${missing[*]}. Install them, then run this again."
    exit 3
  fi
  say "installing ${missing[*]}"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
fi

if ! command -v uv >/dev/null; then
  say "installing uv"
  python3 -m pip install -q --root-user-action=ignore uv 2>/dev/null ||
    python3 -m pip install -q --break-system-packages --root-user-action=ignore uv
fi
command -v uv >/dev/null || { say "uv was installed but is not on PATH: add $(python3 -m site --user-base)/bin to it"; exit 3; }

# --inexact: what a benchmark added beside it stays.
uv sync --quiet --frozen --inexact "$@"
