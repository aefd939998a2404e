"""Finds texts that some chat template reads as a control token: with them, a text could forge a turn."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tunesmith.datasets.screens.finding import Hit, visible

_NAMES = (
    "im_start|im_end|im_sep|im_user|im_system|im_middle|im_assistant|begin_of_text|end_of_text|start_header_id|"
    "end_header_id|eot_id|eom_id|python_tag|finetune_right_pad_id|endoftext|startoftext|endofprompt|system|user|"
    "assistant|end|tool|tool_call|tool_calls|tool_response|tool_result|observation|start|message|channel|return|call|"
    "constrain|start_of_role|end_of_role|start_of_turn|end_of_turn|turn|header_start|header_end|eot|eos|bos|pad|sop|"
    "fim_prefix|fim_middle|fim_suffix|fim_pad|repo_name|file_sep|vision_start|vision_end|image_pad|video_pad|"
    "start_of_text|end_of_sentence|begin_of_sentence|end_of_turn_token|start_of_turn_token|chatbot_token|user_token|"
    "system_token|image|audio|think|thinking|endofsystem|endofuser|endofassistant|prompter|human|bot|model"
)
_BAR = r"[|\uff5c\u00a6\u01c0]"
_BLANK = r"[\s_\u2581]"
_TOKEN = re.compile(
    rf"<\s?{_BAR}\s?/?(?:{_NAMES}|reserved_special_token_\d+|[A-Z_]{{3,30}})\s?{_BAR}\s?>"
    rf"|<{_BAR}(?:begin|end){_BLANK}of{_BLANK}(?:sentence|text|turn){_BAR}>"
    rf"|<{_BAR}(?:User|Assistant|System|tool{_BLANK}(?:calls?|outputs?|sep|call){_BLANK}?(?:begin|end)?){_BAR}>"
    r"|</?(?:start_of_turn|end_of_turn|start_of_image|end_of_image|bos|eos|unk|pad|BOS_TOKEN|EOS_TOKEN)>"
    r"|\[/?\s?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|TOOL_RESULT|IMG|gMASK)\s?\]"
    r"|<</?SYS>>|</?(?:tool_calls?|tool_responses?|tool_outputs?|function_calls?|functioncall)>"
    r"|&lt;\|[a-z_]{3,30}\|&gt;"
    r"|<extra_id_\d{1,3}>|<end_of_utterance>|\[(?:unused|UNUSED_TOKEN_)\d{1,4}\]",
    re.IGNORECASE,
)
_PLAIN_TURNS = re.compile(
    r"(?:^|\n)\s{0,4}(?:human|user|question)\s?:[^\n]*\n(?:[^\n]*\n){0,3}?\s{0,4}(?:assistant|ai|model|gpt)\s?:"
    r"|(?:^|\n)#{2,3} ?(?:instruction|input|human|user)\s?:?\s*\n(?:[^\n]*\n){1,8}?#{2,3} ?"
    r"(?:response|assistant|output)\s?:",
    re.IGNORECASE,
)
_ANSWER = re.compile(r"\n\s{0,4}(?:assistant|ai|model|gpt|#{2,3} ?(?:response|assistant|output))\s?:", re.IGNORECASE)
_SENTENCE_MARK = re.compile(r"(?<!\w)</?s>(?!\w*</s>)")
_STRUCK = re.compile(r"<s>[^<>\n]{0,400}</s>", re.IGNORECASE)
_HTML_CELL = re.compile(r"<(?:html|body|div|p|table|ul|span)\b", re.IGNORECASE)


def control_tokens(text: str) -> Iterator[Hit]:
    """Control tokens of any known family of chat templates, whatever the base is."""
    for found in _TOKEN.finditer(text):
        yield _hit(found)
    for found in _PLAIN_TURNS.finditer(text) if _ANSWER.search(text) else ():
        yield Hit(*found.span(), "turns written out as text: it could forge a conversation", visible(found[0].strip()))
    if "<s>" in text or "</s>" in text:
        struck = [match.span() for match in _STRUCK.finditer(text)] if _HTML_CELL.search(text) else []
        for found in _SENTENCE_MARK.finditer(text):
            if not any(begin <= found.start() < end for begin, end in struck):  # HTML: struck through
                yield _hit(found)


def _hit(found: re.Match[str]) -> Hit:
    return Hit(*found.span(), "a control token of a chat template: it could forge a turn", visible(found[0]))
