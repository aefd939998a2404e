"""Finds attempts to give a model orders from inside a text: phrases in several languages, scored together."""

# ruff: noqa: E501 - a pattern or an example reads better in one line

from __future__ import annotations

import re
from collections.abc import Iterator

from tunesmith.datasets.screens.finding import Hit, visible
from tunesmith.datasets.screens.injection_families import FAMILIES
from tunesmith.datasets.screens.injection_families import MARKS as _FAMILY_MARKS
from tunesmith.datasets.screens.injection_families import WORDS as _FAMILY_WORDS

_ENOUGH = 3
_LEET = re.compile(r"\b(?=[a-z0134578@$]{4,20}\b)[a-z]*[0134578@$]+[a-z][a-z0134578@$]*\b")
_PLAIN = str.maketrans("0134578@$", "oieastbas")
_NEAR = r"[^.!?\n,;:]{0,40}?"
_PHRASES: tuple[tuple[int, str, str], ...] = (  # points, what it must hold some of, form; in lower case; blanks are _
    (3, "ignore disregard forget override bypass follow skip", rf"\b(?:ignore|disregard|forget|override|bypass|do not follow|don't follow|stop following|skip)\b{_NEAR}\b(?:previous|prior|above|earlier|preceding|existing|original|all (?:of )?(?:your|the|my)|your|any)\b[^.!?\n,;:]{{0,25}}?\b(?:instruction|direction|rule|prompt|guideline|command|programming|directive|system message|training|polic|constraint|safeguard)"),
    (3, "ignor vergiss", rf"\bignor(?:iere?n?|ier)\b{_NEAR}(?:vorherig|bisherig|obig|vorangegangen|früher|alle|deine|ihre){_NEAR}(?:anweisung|regel|instruktion|vorgabe|befehl)|\bvergiss\b{_NEAR}(?:anweisung|regel|instruktion|vorgabe)"),
    (3, "ignore oublie tiens", rf"\b(?:ignore[zrs]?|oublie[zrs]?|ne tiens? pas compte)\b{_NEAR}(?:instruction|consigne|règle|directive)s?{_NEAR}\b(?:précédent|antérieur|ci-dessus|initial)|\b(?:ignore[zrs]?|oublie[zrs]?)\b (?:toutes? )?(?:les|tes|vos) (?:instruction|consigne|règle)"),
    (3, "ignor olvid descart omiso", rf"\b(?:ignor[ae]|olvid[ae]|descart[ae]|haz caso omiso)\b{_NEAR}(?:instruccion|instrucción|regla|órden|orden|indicacion)\w*{_NEAR}\b(?:anterior|previa|arriba|original)|\b(?:ignora|olvida) (?:todas )?(?:las|tus) (?:instruccion|regla)"),
    (3, "ignor dimentic trascura esque desconsidere", rf"\b(?:ignor[ae]|dimentic[ah]|trascura)\w{{0,4}}\b{_NEAR}(?:istruzion|regol)\w*{_NEAR}\b(?:precedent|anterior|sopra)|\b(?:ignor[ae]|esqueça|desconsidere)\b{_NEAR}(?:instruções|instrução|regras|comandos){_NEAR}\b(?:anterior|acima|prévi)"),
    (3, "игнорируй забудь внимания", rf"(?:игнорируй|забудь|проигнорируй|не обращай внимания на){_NEAR}(?:инструкци|указани|правил|команд)"),
    (3, "忽略 无视 無視 忘记 忘記 理会", r"(?:忽略|无视|無視|忘记|忘記|不要理会)[^。！？\n]{0,15}(?:指令|指示|提示|规则|規則|说明|命令)"),
    (3, "無視 忘れ", r"(?:前の|以前の|上記の|これまでの|すべての)[^。！？\n]{0,10}(?:指示|命令|ルール|プロンプト)[^。！？\n]{0,6}(?:無視|忘れ)"),
    (3, "무시 잊", r"(?:이전|위의|모든)[^.!?\n]{0,12}(?:지시|명령|규칙|프롬프트)[^.!?\n]{0,8}(?:무시|잊)"),
    (3, "تجاهل انس talimat kural komut", r"(?:تجاهل|انس)[^.!؟\n]{0,20}(?:التعليمات|الأوامر|القواعد)|(?:önceki|yukarıdaki|tüm)[^.!?\n]{0,20}(?:talimat|kural|komut)[^.!?\n]{0,15}(?:yok say|unut|görmezden)"),
    (3, "निर्देश नियम zignoruj zapomnij negeer", r"(?:पिछले|सभी|उपरोक्त)[^।!?\n]{0,20}(?:निर्देश|नियम)[^।!?\n]{0,20}(?:अनदेखा|नज़रअंदाज़|भूल)|(?:zignoruj|zapomnij)[^.!?\n]{0,30}(?:instrukcj|polece)|negeer[^.!?\n]{0,30}(?:instructies|aanwijzingen)"),
    (3, "attention ignore disregard forget", r"\bpay no attention to\b[^.!?\n]{0,30}\b(?:told|instruct|rules|prompt|above)|\b(?:ignore|disregard|forget) (?:all (?:of )?)?(?:the |this |that )?(?:text|everything|anything|all|content|message|conversation|stuff)[^.!?\n]{0,20}\b(?:above|before|so far|previously|prior)"),
    (3, "instru regler ohje pokyn hướng інструкц οδηγί הוראות คำสั่ง sebelum", r"(?:ikke følg|ignorer|ignorera|glem|glöm)[^.!?\n]{0,30}(?:instru|regler|anvis)|(?:abaikan|lupakan|hiraukan)[^.!?\n]{0,20}(?:instruksi|perintah|aturan|arahan)|(?:ohita|unohda)[^.!?\n]{0,25}(?:ohje|säänn)|ignoruj[^.!?\n]{0,30}(?:pokyn|instrukc)|bỏ qua[^.!?\n]{0,25}(?:hướng dẫn|chỉ dẫn|lệnh)|ігноруй[^.!?\n]{0,30}(?:інструкц|вказівк)|αγνόησε[^.!?\n]{0,25}οδηγί|התעלם[^.!?\n]{0,25}הוראות|(?:ละเว้น|เพิกเฉย|ไม่ต้องสนใจ)[^.!?\n]{0,25}คำสั่ง"),
    (2, "system hidden initial secret instructions", rf"\b(?:reveal|print|repeat|output|show|display|leak|dump|tell me|write out|give me)\b{_NEAR}\b(?:your|the|its)\b[^.!?\n]{{0,20}}\b(?:system prompt|system message|hidden (?:prompt|instructions)|initial (?:prompt|instructions)|secret instructions|instructions (?:above|verbatim))"),
    (2, "you_are", r"\byou are (?:now|no longer)\b[^.!?\n]{0,40}\b(?:dan\b|jailbroken|unrestricted|unfiltered|evil|uncensored|bound by|free from|an? ai without|in developer mode|developer mode|root)"),
    (2, "tell mention inform reveal alert notify", r"\b(?:do not|don't|never|without) (?:tell|telling|mention|mentioning|inform|informing|reveal|alert|alerting|notify)\w*\b[^.!?\n]{0,25}\b(?:the )?(?:user|human|operator|anyone|this (?:instruction|message|request))"),
    (2, "mode do_anything", r"\b(?:dan mode|developer mode (?:enabled|on|output)|jailbreak mode|god mode enabled|do anything now)\b"),
    (2, "instruction prompt directive message", r"(?:^|\n)\s{0,4}(?:#{1,4} ?|\*\*|\[|<)?(?:new|updated|override|real|actual|important|urgent) (?:system )?(?:instructions?|prompt|directive|message)(?: for (?:the )?(?:ai|assistant|model))?(?:\*\*|\]|>)?\s?:"),
    (1, "with", r"\bwith(?:out| no) (?:any )?(?:restrictions?|filters?|limitations?|censorship|safety|moral|ethical)"),
    (1, "system admin root developer", r"(?:^|\n)\s{0,4}[#\[<(*]{0,4}(?:system|admin|root|developer)(?: (?:note|message|override|alert|prompt))?[\])>*]{0,3}\s?:"),
    (1, "from_now from_this starting_now", r"\b(?:from now on|from this point|starting now),? (?:you|ignore|always|respond|answer|act)"),
    (1, "new secret hidden real", r"\b(?:new|secret|hidden|real) (?:instructions?|task|objective|rules?)\b"),
    (1, "pretend act_as roleplay simulate", r"\b(?:pretend|act as|roleplay as|simulate)\b[^.!?\n]{0,30}\b(?:no rules|no restrictions|unrestricted|evil|root|administrator|dan\b|hacker)"),
    (1, "when if", r"\b(?:when|if|whenever) (?:you (?:see|read)|the user (?:says|asks|mentions|types))\b[^.!?\n]{0,40}\b(?:always|instead|respond with|reply with|say only|output only|answer only)"),
    (1, "reading processing reads summari parsing", r"\b(?:ai|language model|llm|assistant|chatbot)s?\b[^.!?\n]{0,20}\b(?:reading|processing|that reads?|who reads?|summari[sz]ing|parsing) this\b"),
    (1, "overrides supersedes replaces precedence", r"\bthis (?:overrides|supersedes|replaces|takes precedence)"),
)  # fmt: skip
_FORMS = [
    (points, frozenset(need.replace("_", " ") for need in needs.split()), re.compile(form))
    for points, needs, form in _PHRASES + FAMILIES
]
_NEEDS = sorted({need for _, needs, _ in _FORMS for need in needs})
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
        "attention",
        "ignorer",
        "ignorera",
        "abaikan",
        "lupakan",
        "ignoruj",
        "ign",  # with digits in place of letters
        "gnore",
        "nstructions",
        "instruct",
        *_FAMILY_WORDS,
    ]
)
"""In lower case: an ASCII text without any of these words gives no order."""
_MARKS = (
    "конструк", "инструк", "указани", "правил", "команд", "指令", "指示", "提示", "规则", "規則", "说明", "命令", "プロンプト", "ルール",
    "지시", "명령", "규칙", "프롬프트", "التعليمات", "الأوامر", "القواعد", "talimat", "kural", "komut", "निर्देश", "नियम", "instru",
    "règle", "consigne", "regra", "órden", "regla", "istruz", "regol", "anweis", "regel", "vorgab", "befehl", "polece", "følg", "glöm", "ohje", "pokyn",
    "hướng", "chỉ dẫn", "lệnh", "інструкц", "вказівк", "οδηγί", "הוראות", "คำสั่ง", *_FAMILY_MARKS,
)  # fmt: skip


