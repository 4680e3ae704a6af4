"""Runs `serve` for the scripts that talk to it."""

import json
import signal
import subprocess


class Serve:
    """A server on a free port of this machine. Ends with the `with` block, by force unless stop() came before."""

    def __init__(self, program, checkpoint, *flags, key=""):
        self.key = key
        command = [program, "--checkpoint_path", checkpoint, "--port", "0", "--json", *flags]
        if key:
            command += ["--api_key", key]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.port = json.loads(self.process.stdout.readline())["port"]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()

    def stop(self):
        """SIGTERM, which must end it with status 0."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(timeout=120)
        assert status == 0, f"the server ended with status {status}"

    def memory_mb(self):
        """What the process holds of its own: not the pages of the mapped checkpoint."""
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as file:
            for line in file:
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) / 1024
        raise RuntimeError("no RssAnon in /proc")

    def threads(self):
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("Threads:"))
