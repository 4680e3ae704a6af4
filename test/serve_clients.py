"""The server as clients of other projects see it: OpenAI's Python package and curl.

    serve_clients.py SERVE CHECKPOINT        (needs `pip install openai`; the model needs a chat template)
"""

import json
import subprocess
import sys

import openai

from serve_process import Serve


def curl(server, path, body=None, *more):
    """Status and text of what plain curl gets."""
    command = ["curl", "-sS", "-w", "\n%{http_code}", server.url + path, *more]
    if body is not None:
        command += ["-d", body if isinstance(body, str) else json.dumps(body)]
    text, status = subprocess.run(command, capture_output=True, text=True, check=True).stdout.rsplit("\n", 1)
    return int(status), text


def check_openai(server):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key=server.key)
    model = client.models.list().data[0].id
    prompt = "The capital of France is"

    whole = client.completions.create(model=model, prompt=prompt, max_tokens=12, temperature=0)
    text = whole.choices[0].text
    assert text and whole.usage.completion_tokens <= 12, whole
    stream = client.completions.create(model=model, prompt=prompt, max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream if chunk.choices) == text

    several = client.completions.create(model=model, prompt=[prompt, "Once upon a time"], n=2, max_tokens=5, seed=7)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    again = client.completions.create(model=model, prompt=[prompt, "Once upon a time"], n=2, max_tokens=5, seed=7)
    assert [c.text for c in several.choices] == [c.text for c in again.choices]

    scored = client.completions.create(model=model, prompt=[[504, 3575, 282]], max_tokens=1, echo=True, logprobs=1, temperature=0)
    logprobs = scored.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 4
    assert logprobs.token_logprobs[0] is None
    assert logprobs.token_logprobs[-1] == max(logprobs.top_logprobs[-1].values())  # greedy, printed from one value

    stopped = client.completions.create(model=model, prompt=prompt, max_tokens=12, temperature=0, stop=[text[3:6]])
    assert stopped.choices[0].text == text[: text.index(text[3:6])] and stopped.choices[0].finish_reason == "stop"

    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a fruit."}]
    chat = client.chat.completions.create(model=model, messages=messages, max_tokens=20, temperature=0)
    answer = chat.choices[0].message
    assert answer.role == "assistant" and answer.content, chat
    parts = client.chat.completions.create(model=model, messages=messages, max_tokens=20, temperature=0, stream=True,
                                           stream_options={"include_usage": True})
    deltas, usage = [], None
    for chunk in parts:
        deltas += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(deltas) == answer.content and usage == chat.usage, (deltas, usage)

    for wrong, error in (({"top_p": 0.5}, openai.BadRequestError), ({"max_tokens": -1}, openai.BadRequestError)):
        try:
            client.completions.create(model=model, prompt=prompt, **wrong)
            raise AssertionError(f"{wrong} was taken")
        except error as refused:
            assert next(iter(wrong)) in str(refused), refused
    try:
        openai.OpenAI(base_url=server.url + "/v1", api_key="wrong").models.list()
        raise AssertionError("a wrong key was taken")
    except openai.AuthenticationError:
        pass


def check_curl(server):
    key = ("-H", "Authorization: Bearer " + server.key)
    assert curl(server, "/health") == (200, '{"status":"ok"}')
    assert curl(server, "/v1/models")[0] == 401
    status, text = curl(server, "/completion", {"prompt": "The capital of France is", "n_predict": 8, "temperature": 0}, *key)
    assert status == 200 and json.loads(text)["tokens_predicted"] <= 8, text
    status, text = curl(server, "/completion", {"prompt": "One, two,", "n_predict": 4, "stream": True}, "-N", *key)
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert status == 200 and events[-1]["stop"] and not events[0]["stop"], text
    status, text = curl(server, "/tokenize", {"content": "Hello there"}, *key)
    tokens = json.loads(text)["tokens"]
    status, text = curl(server, "/detokenize", {"tokens": tokens}, *key)
    assert json.loads(text)["content"] == "Hello there", text
    assert "eos_token" in json.loads(curl(server, "/tokenizer_info", None, *key)[1])
    for body, status in (("{", 400), ({"prompt": "a", "temprature": 0}, 400), ({"prompt": ["a", 5]}, 400)):
        found, text = curl(server, "/v1/completions", body, *key)
        assert found == status and json.loads(text)["error"]["message"], text
    assert curl(server, "/etc/passwd", None, *key)[0] == curl(server, "/../../etc/passwd", None, "--path-as-is", *key)[0] == 404


if __name__ == "__main__":
    with Serve(sys.argv[1], sys.argv[2], "--parallel", "4", key="only for this test") as running:
        check_openai(running)
        check_curl(running)
        running.stop()
    print("openai", openai.__version__, "and curl get what they ask for")
