"""A process that has the native trainer loaded and forks one child per training: a drill of many kills takes seconds.

It reads one JSON line per training from stdin, {"spec", "dir", "traced", "left_kb", "dies_at"}. It answers with {"pid"}
when the child exists and {"code"} when it ended. In a traced child the thread that writes checkpoints tells its id in
DIR/writer and begins when strace has attached to it. With `left_kb`, the child's folder is a small file system of its
own, which somebody else fills up to so many KiB as the first checkpoint is written; what is in it at the end is copied
to DIR-left. With `dies_at` the child gets a KILL as it begins that forward pass of its training: a step has several.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers.models.llama import modeling_llama

from tunesmith.programs.host import host
from tunesmith.training.trainers.native.train import train

_NEW_MOUNTS = 0x20000  # CLONE_NEWNS


def main() -> None:
    torch.set_num_threads(1)  # threads do not survive a fork
    for line in sys.stdin:
        wish = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                code = child(wish)
            finally:
                os._exit(code)
        say({"pid": pid})
        _, status = os.waitpid(pid, 0)
        say({"code": os.waitstatus_to_exitcode(status)})


def child(wish: dict[str, Any]) -> int:
    folder = Path(wish["dir"])
    if wish["left_kb"]:
        mount(folder)
    for name in ("control.jsonl", "keepalive"):
        (folder / name).touch()
    redirect(folder)
    threading.setprofile(lambda *_: before_the_writer(wish, folder))
    if wish["dies_at"]:
        die_at_forward_pass(wish["dies_at"])
    code = host(train, ["--spec", wish["spec"], "--output-dir", str(folder)])
    if wish["left_kb"]:
        (folder / "ballast").unlink(missing_ok=True)
        shutil.copytree(folder, folder.with_name(f"{folder.name}-left"))
    return code


def mount(folder: Path) -> None:
    """Only for this process, and gone with it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], check=True)


def before_the_writer(wish: dict[str, Any], folder: Path) -> None:
    """Called first thing in every new thread; only the writer's matters."""
    sys.setprofile(None)
    if not threading.current_thread().name.startswith("checkpoint"):
        return
    if wish["left_kb"]:
        (folder / "ballast").write_bytes(bytes(shutil.disk_usage(folder).free - wish["left_kb"] * 1024))
    tid = threading.get_native_id()
    if wish["traced"]:
        (folder / "writer.tmp").write_text(str(tid))
        (folder / "writer.tmp").rename(folder / "writer")
    while wish["traced"] and "TracerPid:\t0\n" in Path(f"/proc/self/task/{tid}/status").read_text():
        time.sleep(0.005)


def die_at_forward_pass(number: int) -> None:
    passes = itertools.count(1)

    def before(module: torch.nn.Module, _inputs: object) -> None:
        if isinstance(module, modeling_llama.LlamaModel) and module.training and next(passes) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    register_module_forward_pre_hook(before)


def redirect(folder: Path) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(handle, number)
        os.close(handle)


def say(answer: dict[str, int]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
