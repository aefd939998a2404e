"""Finds attempts to give a model orders from inside a text: phrases in several languages, scored together."""

# ruff: noqa: E501 - a pattern or an example reads better in one line

from __future__ import annotations

import re
from collections.abc import Iterator

from tunesmith.data.screens.finding import Hit, visible

_ENOUGH = 3
_NEAR = r"[^.!?\n,;:]{0,40}?"
_PHRASES: tuple[tuple[int, str], ...] = (  # points, form; in lower case
    (3, rf"\b(?:ignore|disregard|forget|override|bypass|do not follow|don't follow|stop following|skip)\b{_NEAR}\b(?:previous|prior|above|earlier|preceding|existing|original|all (?:of )?(?:your|the|my)|your|any)\b[^.!?\n]{{0,25}}?\b(?:instruction|direction|rule|prompt|guideline|command|programming|directive|system message|training|polic|constraint|safeguard)"),
    (3, rf"\bignor(?:iere?n?|ier)\b{_NEAR}(?:vorherig|bisherig|obig|vorangegangen|früher|alle|deine|ihre){_NEAR}(?:anweisung|regel|instruktion|vorgabe|befehl)|\bvergiss\b{_NEAR}(?:anweisung|regel|instruktion|vorgabe)"),
    (3, rf"\b(?:ignore[zrs]?|oublie[zrs]?|ne tiens? pas compte)\b{_NEAR}(?:instruction|consigne|règle|directive)s?{_NEAR}\b(?:précédent|antérieur|ci-dessus|initial)|\b(?:ignore[zrs]?|oublie[zrs]?)\b (?:toutes? )?(?:les|tes|vos) (?:instruction|consigne|règle)"),
    (3, rf"\b(?:ignor[ae]|olvid[ae]|descart[ae]|haz caso omiso)\b{_NEAR}(?:instruccion|instrucción|regla|órden|orden|indicacion)\w*{_NEAR}\b(?:anterior|previa|arriba|original)|\b(?:ignora|olvida) (?:todas )?(?:las|tus) (?:instruccion|regla)"),
    (3, rf"\b(?:ignor[ae]|dimentic[ah]|trascura)\w{{0,4}}\b{_NEAR}(?:istruzion|regol)\w*{_NEAR}\b(?:precedent|anterior|sopra)|\b(?:ignor[ae]|esqueça|desconsidere)\b{_NEAR}(?:instruções|instrução|regras|comandos){_NEAR}\b(?:anterior|acima|prévi)"),
    (3, rf"(?:игнорируй|забудь|проигнорируй|не обращай внимания на){_NEAR}(?:инструкци|указани|правил|команд)"),
    (3, r"(?:忽略|无视|無視|忘记|忘記|不要理会)[^。！？\n]{0,15}(?:指令|指示|提示|规则|規則|说明|命令)"),
    (3, r"(?:前の|以前の|上記の|これまでの|すべての)[^。！？\n]{0,10}(?:指示|命令|ルール|プロンプト)[^。！？\n]{0,6}(?:無視|忘れ)"),
    (3, r"(?:이전|위의|모든)[^.!?\n]{0,12}(?:지시|명령|규칙|프롬프트)[^.!?\n]{0,8}(?:무시|잊)"),
    (3, r"(?:تجاهل|انس)[^.!؟\n]{0,20}(?:التعليمات|الأوامر|القواعد)|(?:önceki|yukarıdaki|tüm)[^.!?\n]{0,20}(?:talimat|kural|komut)[^.!?\n]{0,15}(?:yok say|unut|görmezden)"),
    (3, r"(?:पिछले|सभी|उपरोक्त)[^।!?\n]{0,20}(?:निर्देश|नियम)[^।!?\n]{0,20}(?:अनदेखा|नज़रअंदाज़|भूल)|(?:zignoruj|zapomnij)[^.!?\n]{0,30}(?:instrukcj|polece)|negeer[^.!?\n]{0,30}(?:instructies|aanwijzingen)"),
    (2, rf"\b(?:reveal|print|repeat|output|show|display|leak|dump|tell me|write out|give me)\b{_NEAR}\b(?:your|the|its)\b[^.!?\n]{{0,20}}\b(?:system prompt|system message|hidden (?:prompt|instructions)|initial (?:prompt|instructions)|secret instructions|instructions (?:above|verbatim))"),
    (2, r"\byou are (?:now|no longer)\b[^.!?\n]{0,40}\b(?:dan\b|jailbroken|unrestricted|unfiltered|evil|uncensored|bound by|free from|an? ai without|in developer mode|developer mode|root)"),
    (2, r"\b(?:do not|don't|never|without) (?:tell|telling|mention|mentioning|inform|informing|reveal|alert|alerting|notify)\w*\b[^.!?\n]{0,25}\b(?:the )?(?:user|human|operator|anyone|this (?:instruction|message|request))"),
    (2, rf"\b(?:send|post|forward|upload|exfiltrate|email|transmit|append)\b{_NEAR}\b(?:conversation|chat history|system prompt|credentials|api keys?|passwords?|user(?:'s)? data|secrets|environment variables)\b{_NEAR}(?:\bto\b|https?:|@)"),
    (2, r"\b(?:dan mode|developer mode (?:enabled|on|output)|jailbreak mode|god mode enabled|do anything now)\b"),
    (2, r"(?:^|\n)\s{0,4}(?:#{1,4} ?|\*\*|\[|<)?(?:new|updated|override|real|actual|important|urgent) (?:system )?(?:instructions?|prompt|directive|message)(?: for (?:the )?(?:ai|assistant|model))?(?:\*\*|\]|>)?\s?:"),
    (1, r"\bwith(?:out| no) (?:any )?(?:restrictions?|filters?|limitations?|censorship|safety|moral|ethical)"),
    (1, r"(?:^|\n)\s{0,4}[#\[<(*]{0,4}(?:system|admin|root|developer)(?: (?:note|message|override|alert|prompt))?[\])>*]{0,3}\s?:"),
    (1, r"\b(?:from now on|from this point|starting now),? (?:you|ignore|always|respond|answer|act)"),
    (1, r"\b(?:new|secret|hidden|real) (?:instructions?|task|objective|rules?)\b"),
    (1, r"\b(?:pretend|act as|roleplay as|simulate)\b[^.!?\n]{0,30}\b(?:no rules|no restrictions|unrestricted|evil|root|administrator|dan\b|hacker)"),
    (1, r"\b(?:when|if|whenever) (?:you (?:see|read)|the user (?:says|asks|mentions|types))\b[^.!?\n]{0,40}\b(?:always|instead|respond with|reply with|say only|output only|answer only)"),
    (1, r"\b(?:ai|language model|llm|assistant|chatbot)s?\b[^.!?\n]{0,20}\b(?:reading|processing|that reads?|who reads?|summari[sz]ing|parsing) this\b"),
    (1, r"\bthis (?:overrides|supersedes|replaces|takes precedence)"),
)  # fmt: skip
_FORMS = [(points, re.compile(form)) for points, form in _PHRASES]
WORDS = frozenset(
    word.encode()
    for word in [
        "instruction",
        "instructions",
        "direction",
        "directions",
        "prompt",
        "prompts",
        "ignore",
        "ignores",
        "ignored",
        "ignoring",
        "disregard",
        "forget",
        "disregarding",
        "override",
        "overrides",
        "bypass",
        "system",
        "jailbreak",
        "jailbroken",
        "dan",
        "unrestricted",
        "unfiltered",
        "uncensored",
        "evil",
        "exfiltrate",
        "credentials",
        "secrets",
        "conversation",
        "guideline",
        "guidelines",
        "directive",
        "directives",
        "rule",
        "rules",
        "policy",
        "policies",
        "safeguard",
        "safeguards",
        "constraint",
        "constraints",
        "command",
        "commands",
        "programming",
        "training",
        "user",
        "human",
        "operator",
        "mode",
        "ignoriere",
        "ignorieren",
        "ignorier",
        "ignoriert",
        "vergiss",
        "anweisung",
        "anweisungen",
        "regeln",
        "vorgaben",
        "ignorez",
        "ignorer",
        "oublie",
        "oubliez",
        "oublier",
        "consignes",
        "instrucciones",
        "ignora",
        "ignorar",
        "olvida",
        "olvide",
        "descarta",
        "istruzioni",
        "ignorare",
        "ignorate",
        "dimentica",
        "regole",
        "ignorem",
        "instrucoes",
        "talimat",
        "kural",
        "zignoruj",
        "zapomnij",
        "instrukcje",
        "polecenia",
        "negeer",
        "instructies",
        "aanwijzingen",
        "restrictions",
        "root",
        "admin",
        "developer",
        "message",
        "anyone",
    ]
)
"""In lower case: an ASCII text without any of these words gives no order."""
_MARKS = (
    "конструк", "инструк", "указани", "правил", "команд", "指令", "指示", "提示", "规则", "規則", "说明", "命令", "プロンプト", "ルール",
    "지시", "명령", "규칙", "프롬프트", "التعليمات", "الأوامر", "القواعد", "talimat", "kural", "komut", "निर्देश", "नियम", "instru",
    "règle", "consigne", "regra", "órden", "regla", "istruz", "regol", "anweis", "regel", "vorgab", "befehl", "polece",
)  # fmt: skip


def may_inject(lowered: str) -> bool:
    """Whether a text that is not ASCII, in lower case, may hold such a phrase of another language."""
    return any(mark in lowered for mark in _MARKS)


def injection(text: str) -> Iterator[Hit]:
    """Phrases that together make an attempt to steer the model; one weak phrase is none."""
    lowered = text.lower()
    if len(lowered) != len(text):  # a few letters grow in lower case, and spans would be off
        lowered = "".join(low if len(low := char.lower()) == 1 else char for char in text)
    total = 0
    hits: list[Hit] = []
    for points, form in _FORMS:
        if (found := form.search(lowered)) is not None:
            total += points
            begin, end = found.span()
            reason = "a phrase that gives a model orders from inside a text"
            hits.append(Hit(begin, end, reason, visible(" ".join(text[begin:end].split()))))
    if total >= _ENOUGH:
        yield from hits
