"""What a program that we start sees of our environment: an allow-list. Keys and passwords stay where they are.

Trainers, evaluators, teachers, engines, model servers, target commands and parsers all get it. What else one of them
needs is named in `worker.pass_environment`, or in `env` of a command's own options.
"""

from __future__ import annotations

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


def visible(environ: Mapping[str, str], more: Iterable[str] = ()) -> dict[str, str]:
    """The part of an environment that a program may see; `more` are names that somebody added on purpose."""
    added = frozenset(more)
    return {name: value for name, value in environ.items() if name in added or _is_harmless(name)}


def _is_harmless(name: str) -> bool:
    return name in _NAMES or (name.startswith(_PREFIXES) and not _SECRET.search(name))
