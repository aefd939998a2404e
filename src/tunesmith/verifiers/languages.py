"""Which language a text is in, by its script and its commonest words; says nothing where it cannot tell."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_MAX_CHARS = 4000
_MIN_HITS = 2  # commonest words; one alone may be a loan
_MIN_LETTERS = 4  # of a script that is no alphabet of several languages
_SCRIPTS = {
    "HANGUL": "ko",
    "HIRAGANA": "ja",
    "KATAKANA": "ja",
    "CJK": "zh",
    "ARABIC": "ar",
    "HEBREW": "he",
    "GREEK": "el",
    "DEVANAGARI": "hi",
    "THAI": "th",
    "CYRILLIC": "ru",
}
_COMMON = {
    "en": "the and is are was were of to in that it you for with this not have be on as what how can do does i my a an",
    "de": "der die das und ist sind war nicht ein eine einen ich sie wir es zu mit auf für von den dem wie was im auch",
    "fr": "le la les des est et une un je vous nous il elle pas que qui pour dans avec sur ce cette du au sont être",
    "es": "el la los las es y una un yo usted no que de para en con por su este esta del al son como qué está",
    "it": "il la gli le è e una un io lei non che di per in con su questo questa del al sono come cosa della",
    "pt": "o a os as é e uma um eu você não que de para em com por seu este esta do da são como está dos",
    "nl": "de het een en is zijn niet ik je we dat die van voor met op in te wat hoe ook er maar naar",
}
_LANGUAGES_OF: dict[str, tuple[str, ...]] = {}
for _code, _words in _COMMON.items():
    for _word in _words.split():
        _LANGUAGES_OF[_word] = (*_LANGUAGES_OF.get(_word, ()), _code)

KNOWN = tuple(sorted({*_COMMON, *_SCRIPTS.values()}))
"""Codes (ISO 639-1) that can be told apart. Cyrillic counts as ru, and CJK without kana as zh."""


def language_of(text: str) -> str | None:
    """The code of a text's language; None where there is too little to tell."""
    head = text[:_MAX_CHARS]
    scripts = Counter(_script_of(char) for char in head if char.isalpha() and char > "\u024f")
    scripts.pop(None, None)
    num_latin = sum(char.isalpha() and char <= "\u024f" for char in head)
    num_other = scripts.total()
    if num_other >= _MIN_LETTERS and num_other >= num_latin:
        codes = Counter[str]()
        for script, num in scripts.items():
            codes[_SCRIPTS[str(script)]] += num
        if codes["ja"] * 10 >= codes.total():  # kana among Chinese characters: Japanese
            return "ja"
        return min(codes, key=lambda code: (-codes[code], code))
    return _latin_language(head)


def _latin_language(text: str) -> str | None:
    hits = Counter[str]()
    for word in _WORD.findall(text.casefold()):
        hits.update(_LANGUAGES_OF.get(word, ()))
    if not hits:
        return None
    ranked = sorted(hits.items(), key=lambda item: (-item[1], item[0]))
    runner_up = ranked[1][1] if len(ranked) > 1 else 0
    best, num = ranked[0]
    return best if num >= _MIN_HITS and num > runner_up else None


def _script_of(char: str) -> str | None:
    name = unicodedata.name(char, "")
    return next((script for script in _SCRIPTS if name.startswith(script)), None)
