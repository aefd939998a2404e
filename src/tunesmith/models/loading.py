"""Loading a base model from its folder: safetensors only, from local files only, never with code of its own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Literal

import torch
import transformers

from tunesmith.core.errors import ConfigError
from tunesmith.models.quantized import check_quantizing, quantize_linears


def pick_device() -> Any:
    """CUDA where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_tokenizer(folder: Path) -> Any:
    """The base's tokenizer with its chat template."""
    try:
        return transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(folder, "tokenizer", error) from None


def load_base(folder: Path, device: Any, *, quantize: Literal["none", "nf4"] = "none") -> Any:
    """The base model, frozen and in eval mode: fp32 on a CPU, bf16 on CUDA; with `nf4` its linear layers in 4 bits."""
    _quiet()
    if quantize == "nf4":
        check_quantizing(device)  # first: reading the weights takes long
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=dtype,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(folder, "model", error) from None
    model.requires_grad_(False)
    if quantize == "nf4":
        quantize_linears(model, device)
    return model.to(device).eval()


def _quiet() -> None:
    """A progress bar per weight file says nothing in a log."""
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers").setLevel(logging.ERROR)


def _unreadable(folder: Path, what: str, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split())[:300]
    return ConfigError(
        f"base model {folder.name}: the {what} cannot be loaded ({reason}); it must be a whole Hugging Face folder "
        "with safetensors weights of a model type that transformers knows by itself"
    )