_ASCII_MARKS = tuple(mark for mark in _MARKS if mark.isascii())
_BY_LETTER: dict[str, list[str]] = {}
for _mark in _MARKS:
    if not _mark.isascii():
        _BY_LETTER.setdefault(next(letter for letter in _mark if not letter.isascii()), []).append(_mark)


def may_inject(text: str, beyond: str) -> bool:
    """Whether a text may hold such a phrase of another language; `beyond` are its characters beyond ASCII."""
    letters = {char for char in beyond.lower() if char.isalpha()}
    if not letters:  # only signs, as in typeset English
        return False
    lowered = text.lower()
    if any(mark in lowered for letter in letters for mark in _BY_LETTER.get(letter, ())):
        return True
    return any(mark in lowered for mark in _ASCII_MARKS)


def injection(text: str) -> Iterator[Hit]:
    """Phrases that together make an attempt to steer the model; one weak phrase is none."""
    lowered = text.lower()
    if len(lowered) != len(text):  # a few letters grow in lower case, and spans would be off
        lowered = "".join(low if len(low := char.lower()) == 1 else char for char in text)
    if _LEET.search(lowered):
        lowered = _LEET.sub(lambda found: found[0].translate(_PLAIN), lowered)
    present = {need for need in _NEEDS if need in lowered}
    likely = [(points, form) for points, needs, form in _FORMS if not needs.isdisjoint(present)]
    if sum(points for points, _ in likely) < _ENOUGH:
        return
    total = 0
    hits: list[Hit] = []
    for points, form in likely:
        if (found := form.search(lowered)) is not None:
            total += points
            begin, end = found.span()
            reason = "a phrase that gives a model orders from inside a text"
            hits.append(Hit(begin, end, reason, visible(" ".join(text[begin:end].split()))))
    if total >= _ENOUGH:
        yield from hits
