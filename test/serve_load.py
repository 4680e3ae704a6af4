"""Many clients at once, a part of them hostile, against one server, for a bounded time.

    serve_load.py SERVE CHECKPOINT [SECONDS]        (default 60; standard library alone)

Well-behaved clients must get whole answers or 503, the others must not harm them, the memory must not grow once all
kinds of requests have been seen, and SIGTERM must end the server with status 0.
"""

import collections
import http.client
import json
import random
import socket
import sys
import threading
import time

from serve_process import Serve

SLOTS = 8
CLIENTS = 64
HOSTILE = 16  # clients besides, see `attacks`
IDLE = 4  # seconds; after 5 the server closes a connection
WARM_UP = 0.4  # share of the time after which memory must not grow
GROWTH_MB = 24  # allowed after that: free lists of the allocator


class Load:
    def __init__(self, server, seconds):
        self.server = server
        self.begin = time.monotonic()
        self.end = self.begin + seconds
        self.counts = collections.Counter()
        self.lock = threading.Lock()
        self.failures = []
        self.first_token = []  # seconds, of streams

    def count(self, what, number=1):
        with self.lock:
            self.counts[what] += number

    def fail(self, message):
        with self.lock:
            self.failures.append(message)

    def running(self):
        return time.monotonic() < self.end

    def touch_caches(self):
        """The caches of the slots become memory when they are first used: here, to the longest text that comes later."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=300)
        body = {"prompt": [5] * 700, "n": SLOTS, "max_tokens": 1}
        response = self.post(connection, "/v1/completions", body)
        assert response.status == 200 and len(json.loads(response.read())["choices"]) == SLOTS
        self.end += time.monotonic() - self.begin

    # ---- Clients that mean well

    def post(self, connection, path, body):
        def send():
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            return connection.getresponse()

        idle_since = getattr(connection, "idle_since", time.monotonic())
        try:
            return send()
        except ConnectionError:  # the server may close what was idle for long; every HTTP client copes with that
            if time.monotonic() - idle_since < IDLE:
                raise
            self.count("reconnected")
            connection.close()
            return send()

    def client(self, seed):
        rng = random.Random(seed)
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=300)
        while self.running():
            length, new = rng.choice((1, 3, 8, 30, 100, 300)), rng.choice((1, 4, 16, 60))
            body = {"prompt": [rng.randrange(3, 500) for _ in range(length)], "seed": rng.randrange(1000)}
            stream = rng.random() < 0.5
            try:
                if rng.random() < 0.5:
                    body |= {"max_tokens": new, "n": rng.choice((1, 1, 3)), "stream": stream}
                    path = "/v1/completions"
                else:
                    body |= {"n_predict": new, "stream": stream}
                    path = "/completion"
                begin = time.monotonic()
                response = self.post(connection, path, body)
                first = response.read(1)
                if stream and response.status == 200:
                    with self.lock:
                        self.first_token.append(time.monotonic() - begin)
                answer = first + response.read()
                connection.idle_since = time.monotonic()
                self.check_answer(response.status, answer, path, body)
                if response.status == 503:
                    assert response.getheader("Retry-After")
                    time.sleep(rng.random())
            except Exception as error:  # any: a client that gave up would hide the rest
                self.fail(f"{path} {body.get('stream')}: {error!r}")
                connection.close()

    def check_answer(self, status, answer, path, body):
        self.count(status)
        if status == 503:
            return
        if status != 200:
            return self.fail(f"{path}: status {status}: {answer[:200]}")
        if not body["stream"]:
            value = json.loads(answer)
            self.count("tokens", value["tokens_predicted"] if path == "/completion" else value["usage"]["completion_tokens"])
        elif path == "/completion":
            assert json.loads(answer.decode().rstrip().rsplit("data: ", 1)[1])["stop"], answer[-200:]
        else:
            assert answer.endswith(b"data: [DONE]\n\n"), answer[-200:]

    # ---- Clients that do not

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.server.port), timeout=60)

    def request(self, body, length=None):
        head = f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n"
        return head.encode() + body

    def leaves(self, rng):
        """Goes away while its answer is computed, or after the first bytes of it."""
        body = json.dumps({"prompt": [5] * rng.choice((2, 200)), "n_predict": 400, "ignore_eos": True,
                           "stream": rng.random() < 0.7}).encode()
        with self.connect() as peer:
            peer.sendall(self.request(body))
            if rng.random() < 0.5:
                peer.recv(100)

    def garbage(self, rng):
        with self.connect() as peer:
            peer.sendall(rng.randbytes(rng.choice((1, 100, 20000))) + b"\r\n\r\n")
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(4096):
                pass

    def half(self, rng):
        """A request that stops in its head or in its body, and a connection that is kept open."""
        whole = self.request(b'{"prompt": [5], "n_predict": 3}', 1000)
        with self.connect() as peer:
            peer.sendall(whole[: rng.randrange(1, len(whole))])
            time.sleep(rng.choice((0, 1, 12)))  # the server waits 10 s

    def slow(self, rng):
        body = b'{"prompt": [5, 6], "n_predict": 2}'
        with self.connect() as peer:
            peer.sendall(self.request(b"", len(body)))
            for byte in body:
                peer.sendall(bytes([byte]))
                time.sleep(0.05)
            answer = peer.recv(4096)
            if b" 200 " not in answer and b" 503 " not in answer:
                self.fail(f"a slow body got {answer[:100]}")

    def wrong(self, rng):
        bodies = (b"{", b"[]", b'"a"', b"{}", b'{"prompt": {}}', b'{"prompt": [1e9]}', b'{"prompt": "a", "x": 1}',
                  b'{"prompt": "a", "n_predict": "3"}', b"\xff\xfe", b"[" * 50000, b'{"prompt": [' + b"5," * 200000 + b"5]}")
        with self.connect() as peer:
            peer.sendall(self.request(rng.choice(bodies)))
            answer = peer.recv(4096)
            if not answer.startswith(b"HTTP/1.1 4") or b'"message"' not in answer + peer.recv(4096):
                self.fail(f"a wrong body got {answer[:200]}")

    def large(self, rng):
        with self.connect() as peer:
            peer.sendall(self.request(b'{"prompt": "' + b"a" * 100000, 1 << 40))
            answer = peer.recv(4096)
            if b" 413 " not in answer:
                self.fail(f"a body of a terabyte got {answer[:100]}")

    def attacker(self, seed):
        rng = random.Random(seed)
        attacks = (self.leaves, self.leaves, self.garbage, self.half, self.slow, self.wrong, self.large)
        while self.running():
            attack = rng.choice(attacks)
            self.count(attack.__name__)
            try:
                attack(rng)
            except (ConnectionError, BrokenPipeError):
                continue  # the server hung up on it, as it may
            except Exception as error:
                self.fail(f"{attack.__name__}: {error!r}")


def main():
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 60.0
    with Serve(sys.argv[1], sys.argv[2], "--parallel", str(SLOTS), "--max_queue", "48", "--ctx_size", "1024") as server:
        load = Load(server, seconds)
        load.touch_caches()
        threads = [threading.Thread(target=load.client, args=(i,)) for i in range(CLIENTS)]
        threads += [threading.Thread(target=load.attacker, args=(1000 + i,)) for i in range(HOSTILE)]
        for thread in threads:
            thread.start()
        time.sleep(seconds * WARM_UP)
        warm = server.memory_mb()
        for thread in threads:
            thread.join()
        grown = server.memory_mb() - warm
        waits = sorted(load.first_token)
        print(dict(load.counts))
        if waits:
            print(f"first byte of a stream: median {waits[len(waits) // 2]:.2f} s, 95 % {waits[len(waits) * 19 // 20]:.2f} s")
        print(f"memory {warm:.0f} MB when warm, {grown:+.1f} MB at the end")
        for failure in load.failures[:20]:
            print("FAILED:", failure)
        server.stop()
    if load.failures or not load.counts[200]:
        sys.exit(f"{len(load.failures)} failures, {load.counts[200]} answers")
    if grown > GROWTH_MB:
        sys.exit(f"the server grew by {grown:.1f} MB under load")


if __name__ == "__main__":
    main()
