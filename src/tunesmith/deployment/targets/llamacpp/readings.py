"""What llama-server makes of a prompt, for the parity probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from tunesmith.deployment.targets.base import TargetError
from tunesmith.deployment.targets.server import TargetServer
from tunesmith.programs.readings import ProbeResult


def read_llama(
    asked: TargetServer, messages: Sequence[Mapping[str, Any]], max_tokens: int, lora: list[dict[str, Any]]
) -> ProbeResult:
    """Template, tokens and greedy answer. Log-probabilities only where it tells them for each token.

    Of tokens that together make one character it tells only the last one's.
    """
    prompt = asked.post("/apply-template", {"messages": list(messages)}).get("prompt")
    tokens = asked.post("/tokenize", {"content": prompt, "add_special": True, "parse_special": True}).get("tokens")
    body = {
        "prompt": prompt,
        "n_predict": max_tokens,
        "temperature": 0.0,
        "n_probs": 1,
        "return_tokens": True,
        "cache_prompt": False,
        "lora": lora,
    }
    said = asked.post("/completion", body)
    try:
        answer = [int(token) for token in said["tokens"]]
        told = said.get("completion_probabilities") or []
        is_whole = [int(token["id"]) for token in told] == answer
        return ProbeResult(
            messages=tuple(dict(message) for message in messages),
            prompt_text=prompt,
            prompt_ids=tuple(tokens),
            num_prompt=int(said["tokens_evaluated"]),
            answer_ids=tuple(answer),
            answer_text=said["content"],
            log_probs=tuple(float(token["logprob"]) for token in told) if is_whole else None,
            finish="length" if said["stop_type"] == "limit" else "stop",
        )
    except (KeyError, TypeError, ValueError, AttributeError, ValidationError) as error:
        raise TargetError(f"{asked.url}/completion is not what llama-server answers ({type(error).__name__})") from None
