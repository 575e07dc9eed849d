# SPDX-License-Identifier: Apache-2.0
"""Runs code in a process that knows the hub under test and an empty cache, and nothing else."""

import os
import subprocess
import sys

REPO_ID = "org/sparse-delta-memory"

# Whatever else the code does, it reaches no other machine.
PRELUDE = """
import sys

def _loopback_only(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        if not ALLOW or arguments[1][0] not in ("127.0.0.1", "::1", "localhost"):
            raise PermissionError(f"connection to {arguments[1][0]}")
    if event == "socket.getaddrinfo" and (not ALLOW or arguments[0] not in ("127.0.0.1", "localhost")):
        raise PermissionError(f"look-up of {arguments[0]}")

ALLOW = True
sys.addaudithook(_loopback_only)
"""


class Client:
    """A user's machine: a home of its own, with the cache in it."""

    def __init__(self, home, hub):
        self.home, self.hub = home, hub

    def environment(self, offline):
        """The environment of its processes: no local kernels, no proxies, no settings of ours."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.lower().endswith("_proxy")
            and not name.startswith(("HF_", "HUGGING", "KERNELS_", "LOCAL_KERNELS"))
        }
        kept.update(
            HF_HOME=str(self.home),
            HF_ENDPOINT=self.hub.url,
            HF_HUB_OFFLINE="1" if offline else "0",
            HF_HUB_DISABLE_PROGRESS_BARS="1",
            TORCHINDUCTOR_CACHE_DIR=str(self.home / "inductor"),
            OMP_NUM_THREADS="1",
        )
        return kept

    def run(self, code, *, offline=False, cwd=None, check=True):
        """Runs Python code; offline means that no socket may be connected either."""
        prelude = PRELUDE.replace("ALLOW = True", f"ALLOW = {not offline}")
        command = [sys.executable, "-c", prelude + code]
        done = subprocess.run(
            command,
            env=self.environment(offline),
            cwd=cwd or self.home,
            capture_output=True,
            text=True,
            check=False,
        )
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done

    def kernels(self, *arguments, cwd=None):
        """Runs the `kernels` command."""
        code = f"sys.argv = ['kernels', *{list(map(str, arguments))!r}]\n"
        return self.run(code + "from kernels.cli import main\nmain()\n", cwd=cwd)
