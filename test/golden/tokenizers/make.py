"""Makes the small tokenizers of this folder and what the Python libraries answer for them.

Usage: python make.py, with sentencepiece 0.2.3, tiktoken 0.14.0 and tokenizers 0.23.3. The strings come from sp_mistral_v1.json.
"""
import base64
import io
import json
import random
from pathlib import Path

import sentencepiece
import tiktoken
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

HERE = Path(__file__).parent
ROWS = json.loads((HERE / "sp_mistral_v1.json").read_text())
STRINGS = [row["text"] for row in ROWS["strings"]]
BYTES = [base64.b64decode(row["bytes_b64"]) for row in ROWS["invalid_utf8"]]
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
CORPUS = """The quick brown fox jumps over the lazy dog. A tokenizer splits text into pieces, and the pieces into ids.
When the model says hello, world! the reader hears 1234567 words; don't, can't, we'll, they're, I've, it's.
    for (int i = 0; i < 10; ++i) { sum += values[i]; }  // indented code, with   runs of   spaces
Über den Wolken muß die Freiheit wohl grenzenlos sein. Le café est près de l'hôtel. Привет, мир! Γειά σου Κόσμε.
你好，世界！今天天气不错。 こんにちは世界。 안녕하세요. 😀😀👍🏽 The end, and the next line begins here.
""" * 3


def id_lists(size):
    rng = random.Random(5)
    return [[i] for i in range(0, size, max(1, size // 60))] + [[rng.randrange(size) for _ in range(12)] for _ in range(60)]


def golden(encode, decode, size, encode_bytes=None):
    rows = [{"text": s, "ids": encode(s), "decoded": decode(encode(s))} for s in STRINGS]
    invalid = [{"bytes_b64": base64.b64encode(b).decode(), "ids": encode_bytes(b)} for b in BYTES] if encode_bytes else []
    return {"strings": rows, "invalid_utf8": invalid, "decode_only": [{"ids": i, "decoded": decode(i)} for i in id_lists(size)]}


def write(name, value):
    (HERE / name).write_text(json.dumps(value, separators=(",", ":")) + "\n")


def make_sentencepiece():
    variants = {
        "bpe": dict(model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
                    vocab_size=450, split_digits=True, allow_whitespace_only_pieces=True, user_defined_symbols=["<tool>"],
                    control_symbols=["[INST]", "[/INST]"]),
        "unigram": dict(model_type="unigram", vocab_size=180),  # the trainer's defaults: nmt_nfkc, extra whitespace removed
        "noprefix": dict(model_type="bpe", normalization_rule_name="identity", vocab_size=180, add_dummy_prefix=False, remove_extra_whitespaces=False),
    }
    for name, options in variants.items():
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(CORPUS.splitlines()), model_writer=model, minloglevel=2,
                                                 hard_vocab_limit=False, **options)
        (HERE / f"small_sp_{name}.model").write_bytes(model.getvalue())
        p = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
        write(f"small_sp_{name}.json", golden(p.EncodeAsIds, p.DecodeIds, p.vocab_size(), p.EncodeAsIds))


def trained_bpe(vocab_size):
    """Byte-level BPE over the corpus: bytes of each token in the order of training."""
    t = Tokenizer(models.BPE())
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    from tokenizers.trainers import BpeTrainer
    t.train_from_iterator(CORPUS.splitlines(keepends=True),
                          BpeTrainer(vocab_size=vocab_size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
    return json.loads(t.to_str())["model"]


def make_tiktoken(model):
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    byte_of = {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
    tokens = [bytes(byte_of[c] for c in token) for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    (HERE / "small.tiktoken").write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % i for i, t in enumerate(tokens)))
    names = ["<|begin_of_text|>", "<|end_of_text|>", *[f"<|reserved_special_token_{i}|>" for i in range(4)],
             "<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_4|>", "<|eot_id|>",
             *[f"<|reserved_special_token_{i}|>" for i in range(5, 251)]]
    e = tiktoken.Encoding(name="small", pat_str=LLAMA3, mergeable_ranks={t: i for i, t in enumerate(tokens)},
                          special_tokens={t: len(tokens) + i for i, t in enumerate(names)})
    result = golden(e.encode_ordinary, e.decode, e.n_vocab, e._encode_bytes)
    for row in result["strings"]:
        row["allowed_all"] = e.encode(row["text"], allowed_special="all")
    write("small_tiktoken.json", result)


def make_bpe(model):
    bl = pre_tokenizers.ByteLevel
    variants = {
        "gpt2": bl(add_prefix_space=False),
        "gpt2_prefix_space": bl(add_prefix_space=True),
        "llama3": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), bl(add_prefix_space=False, use_regex=False)]),
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bl(add_prefix_space=False)]),
        "digit_runs": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), bl(add_prefix_space=False)]),
        "matches_only": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\p{L}+|\s+|\p{N}"), "removed", invert=True),
                                                 bl(add_prefix_space=False, use_regex=False)]),
        "gaps_only": pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), bl(add_prefix_space=False, use_regex=False)]),
    }
    missing = {k: v for k, v in model["vocab"].items() if k not in ("\u0104", "z")}  # two bytes that no merge uses are left out
    out = {}
    for name, pre in variants.items():
        merges = [tuple(m) for m in model["merges"]]
        t = Tokenizer(models.BPE(vocab=model["vocab"] if name != "gpt2" else missing,
                                 merges=merges if name != "gpt2" else [m for m in merges if "z" not in m[0] + m[1]],
                                 ignore_merges=name == "llama3"))
        t.pre_tokenizer = pre
        t.decoder = decoders.ByteLevel()
        t.add_special_tokens([AddedToken("<|begin_of_text|>"), AddedToken("<|eot_id|>", rstrip=name == "smollm"),
                              AddedToken("<s>", lstrip=name == "smollm")])
        t.add_tokens([AddedToken("fox", single_word=True), AddedToken("a\u0300", normalized=False), AddedToken("snake_case", normalized=True)])
        if name == "llama3":
            t.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), processors.TemplateProcessing(
                single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", t.token_to_id("<|begin_of_text|>"))])])
        encode = lambda s: t.encode(s, add_special_tokens=False).ids
        g = golden(encode, lambda i: t.decode(i, skip_special_tokens=False), t.get_vocab_size() + 3)
        t.encode_special_tokens = True
        for row in g["strings"]:
            row["as_text"] = encode(row["text"])
        t.encode_special_tokens = False
        file = json.loads(t.to_str())
        if name != "gpt2":  # they share their model
            file["model"].pop("vocab"), file["model"].pop("merges")
        out[name] = {"tokenizer": file, **g}
    write("small_bpe.json", {"vocab": model["vocab"], "merges": model["merges"], "variants": out})


if __name__ == "__main__":
    make_sentencepiece()
    trained = trained_bpe(600)
    make_tiktoken(trained)
    make_bpe(trained)
