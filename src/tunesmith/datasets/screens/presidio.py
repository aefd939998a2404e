"""The `presidio` detector: Microsoft's Presidio, with whatever spaCy model is installed, or with none.

With a spaCy model for English it finds names and places. Without one it still finds what has a form: cards (test
numbers too), accounts, licences, passports. It never downloads anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tunesmith.datasets.screens.finding import Hit, redacted

_MODELS = ("en_core_web_trf", "en_core_web_lg", "en_core_web_md", "en_core_web_sm")
_MIN_SCORE = 0.4
"""Presidio's own confidence, from 0 to 1."""
_NOT_PERSONAL = frozenset({"NRP", "ORGANIZATION", "DATE_TIME"})
"""Dates, nationalities and companies are in too many honest examples."""
_WITHOUT = ("UrlRecognizer", "EmailRecognizer")
"""Links and e-mail addresses have screens of their own, and these two fetch a list of domains from the network."""


def make() -> Presidio:
    """A detector; loads Presidio and a spaCy model, which takes seconds."""
    return Presidio()


class Presidio:
    def __init__(self) -> None:
        from presidio_analyzer import AnalyzerEngine
        from presidio_analyzer.nlp_engine import SpacyNlpEngine

        engine = SpacyNlpEngine()
        engine.nlp = {"en": _pipeline()}
        self._analyzer: Any = AnalyzerEngine(nlp_engine=engine, supported_languages=["en"])
        for name in _WITHOUT:
            self._analyzer.registry.remove_recognizer(name)

    def find(self, text: str) -> Iterator[Hit]:
        """Every place that Presidio takes for personal data, the first one first."""
        found = self._analyzer.analyze(text=text, language="en", score_threshold=_MIN_SCORE)
        for each in sorted(found, key=lambda result: (result.start, result.end)):
            if each.entity_type not in _NOT_PERSONAL:
                kind = str(each.entity_type).lower().replace("_", " ")
                yield Hit(each.start, each.end, f"{kind}, by Presidio", redacted(text[each.start : each.end], 0))


def _pipeline() -> Any:
    """The best spaCy model that is installed; a blank one where there is none."""
    import spacy
    from spacy.util import is_package

    name = next((model for model in _MODELS if is_package(model)), None)
    return spacy.blank("en") if name is None else spacy.load(name)
