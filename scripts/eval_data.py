#!/usr/bin/env python3
"""Write the data files of `eval` from the data sets that lm-evaluation-harness 0.4 loads.

Needs network and `pip install datasets`. Evaluation itself needs no Python.

    scripts/eval_data.py --data_dir data              # every task
    scripts/eval_data.py --data_dir data hellaswag piqa
"""

import argparse
import json
import os
import sys

# task: (data set, configuration, split, fields that eval reads)
TASKS = {
    "arc_challenge": ("allenai/ai2_arc", "ARC-Challenge", "test", ["question", "choices", "answerKey"]),
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy", "test", ["question", "choices", "answerKey"]),
    "hellaswag": ("Rowan/hellaswag", None, "validation",
                  ["activity_label", "ctx_a", "ctx_b", "endings", "label"]),
    "lambada_openai": ("EleutherAI/lambada_openai", "default", "test", ["text"]),
    "piqa": ("baber/piqa", None, "validation", ["goal", "sol1", "sol2", "label"]),
    "wikitext": ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "test", ["page"]),
    "winogrande": ("allenai/winogrande", "winogrande_xl", "validation",
                   ["sentence", "option1", "option2", "answer"]),
}


def write_task(task, data_dir, load_dataset):
    """Writes data_dir/task.jsonl, whole or not at all, in the order of the data set."""
    name, config, split, fields = TASKS[task]
    rows = load_dataset(name, config, split=split)
    missing = [field for field in fields if field not in rows.column_names]
    if missing:
        raise ValueError(f"{name} has no field {', '.join(missing)}; it has {', '.join(rows.column_names)}")
    path = os.path.join(data_dir, task + ".jsonl")
    with open(path + ".tmp", "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({field: row[field] for field in fields}, ensure_ascii=False) + "\n")
    os.replace(path + ".tmp", path)
    print(f"{path}: {len(rows)} items")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", metavar="TASK", help="default: all of " + ", ".join(TASKS))
    parser.add_argument("--data_dir", default="data", help="where to write TASK.jsonl (default: data)")
    args = parser.parse_args()
    for task in args.tasks:
        if task not in TASKS:
            parser.error(f"unknown task '{task}'; known: {', '.join(TASKS)}")
    try:
        from datasets import load_dataset
    except ImportError:
        sys.exit("eval_data.py: needs the package 'datasets': pip install datasets")
    os.makedirs(args.data_dir, exist_ok=True)
    for task in args.tasks or TASKS:
        try:
            write_task(task, args.data_dir, load_dataset)
        except Exception as error:  # whatever the network or the hub says
            sys.exit(f"eval_data.py: cannot write {task}: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
