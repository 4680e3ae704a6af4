"""Speed of `serve` beside `generate`: what a request costs, one stream, eight streams, the first token under load.

    serve_speed.py BIN_FOLDER CHECKPOINT [THREADS]        (standard library alone)
"""

import http.client
import json
import pathlib
import statistics
import subprocess
import sys
import threading
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))
from serve_process import Serve  # noqa: E402

PROMPT = [504, 3575, 282, 4649, 314]
NEW_TOKENS = 200
ROUNDS = 5


def generate_seconds(program, checkpoint, threads, new_tokens):
    """Median seconds of `generate` for the prompt, prefill included, after a warm-up."""
    out = subprocess.run(
        [program, "--checkpoint_path", checkpoint, "--num_threads", threads, "--prompt_ids", ",".join(map(str, PROMPT)),
         "--max_new_tokens", str(new_tokens), "--temperature", "0", "--ignore_eos", "--num_samples", str(ROUNDS + 1), "--json"],
        capture_output=True, text=True, check=True).stdout
    return statistics.median(json.loads(line)["seconds"] for line in out.splitlines()[1:])


class Client:
    def __init__(self, port):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def health(self):
        begin = time.perf_counter()
        self.connection.request("GET", "/health")
        self.connection.getresponse().read()
        return time.perf_counter() - begin

    def complete(self, new_tokens, prompt=PROMPT, stream=False):
        """Seconds to the first byte of the body and to its end."""
        body = {"prompt": prompt, "n_predict": new_tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
        begin = time.perf_counter()
        self.connection.request("POST", "/completion", json.dumps(body))
        response = self.connection.getresponse()
        response.read(1)
        first = time.perf_counter() - begin
        response.read()
        assert response.status == 200
        return first, time.perf_counter() - begin


def main():
    bin_folder, checkpoint = pathlib.Path(sys.argv[1]), sys.argv[2]
    threads = sys.argv[3] if len(sys.argv) > 3 else "2"
    alone = {n: generate_seconds(bin_folder / "generate", checkpoint, threads, n) for n in (1, NEW_TOKENS)}
    with Serve(bin_folder / "serve", checkpoint, "--parallel", "8", "--num_threads", threads) as server:
        client = Client(server.port)
        first = client.complete(1, [10 + i % 1000 for i in range(500)])[1]
        print(f"the first request, a prompt of 500 tokens: {first * 1e3:.0f} ms")
        client.complete(NEW_TOKENS)  # warm-up
        short = statistics.median(client.complete(1)[1] for _ in range(10 * ROUNDS))
        health = statistics.median(client.health() for _ in range(10 * ROUNDS))
        print(f"1 token: generate {alone[1] * 1e3:.2f} ms, a request {short * 1e3:.2f} ms; /health {health * 1e3:.2f} ms")
        for stream in (False, True):
            one = statistics.median(client.complete(NEW_TOKENS, stream=stream)[1] for _ in range(ROUNDS))
            print(f"{NEW_TOKENS} tokens{', streamed' if stream else ''}: generate {NEW_TOKENS / alone[NEW_TOKENS]:.1f} tokens/s, "
                  f"a request {NEW_TOKENS / one:.1f} ({one / alone[NEW_TOKENS] - 1:+.1%} time)")
        for count in (2, 4, 8):
            clients = [Client(server.port) for _ in range(count)]
            workers = [threading.Thread(target=c.complete, args=(NEW_TOKENS,)) for c in clients]
            begin = time.perf_counter()
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
            rate = count * NEW_TOKENS / (time.perf_counter() - begin)
            print(f"{count} at once: {rate:.1f} tokens/s, {rate * one / NEW_TOKENS:.2f}x of one")
        busy = [threading.Thread(target=Client(server.port).complete, args=(3 * NEW_TOKENS,)) for _ in range(7)]
        for worker in busy:
            worker.start()
        time.sleep(0.5)
        client = Client(server.port)  # the server has closed the idle connection
        for length in (5, 500):
            prompt = [10 + i % 1000 for i in range(length)]
            first = statistics.median(client.complete(1, prompt, stream=True)[0] for _ in range(3))
            print(f"first token of a {length}-token prompt beside 7 streams: {first * 1e3:.0f} ms")
        for worker in busy:
            worker.join()
        server.stop()


if __name__ == "__main__":
    main()
