#!/usr/bin/env bash
# From nothing to generated text: installs what is missing, builds, converts a small model and lets it write.
#   scripts/demo.sh [--quantize int8|int4] ["prompt"]
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

QUANTIZE=
case "${1:-}" in
  -h | --help) sed -n '2,3s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  --quantize)
    case "${2:-}" in
      int8 | int4) QUANTIZE=$2 ;;
      *) usage "scripts/demo.sh [--quantize int8|int4] [\"prompt\"]" ;;
    esac
    shift 2 ;;
  -*) usage "scripts/demo.sh [--quantize int8|int4] [\"prompt\"]" ;;
esac
PROMPT=${1:-"Once upon a time, in a small village by the sea, there lived"}

install_packages "${BUILD_PACKAGES[@]}"
install_torch
[ -e "$BUILD/build.ninja" ] || TESTS=-DGPTFAST_TESTS=OFF  # a tree that test.sh configured keeps its tests
build "$BUILD" ${TESTS:-}

MODEL=$ROOT/checkpoints/SmolLM2-135M-Instruct/model.pth
[ -e "$MODEL" ] || "$BUILD/bin/convert" "$(smollm2_gguf)" --output "$MODEL" --dtype bfloat16
if [ -n "$QUANTIZE" ]; then
  QUANTIZED=${MODEL%.pth}_$QUANTIZE.pth
  [ "$QUANTIZE" = int8 ] || QUANTIZED=${MODEL%.pth}_$QUANTIZE.g32.pth
  [ -e "$QUANTIZED" ] || "$BUILD/bin/quantize" --checkpoint_path "$MODEL" --mode "$QUANTIZE"
  MODEL=$QUANTIZED
fi

say "build/bin/generate --checkpoint_path ${MODEL#"$ROOT"/} --prompt \"$PROMPT\""
"$BUILD/bin/generate" --checkpoint_path "$MODEL" --prompt "$PROMPT" --num_samples 1 --max_new_tokens 120
