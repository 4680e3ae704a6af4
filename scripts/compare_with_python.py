#!/usr/bin/env python3
"""Compares generate with the Python original, token by token, on your own checkpoint.

    scripts/compare_with_python.py --original ~/gpt-fast --checkpoint_path checkpoints/stories15M/model.pth --prompt "Once upon a time"

Our program continues the prompt greedily and writes its logits; the original, imported from your checkout (a commit up to 32971d3,
before flex attention), is fed the same tokens. Printed: the difference of the logits at each position and the first position where
the two would choose different tokens, with the margin by which each chose. Needs Python with torch and what the original imports.
"""

import argparse
import json
import inspect
import subprocess
import sys
import tempfile
from pathlib import Path


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--original", type=Path, required=True, help="folder of a gpt-fast checkout")
    parser.add_argument("--checkpoint_path", type=Path, required=True)
    parser.add_argument("--generate", type=Path, default=Path(__file__).resolve().parent.parent / "build/bin/generate")
    parser.add_argument("--prompt", default="Hello, my name is")
    parser.add_argument("--prompt_ids", help="token ids instead of a text, 1,2,3")
    parser.add_argument("--max_new_tokens", type=int, default=50)
    parser.add_argument("--precision", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def row_from_config_json(config):
    """A Hugging Face config.json in the words of the original's table."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    row = dict(block_size=config["max_position_embeddings"], vocab_size=config["vocab_size"], n_layer=config["num_hidden_layers"],
               n_head=config["num_attention_heads"], dim=config["hidden_size"], intermediate_size=config["intermediate_size"],
               n_local_heads=config.get("num_key_value_heads", -1), norm_eps=config["rms_norm_eps"],
               rope_base=config.get("rope_theta", rope.get("rope_theta", 10000)))
    if "low_freq_factor" in rope:
        row["rope_scaling"] = {key: rope[key] for key in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
    return row


def python_config_name(model, folder):
    """The row of the table that the original picks for a folder: the longest name that the folder's name contains. A model that
    has none gets one from its config.json; None is returned then."""
    rows = [row for row in model.transformer_configs if row.lower() in folder.name.lower()]
    if rows:
        return max(rows, key=len)
    if not (folder / "config.json").exists():
        sys.exit(f"the original has no configuration for the folder '{folder.name}' and there is no config.json in it; "
                 f"it knows {', '.join(model.transformer_configs)}")
    model.transformer_configs[folder.name] = row_from_config_json(json.loads((folder / "config.json").read_text()))
    return None


def run_ours(args, config_name, logits_file):
    prompt = ["--prompt_ids", args.prompt_ids] if args.prompt_ids else ["--prompt", args.prompt]
    config = ["--config", config_name] if config_name else []
    command = [str(args.generate), "--checkpoint_path", str(args.checkpoint_path), *prompt, *config,
               "--max_new_tokens", str(args.max_new_tokens), "--num_samples", "1", "--temperature", "0", "--ignore_eos",
               "--chat_template", "none", "--precision", args.precision, "--device", args.device,
               "--logits_out", str(logits_file), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}\nfailed: {done.stderr.strip()}")
    return json.loads(done.stdout)


def original_logits(args, torch, model_module, generate_module, tokens, prompt_length):
    """Logits [S, V] of the original: one pass over the prompt, then token by token."""
    model = generate_module._load_model(args.checkpoint_path, args.device, getattr(torch, args.precision), False)
    if len(inspect.signature(model.forward).parameters) != 2:
        sys.exit("this checkout's model takes a mask (flex attention); check out commit 32971d3, the last one before it")
    with torch.no_grad(), torch.device(args.device):
        model.setup_caches(max_batch_size=1, max_seq_length=len(tokens))
        ids = tokens.to(args.device).view(1, -1)
        rows = [model(ids[:, :prompt_length], torch.arange(prompt_length))[0]]
        rows += [model(ids[:, i : i + 1], torch.tensor([i]))[0] for i in range(prompt_length, len(tokens))]
    return torch.cat(rows).float().cpu()


def main():
    args = parse_args()
    for path in (args.original / "generate.py", args.checkpoint_path, args.generate):
        if not path.is_file():
            sys.exit(f"compare_with_python.py: {path} is missing")
    try:
        import torch
    except ImportError:
        sys.exit("compare_with_python.py: needs the package 'torch': pip install torch")

    sys.path.insert(0, str(args.original.resolve()))
    import generate as generate_module
    import model as model_module

    args.checkpoint_path = args.checkpoint_path.resolve()
    config_name = python_config_name(model_module, args.checkpoint_path.parent)
    with tempfile.TemporaryDirectory() as folder:
        logits_file = Path(folder) / "logits.pth"
        sample = run_ours(args, config_name, logits_file)
        ours = torch.load(logits_file, weights_only=True)
    tokens, logits, prompt_length = ours["tokens"], ours["logits"], len(sample["prompt_ids"])
    theirs = original_logits(args, torch, model_module, generate_module, tokens, prompt_length)

    difference = (logits - theirs).abs().max(dim=1).values
    scale = theirs.abs().max()
    print(f"configuration {config_name or 'from config.json'}, {args.precision}, path {sample['path']}, {prompt_length} prompt tokens, {len(tokens)} in all")
    print(f"largest logit {scale:.4f}; largest difference {difference.max():.3g} ({difference.max() / scale:.2e} of it), mean "
          f"{(logits - theirs).abs().mean():.3g}")
    for i in range(len(tokens)):
        print(f"position {i:5d}  token {tokens[i]:6d}  largest difference {difference[i]:.3g}")
    choices = logits.argmax(dim=1) != theirs.argmax(dim=1)
    if not choices.any():
        print("both choose the same token at every position")
        return
    first = int(choices.nonzero()[0])
    for name, row in (("ours", logits[first]), ("original", theirs[first])):
        chosen = int(row.argmax())
        second = int(row.index_fill(0, torch.tensor([chosen]), -torch.inf).argmax())
        print(f"position {first}: {name} chooses token {chosen}, by {float(row[chosen] - row[second]):.3g} over token {second}")


if __name__ == "__main__":
    main()
