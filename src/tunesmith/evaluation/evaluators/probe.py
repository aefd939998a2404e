"""What this stack makes of prompts, for the parity probe: tokens, greedy answers, log-probabilities.

One prompt at a time and without padding: what is compared with other stacks depends on nothing but the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tunesmith.models.chat import ChatFormat
from tunesmith.models.generation import stop_ids
from tunesmith.models.scoring import evaluating, mixed_precision
from tunesmith.programs.readings import ProbeResult

Messages = Sequence[Mapping[str, Any]]


def probe_prompts(model: Any, chat: ChatFormat, prompts: Sequence[Messages], max_tokens: int) -> list[ProbeResult]:
    """Greedy answers of at most `max_tokens` tokens, each token with its log-probability and its lead."""
    with evaluating(model), mixed_precision(next(model.parameters()).device):
        return [_read(model, chat, messages, max_tokens) for messages in prompts]


def shown_tokens(chat: ChatFormat, readings: Sequence[ProbeResult]) -> dict[int, str]:
    """How the tokens of readings are written, for the messages about what differs."""
    used = {token for reading in readings for token in (*(reading.prompt_ids or ()), *(reading.answer_ids or ()))}
    return {token: chat.shown(token) for token in sorted(used | chat.stop_ids)}


def _read(model: Any, chat: ChatFormat, messages: Messages, max_tokens: int) -> ProbeResult:
    plain = tuple(dict(message) for message in messages)
    prompt = chat.prompt(plain)
    stops, device = stop_ids(model, chat), next(model.parameters()).device
    written: list[int] = []
    log_probs: list[float] = []
    margins: list[float] = []
    ids, cache = torch.tensor([prompt], device=device), None
    while len(written) < max_tokens and not (written and written[-1] in stops):
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        first, second = torch.log_softmax(output.logits[0, -1].float(), dim=-1).topk(2)[0].tolist()
        token = int(output.logits[0, -1].argmax())
        written.append(token)
        log_probs.append(first)
        margins.append(first - second)
        ids = torch.tensor([[token]], device=device)
    finished = bool(written) and written[-1] in stops
    told = written[:-1] if finished else written
    return ProbeResult(
        messages=plain,
        prompt_text=chat.prompt_text(plain),
        prompt_ids=prompt,
        num_prompt=len(prompt),
        answer_ids=tuple(written),
        answer_text=chat.text_of(told),
        log_probs=tuple(log_probs),
        margins=tuple(margins),
        starts=tuple(len(chat.text_of(told[:place])) for place in range(len(written))),
        finish="stop" if finished else "length",
    )
