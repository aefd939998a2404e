"""The environment of a program that we start: an allow-list of ours. Keys and passwords stay where they are.

Trainers, evaluators, teachers, engines, model servers, target commands and parsers all get it. What else one of them
needs is named in `worker.pass_environment`, or in `env` of a command's own options.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

_NAMES = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "LANG", "LANGUAGE", "TMPDIR", "TEMP", "TMP"),
        *("LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CC", "CXX", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"),
        *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE", "NO_COLOR"),
        *("TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE", "TOKENIZERS_PARALLELISM"),
    )
)
_PREFIXES = (
    *("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "KMP_", "GOMP_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_"),
    *("CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "GLOO_", "HIP_", "ROCR_", "HSA_", "GGML_"),
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
"""In a name that only its prefix lets pass, such as NVIDIA_API_KEY."""


_DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Read when torch is loaded. By default a thread that waits for another spins; where the cores are shared with anything
else, that made a small model five times slower. Whoever sets the variable knows better."""


def child_environment(environ: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """What a program gets: what it may see of `environ`, and our defaults for what nobody set there."""
    return {**_DEFAULTS, **visible(environ, more)}


def set_defaults_here() -> None:
    """Our defaults for this process itself; call it before torch is loaded here."""
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)


def visible(environ: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """The part of an environment that a program may see; `more` are names that somebody added on purpose."""
    added = frozenset(more)
    return {name: value for name, value in environ.items() if name in added or _is_harmless(name)}


def _is_harmless(name: str) -> bool:
    return name in _NAMES or (name.startswith(_PREFIXES) and not _SECRET.search(name))
