#!/usr/bin/env bash
# Scores a model with the unmodified lm-evaluation-harness from PyPI over HTTP, and with `eval`, and compares:
#   scripts/lm_eval.sh CHECKPOINT DATA_DIR [TASK...]
# DATA_DIR holds TASK.jsonl as for `eval`. Environment: LM_EVAL_VENV, a virtual environment that has lm_eval[api] (else
# one is made under build/); LIMIT, items of each task (100); CONTEXT, tokens of the longest input (2048); PRECISION (float32).
# Needs the built programs, and no network once the environment is there.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

[ $# -ge 2 ] || { sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
CHECKPOINT=$1
DATA_DIR=$(cd "$2" && pwd)
shift 2
TASKS=("$@")
[ ${#TASKS[@]} -gt 0 ] || TASKS=(arc_challenge arc_easy hellaswag lambada_openai piqa wikitext winogrande)
LIMIT=${LIMIT:-100}
CONTEXT=${CONTEXT:-2048}
PRECISION=${PRECISION:-float32}
PYTHON=${LM_EVAL_VENV:-$(client_env)}/bin/python
WORK=$(mktemp -d)
cleanup() {
  [ -z "${SERVER:-}" ] || kill "$SERVER" 2>/dev/null || true
  rm -rf "$WORK"
}
trap cleanup EXIT

# The harness's own tasks, with the data from files instead of the hub.
"$PYTHON" - "$DATA_DIR" "$WORK/tasks" "${TASKS[@]}" <<'PY'
import pathlib, sys
import lm_eval
package = pathlib.Path(lm_eval.__file__).parent / "tasks"
files = {"arc_challenge": ("arc/arc_challenge.yaml", "test"), "arc_easy": ("arc/arc_easy.yaml", "test"),
         "hellaswag": ("hellaswag/hellaswag.yaml", "validation"), "lambada_openai": ("lambada/lambada_openai.yaml", "test"),
         "piqa": ("piqa/piqa.yaml", "validation"), "wikitext": ("wikitext/wikitext.yaml", "test"),
         "winogrande": ("winogrande/default.yaml", "validation")}
data, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
out.mkdir()
for task in sys.argv[3:]:
    if task not in files:
        sys.exit(f"unknown task '{task}'; known: {', '.join(files)}")
    file, split = files[task]
    (out / f"{task}.yaml").write_text(
        f"include: {package / file}\ntask: file_{task}\ntag: []\ndataset_path: json\ndataset_name: null\n"
        f"training_split: null\n{split}_split: {split}\n"
        f"{'validation' if split == 'test' else 'test'}_split: null\n"
        f"dataset_kwargs: {{data_files: {{{split}: {data / (task + '.jsonl')}}}}}\n")
PY

"$BUILD/bin/serve" --checkpoint_path "$CHECKPOINT" --precision "$PRECISION" --parallel 4 --ctx_size "$CONTEXT" --port 0 --json >"$WORK/serve.json" &
SERVER=$!
until [ -s "$WORK/serve.json" ]; do
  kill -0 "$SERVER" 2>/dev/null || fail "the server did not start"
  sleep 0.2
done
port() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["port"])' "$WORK/serve.json"; }
URL=http://127.0.0.1:$(port)

say "lm_eval, asking $URL"
# max_length: what the server takes, one more token than the context, and the one that it generates.
HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 HF_DATASETS_CACHE=$WORK/cache TRANSFORMERS_OFFLINE=1 OPENAI_API_KEY=none \
  "$PYTHON" -m lm_eval run --model local-completions --include_path "$WORK/tasks" --limit "$LIMIT" \
  --tasks "$(printf 'file_%s,' "${TASKS[@]}" | sed 's/,$//')" --output_path "$WORK/results" \
  --model_args "model=gptfast,base_url=$URL/v1/completions,tokenizer_backend=remote,tokenized_requests=True,max_length=$((CONTEXT + 2)),num_concurrent=4" \
  2>"$WORK/lm_eval.log" || { tail -20 "$WORK/lm_eval.log" >&2; fail "lm_eval failed"; }
kill "$SERVER"
wait "$SERVER" || fail "the server ended with status $?"
SERVER=

say "eval"
"$BUILD/bin/eval" --checkpoint_path "$CHECKPOINT" --precision "$PRECISION" --data_dir "$DATA_DIR" --limit "$LIMIT" \
  --max_seq_length "$CONTEXT" --json --quiet --tasks "${TASKS[@]}" >"$WORK/eval.json"

python3 - "$WORK" <<'PY'
import glob, json, sys
harness = json.load(open(glob.glob(sys.argv[1] + "/results/**/*.json", recursive=True)[0]))["results"]
own = json.load(open(sys.argv[1] + "/eval.json"))["results"]
bad = 0
for task, metrics in own.items():
    for name, value in metrics.items():
        other = harness["file_" + task].get(name)
        if "stderr" in name or not isinstance(other, float):
            continue
        same = abs(value - other) <= 1e-3 * max(1, abs(value))
        bad += not same
        print(f"{task:16} {name:22} lm_eval {other:<12.6g} eval {value:<12.6g} {'' if same else 'DIFFERENT'}")
sys.exit(f"{bad} figures differ" if bad else None)
PY
