"""Chat templates in the formats of the families that are around, each with a small real tokenizer. Our own words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from tunesmith.demo.base_model import byte_tokenizer

_CHATML_TOOLS = """
{%- if tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content + '\\n' if messages[0].role == 'system' else '') }}
    {{- 'You can call:' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nBe useful.<|im_end|>\\n' }}
{%- endif %}
"""
_CHATML_CALLS = """
    {%- for call in m.tool_calls or [] %}
        {{- '\\n' if not loop.first or m.content else '' }}
        {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
    {%- endfor %}
"""
_CHATML_OTHERS = """
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif m.role == 'user' %}
        {{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
CHATML = f"""{_CHATML_TOOLS}
{{%- for m in messages %}}
    {{%- if m.role == 'assistant' %}}
        {{{{- '<|im_start|>assistant\\n' + m.content }}}}
        {_CHATML_CALLS}
        {{{{- '<|im_end|>\\n' }}}}
    {_CHATML_OTHERS}"""
MARKED = f"""{_CHATML_TOOLS}
{{%- for m in messages %}}
    {{%- if m.role == 'assistant' %}}
        {{{{- '<|im_start|>assistant\\n' }}}}
        {{%- generation %}}
        {{{{- m.content }}}}
        {_CHATML_CALLS}
        {{%- endgeneration %}}
        {{{{- '<|im_end|>\\n' }}}}
    {_CHATML_OTHERS}"""
THINKING = f"""{_CHATML_TOOLS}
{{%- set ns = namespace(last=-1) %}}
{{%- for m in messages %}}{{%- if m.role == 'user' %}}{{%- set ns.last = loop.index0 %}}{{%- endif %}}{{%- endfor %}}
{{%- for m in messages %}}
    {{%- if m.role == 'assistant' %}}
        {{%- set parts = m.content.split('</think>') %}}
        {{{{- '<|im_start|>assistant\\n' }}}}
        {{%- if loop.index0 > ns.last %}}
            {{%- set thought = parts[0].split('<think>')[-1].strip() if parts | length > 1 else '' %}}
            {{{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}}}
        {{%- endif %}}
        {{{{- parts[-1].lstrip('\\n') }}}}
        {_CHATML_CALLS}
        {{{{- '<|im_end|>\\n' }}}}
    {_CHATML_OTHERS}"""
LLAMA3 = """
{{- '<|begin_of_text|>' }}
{%- set head = messages[0].content | trim if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + head }}
{%- if tools %}
    {{- '\\n\\nFunctions:' }}{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson(indent=2) }}{%- endfor %}
{%- endif %}
{{- '<|eot_id|>' }}
{%- for m in rest %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception('One call at a time') }}{%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n<|python_tag|>' }}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- '}<|eom_id|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{- m.content | tojson }}{{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""
GEMMA = """
{{- '<bos>' }}
{%- set head = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- for m in rest %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('Turns must alternate') }}{%- endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' }}
    {{- (head if loop.first else '') + m.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
"""
MISTRAL = """
{{- '<s>' }}
{%- set head = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{%- set ns = namespace(last=-1) %}
{%- for m in rest %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in rest %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.index0 == ns.last %}
            {{- '[AVAILABLE_TOOLS] ' }}{{- tools | tojson }}{{- '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (head if loop.index0 == ns.last else '') + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('Ids of calls have nine letters') }}{%- endif %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' }}{{- call.function.arguments | tojson }}
            {{- ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last else '' }}
        {%- endfor %}
        {{- ']</s>' }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' }}{{- m.content | tojson }}
        {{- ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- ' ' + m.content + '</s>' }}
    {%- endif %}
{%- endfor %}
"""
PHI3 = """
{%- for m in messages %}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}
"""
PHI4 = """
{%- for m in messages %}{{- '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_sep|>' }}{%- endif %}
"""
MARKED_WHOLE = """
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{- '<|assistant|>\\n' + m.content + '<|end|>\\n' }}
        {%- if loop.last and not add_generation_prompt %}{{- eos_token }}{%- endif %}{%- endgeneration %}
    {%- else %}{{- '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- endif %}
"""
"""Marks more than the answer: the header of the turn, what follows its end, and the tail of the conversation."""
IN_PARTS = """
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- for part in m.content %}{{- part.text }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""A content is a list of parts, as where models see pictures."""
TEXT_ARGUMENTS = CHATML.replace("call.function.arguments | tojson", "'' + call.function.arguments")
"""As some families do it: the arguments of a call must be a text already."""
PRINTED_ARGUMENTS = CHATML.replace("call.function.arguments | tojson", "call.function.arguments")
"""Writes whatever it gets, a dictionary as Python shows it."""


@dataclass(frozen=True)
class Family:
    """A format, and what is known about it from outside."""

    template: str
    special: tuple[str, ...]
    eos: str
    end: str
    """The token that ends an answer."""
    lead: str = ""
    """What the model has to write before the answer."""
    call: str | None = None
    """A call of the function `weather` with {"city": "Rome"} and the id "abcdefghi", its end included."""
    earlier_is_context: bool = False
    """Whether every answer but the last ones is written in another way, later, than when it was given."""


_IM = ("<|im_start|>", "<|im_end|>")
_HEADERS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
FAMILIES = {
    "chatml": Family(CHATML, _IM, "<|im_end|>", "<|im_end|>", call=_CALL),
    "marked": Family(MARKED, _IM, "<|im_end|>", "<|im_end|>", call=_CALL),
    "thinking": Family(
        THINKING,
        (*_IM, "<|endoftext|>"),
        "<|im_end|>",
        "<|im_end|>",
        lead="<think>\n\n</think>\n\n",
        call="<think>\n\n</think>\n\n" + _CALL,
        earlier_is_context=True,
    ),
    "llama3": Family(
        LLAMA3,
        (*_HEADERS, "<|eom_id|>", "<|python_tag|>"),
        "<|end_of_text|>",
        "<|eot_id|>",
        call='<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}<|eom_id|>',
    ),
    "gemma": Family(GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<eos>", "<end_of_turn>"),
    "mistral": Family(
        MISTRAL,
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
         "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        "</s>",
        "</s>",
        lead=" ",
        call='[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}, "id": "abcdefghi"}]</s>',
    ),
    "phi3": Family(
        PHI3, ("<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"), "<|endoftext|>", "<|end|>"
    ),
    "marked whole": Family(
        MARKED_WHOLE,
        ("<|endoftext|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"),
        "<|endoftext|>",
        "<|end|>",
    ),
    "in parts": Family(IN_PARTS, _IM, "<|im_end|>", "<|im_end|>"),
    "phi4": Family(PHI4, (*_IM, "<|im_sep|>", "<|endoftext|>"), "<|endoftext|>", "<|im_end|>"),
}  # fmt: skip


def special_tokens_in(template: str) -> tuple[str, ...]:
    """What looks like a special token in a template."""
    looks = r"<\|[A-Za-z_0-9]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_(?:turn|utterance)>|\[/?INST\]|</s>|<turn\|>|<\|turn>"
    return ("<bos>", "<|endoftext|>", *sorted(set(re.findall(looks, template)) - {"<|endoftext|>"}))


def a_tokenizer(family: Family, *, merges: bool = False) -> Any:
    """Bytes and the family's special tokens; with `merges`, also tokens of several letters, across words and lines."""
    tokenizer = _merging() if merges else byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(family.special)})
    tokenizer.eos_token = family.eos
    tokenizer.chat_template = family.template
    return tokenizer


def _merging() -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_trained()), clean_up_tokenization_spaces=False)


@cache
def _trained() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = ["assistant\nab\n\ncd model\n", "user\nQR\nST\n", " ab cd", "\n\n\n", '{"name": "weather", "arguments": {']
    core.train_from_iterator(
        texts * 20, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    )
    return str(core.to_str())
