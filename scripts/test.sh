#!/usr/bin/env bash
# Installs what is missing, builds and runs every test.
#   scripts/test.sh          the quick tests (those of the parsers under sanitizers too), the formatting, and clang-tidy over
#                            the sources that changed last
#   scripts/test.sh --full   besides: clients of other projects and load against the server, every test under sanitizers,
#                            the CUDA code for all architectures, clang-tidy over everything
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

FULL=
case "${1:-}" in
  "") ;;
  --full) FULL=1 ;;
  -h | --help) sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  *) usage "scripts/test.sh [--full]" ;;
esac

install_packages "${BUILD_PACKAGES[@]}" "${TEST_PACKAGES[@]}"

say "Checking the format"
cd "$ROOT"
git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs clang-format --dry-run -Werror

install_torch
build "$BUILD" -DGPTFAST_TESTS=ON

export GPTFAST_SMOLLM2=$BUILD/models/SmolLM2-135M-Instruct
[ -e "$GPTFAST_SMOLLM2/model.pth" ] ||
  "$BUILD/bin/convert" "$(smollm2_gguf)" --output "$GPTFAST_SMOLLM2/model.pth" --dtype float32 --quiet
GPTFAST_TOKENIZERS=$(published_tokenizers)
export GPTFAST_TOKENIZERS

say "Running the tests"
ctest --test-dir "$BUILD" --output-on-failure --no-tests=error

if [ -n "$FULL" ]; then
  install_packages curl
  say "Trying the server with clients of other projects, and under load"
  clients=$(client_env)/bin/python
  scripts/lm_eval.sh "$GPTFAST_SMOLLM2/model.pth" test/golden/eval
  "$clients" test/serve_clients.py "$BUILD/bin/serve" "$GPTFAST_SMOLLM2/model.pth"
  "$clients" test/serve_load.py "$BUILD/bin/serve" "$GPTFAST_SMOLLM2/model.pth" 180

  # Sanitizers see what valid files never show. LibTorch itself is not instrumented.
  say "Running the tests under AddressSanitizer and UndefinedBehaviorSanitizer"
  build "$BUILD/asan" -DGPTFAST_TESTS=ON -DGPTFAST_SANITIZE=ON -DGPTFAST_CUDA=OFF
  ctest --test-dir "$BUILD/asan" --output-on-failure --no-tests=error

  if command -v nvcc >/dev/null; then
    build "$BUILD/architectures" -DGPTFAST_TESTS=OFF -DGPTFAST_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=80-real;89-real;90"
  fi
fi

# recent_sources: what differs from the last commit, then what the last 20 commits changed (as far back as this clone goes),
# newest first. A changed header stands for the source of its name.
recent_sources() {
  local commits
  commits=$(git rev-list --first-parent --count HEAD)
  { git diff --name-only HEAD; git log --first-parent -m --name-only --format= "HEAD~$((commits > 20 ? 20 : commits - 1))..HEAD"; } |
    sed 's|^include/gptfast/\(.*\)\.h$|src/\1.cpp|; s|\.h$|.cpp|' | awk '!seen[$0]++'
}

say "Running clang-tidy"
# Configured, never built: without GCC's precompiled header, which clang cannot read, and with each source once.
cmake -S "$ROOT" -B "$BUILD/tidy" -G Ninja -DTORCH_ROOT="$TORCH_ROOT" -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON \
  -DGPTFAST_TESTS=ON -DGPTFAST_SANITIZE=ON -DGPTFAST_CUDA=OFF >/dev/null
# A source takes 10 to 20 s of CPU: the quick run looks at eight, a minute or two on two cores.
LIMIT=8
[ -n "$FULL" ] && LIMIT='$'
if [ -n "$FULL" ]; then git ls-files 'src/*.cpp' 'apps/*.cpp' 'test/*.cpp'; else recent_sources; fi |
  while read -r file; do
    [ "$file" = src/ops/cpu/isa.cpp ] && continue  # clang 14 cannot ask for f16c
    if grep -q "\"$ROOT/$file\"" "$BUILD/tidy/compile_commands.json"; then echo "$file"; fi
  done | sed -n "1,${LIMIT}p" | xargs -r -P "$(nproc)" -n 1 bash -c '
    echo "$1"
    found=$(clang-tidy --quiet -p "$0" --extra-arg=-Wno-unknown-warning-option "$1" 2>&1) || { echo "$found"; exit 1; }
  ' "$BUILD/tidy"
say "All tests passed"
