#!/bin/bash
# Prepares a model of the Hugging Face hub: scripts/prepare.sh REPO_ID
# Downloads it to checkpoints/REPO_ID where that folder is absent, converts it to model.pth and quantizes that to int8.
# Models that ask for an agreement need HF_TOKEN in the environment. GPTFAST_BIN names the folder of the programs (build/bin).
set -euo pipefail

if [[ $# -ne 1 || $1 == -* || $1 != */* ]]; then
  echo "usage: scripts/prepare.sh REPO_ID, for example meta-llama/Llama-2-7b-chat-hf" >&2
  exit 2
fi
cd "$(dirname "$0")/.."
readonly repo=$1 folder=checkpoints/$1 bin=${GPTFAST_BIN:-build/bin}

for program in convert quantize; do
  if [[ ! -x $bin/$program ]]; then
    echo "prepare.sh: $bin/$program is missing: build it first (scripts/test.sh, or cmake -B build && cmake --build build)" >&2
    exit 1
  fi
done

if [[ ! -d $folder ]]; then
  if command -v hf >/dev/null; then
    download=(hf download)
  elif command -v huggingface-cli >/dev/null; then
    download=(huggingface-cli download)
  else
    echo "prepare.sh: $folder is absent and there is no Hugging Face client to download it: pip install huggingface_hub," \
      "or put the files there" >&2
    exit 1
  fi
  # Under another name first, so that an interrupted download is not taken for a whole one; the next run resumes it.
  "${download[@]}" "$repo" --local-dir "$folder.part"
  mv "$folder.part" "$folder"
fi

"$bin/convert" --checkpoint_dir "$folder"
"$bin/quantize" --checkpoint_path "$folder/model.pth" --mode int8
