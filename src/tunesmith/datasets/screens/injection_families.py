"""Families of phrases that give a model orders: override, another role, its own prompt, a reader addressed, its tools.

Each phrase is worth points, and what must be in a text for it to be looked for; few are enough alone. All in lower case.
"""

# ruff: noqa: E501 - a pattern reads better in one line

from __future__ import annotations

_NEAR = r"[^.!?\n]{0,40}?"
_STOP = (
    r"(?:ignore|disregard|forget|discard|override|bypass|cancel|revoke|nullify|drop|abandon|neglect|reset|disobey|"
    r"(?:throw|toss) (?:out|away)|(?:set|put|cast|lay) aside|(?:stop|cease|quit) (?:following|obeying|using)|no longer (?:follow|obey))"
)
_LAW = (
    r"(?:instructions?|directives?|guidelines?|guidance|rules|orders|programming|system (?:prompt|message)|prompts?|"
    r"constraints?|safeguards?|safety training|training|polic(?:y|ies))"
)
_PRIOR = r"(?:previous|prior|earlier|preceding|original|initial|existing|former|your)"
_FREE = (
    r"(?:unrestricted|uncensored|unfiltered|jailbroken|never refuses?|"
    r"(?:without|no|free (?:of|from)|(?:has|have|had) no|lacks?|ignoring) (?:any |all |more |your )?"
    r"(?:restrictions?|limits?|limitations?|filters?|rules|safety|censorship|guardrails|morals?|ethics))"
)
_ROLE = (
    r"(?:you are now|you will now|you now|from (?:now|here|this (?:point|moment|message))(?: on(?:wards?)?)?|henceforth|"
    r"(?:act|behave|respond|answer|reply|speak|start over|continue) (?:as|like)|pretend|imagine (?:that )?you|play|become|simulate)"
)
_SHOW = r"(?:print|repeat|output|reveal|show|write|quote|recite|list|display|translate|disclose|copy|dump|give|tell)"
_MODEL = r"(?:a\.?i\.?s?|llms?|(?:large )?language models?|chat ?bots?|(?:ai )?assistants?|(?:ai )?agents|bots?)"
_TAKE = r"(?:send|post|forward|upload|e-?mail|transmit|copy|submit|exfiltrate|leak|append)"
_GOODS = (
    r"(?:files|documents|e-?mails|inbox|contacts|api keys?|keys|credentials|passwords?|environment variables|"
    r"conversation|chat history|system prompt|user(?:'s)? data|secrets|private keys?|tokens|database|address|home directory)"
)

FAMILIES: tuple[tuple[int, str, str], ...] = (
    # override
    (3, "discard cancel revoke nullify drop abandon neglect reset disobey throw toss aside cease quit obey no_longer stop_using", rf"\b{_STOP}\b{_NEAR}\b{_PRIOR}\b[^.!?\n]{{0,25}}?\b{_LAW}\b"),
    (3, "given started", rf"\b{_STOP}\b{_NEAR}\b{_LAW}\b (?:that )?(?:you|were)\b[^.!?\n]{{0,20}}\b(?:given|started|received|got)"),
    (3, "told taught instructed trained", rf"\b{_STOP}\b{_NEAR}\b(?:whatever|everything|anything|all|what)\b{_NEAR}\b(?:told|taught|instructed|trained)\b"),
    (3, "told taught instructed gave", rf"\b(?:whatever|everything|anything)\b{_NEAR}\b(?:told|taught|instructed|gave) you\b[^.!?\n]{{0,20}}\b(?:{_STOP}|(?:set|put|lay) (?:it|this|that|them) aside|forget)"),
    (2, "void revoked cancelled canceled suspended expired obsolete overridden superseded lifted no_longer", rf"\b{_LAW}\b{_NEAR}\b(?:(?:are|is|were|have been|has been|have|hereby) (?:now |all |hereby )?(?:void|revoked|cancell?ed|suspended|expired|obsolete|overridden|superseded|lifted)|no longer (?:apply|valid|binding|in force|count))"),
    (1, "your_ given_to_you you_were hereby", rf"\byour (?:\w+ ){{0,2}}{_LAW}\b|\b{_LAW}\b (?:that )?you (?:were|are|have been) (?:given|told)|\bhereby\b"),
    (1, "override_ administrator_ developer_ creator_", r"(?:^|\n)\W{0,6}(?:system|admin\w*|developer) (?:override|command|order)\b|\bas your (?:administrator|developer|creator|owner)\b"),
    # another role
    (3, "restrict censor filter jailbroken limit refuse rules safety guardrails moral ethic", rf"\b{_ROLE}\b[^.!?\n]{{0,60}}?\b{_FREE}\b"),
    (3, "limit restrict filter rules", rf"(?:^|[.,;:!]\s|\band )(?:act|answer|respond|reply|speak|behave)\b[^.!?\n]{{0,20}}?\b{_FREE}\b"),
    # its own prompt
    (2, "above before preceding", rf"\b{_SHOW}\b[^.!?\n]{{0,20}}?\b(?:everything|all(?: of)?(?: the)? text|the (?:text|words|lines))\b[^.!?\n]{{0,15}}?\b(?:above|before|preceding)\b"),
    (2, "initial original system you_ your_", rf"\b{_SHOW}\b[^.!?\n]{{0,40}}?\b(?:your (?:initial|original|system|hidden|full|exact|first) (?:instructions|prompt|message|rules)|rules? you (?:have been|were) given|what you were told)"),
    (2, "told", r"\bwhat were you (?:told|instructed)\b"),
    (1, "verbatim word exactly code_block including first_line system_prompt this_line", r"\bverbatim\b|\bword for word\b|\bexactly as (?:written|given)|\bin (?:a )?code block|\bincluding (?:the|your) system|\bsystem prompt\b|\babove this line\b|\bstarting with ['\"“]you are"),
    # a reader addressed
    (2, "note message attention notice instruction hidden", rf"\b(?:note|message|attention|notice|instructions?|hidden text)\b[^.:\n]{{0,12}}?\b(?:to|for|,)?\s?(?:any |the |all |every )?{_MODEL}\b(?= ?(?:that|who|which|reading|processing|summari|:|\]|\)))"),
    (2, "if_you", rf"\bif you(?: are|'re) (?:an? )?{_MODEL}\b"),
    (2, "dear", rf"\bdear {_MODEL}\b"),
    (1, "ai_ assistant agent model bot", rf"\b{_MODEL}\b[^.!?\n]{{0,12}}?\b(?:must|reading this|processing this|parsing this|summari[sz](?:es?|ing) this)\b"),
    (1, "display <!-- font-size hidden", r"display:\s?none|<!--|font-size:\s?0|visibility:\s?hidden|\[hidden"),
    (2, "say_nothing need_not_know without_ asked_to", r"\bsay nothing (?:of|about) (?:this|the)|\b(?:need|must|should) not (?:know|find out|notice)|\bwithout (?:asking|telling|informing|notifying) the (?:user|owner|human)|\bdo not (?:mention|say) that you were"),
    (1, "silent secretly do_not_ask asking", r"\b(?:silently|secretly)\b|\b(?:do not|don't|without) ask(?:ing)? (?:for|the)\b"),
    # its tools
    (1, "mail file key credential password variable conversation history token database contact inbox address director document", rf"\b{_TAKE}\b{_NEAR}\b{_GOODS}\b|\b(?:delete|run|execute|read)\b{_NEAR}\b(?:home directory|credentials|passwords?|environment variables)\b"),
    (1, "@ http", rf"\b{_TAKE}\b[^!?\n]{{0,60}}?\bto\b[^!?\n]{{0,30}}?(?:@|https?:)"),
    (1, "tool", r"\b(?:call|use|invoke|run)\b[^.!?\n]{0,25}?\btools?\b"),
    # the same in other languages: "forget all that came before", "no longer hold", "without limits"
    (3, "vergiss vergesst vergessen", r"\bverg(?:iss|esst|essen sie)\b(?! nicht)[^.!?\n]{0,10}\balles\b[^.!?\n]{0,20}\b(?:vorher|davor|bisher|zuvor|gesagt|oben)"),
    (2, "gelten gilt", r"\b(?:anweisungen|regeln|vorgaben|instruktionen)\b[^.!?\n]{0,20}\bgelten\b[^.!?\n]{0,25}\bnicht mehr\b|\bgelten\b[^.!?\n]{0,25}\b(?:anweisungen|regeln|vorgaben|instruktionen)\b[^.!?\n]{0,10}\bnicht mehr\b"),
    (2, "olvid", r"\bolvid[ae][^.!?\n]{0,12}\btodo lo (?:anterior|dicho|que)"),
    (2, "oubli", r"\boublie[zr]?[^.!?\n]{0,8}\btout ce (?:qui précède|que|qu['’])"),
    (2, "dimentica", r"\bdimentica[^.!?\n]{0,8}\btutto (?:quello|ciò) che"),
    (2, "esque", r"\besqueça[^.!?\n]{0,8}\btudo (?:o que|isso|acima)"),
    (2, "vergeet", r"\bvergeet[^.!?\n]{0,8}\balles (?:wat|hierboven)"),
    (2, "забудь", r"забудь(?:те)?[^.!?\n]{0,8}вс[её],? что"),
    (2, "忘记 忽略 无视 忘掉", r"(?:忘记|忽略|无视|忘掉)[^。！？\n]{0,8}(?:之前|以上|前面|上面)[^。！？\n]{0,8}(?:内容|对话|一切|所有)"),
    (2, "soumis liée lié_", r"\b(?:tu n['’]es|vous n['’]êtes) plus (?:soumis|lié)"),
    (1, "ohne sans sin_ senza sem_ zonder без 没有", r"\bohne (?:jede |jegliche )?(?:einschränkung|grenzen|beschränkung|filter|regeln)|\bsans (?:aucune? |la moindre )?(?:restriction|limite|filtre|règle)|\bsin (?:ningun[ao]? )?(?:restricci|límite|limite|filtro|reglas)|\bsenza (?:alcun\w{0,2} )?(?:limit|restrizion|filtr|regol)|\bsem (?:nenhuma? )?(?:restri|limite|filtro|regras)|\bzonder (?:enige )?(?:beperking|grenzen|filter|regels)|без (?:всяких |каких-либо )?(?:ограничени|правил|фильтр)|没有(?:任何)?(?:限制|约束|规则)"),
    (1, "ab_ von_nun partir ora_in vanaf отныне момента 现在", r"\bab (?:jetzt|sofort)\b|\bvon nun an\b|\bà partir de maintenant|\ba partir de (?:ahora|agora)|\bd['’]ora in poi|\bvanaf nu\b|отныне|с этого момента|从现在(?:起|开始)"),
    (1, "actúa agis comporta atua handel", r"\bact[úu]a (?:como|sin)\b|\bagis (?:comme|sans)\b|\bcomporta(?:ti|te)\b|\batu[ae] como\b|\bhandel als\b"),
    (1, "dein_ deine_ tes_règ tus_reglas tue_regole tuas_regras", r"\bdeine (?:\w+ )?(?:regeln|anweisungen|vorgaben)|\btes (?:règles|consignes|instructions)|\btus (?:reglas|instrucciones)|\ble tue (?:regole|istruzioni)|\btuas (?:regras|instruções)"),
    (2, "usuario utilis utente nutzer usuário", r"\bno (?:menciones|digas|reveles)\b[^.!?\n]{0,30}\busuario|\bne (?:dis|dites|mentionne|révèle)\w{0,2}\b[^.!?\n]{0,30}\butilisateur|\bnon dire\b[^.!?\n]{0,25}\butente|\b(?:sag|erwähne|verrate)\w{0,2}\b[^.!?\n]{0,25}\b(?:be)?nutzer\b[^.!?\n]{0,15}\bnicht"),
    (2, "sistema système systemprompt 系统提示 системн", r"\b(?:mostr[ae]|muestra|revela|imprim[ae])\b[^.!?\n]{0,20}\b(?:prompt|mensaje|mensagem) d(?:o|el) sistema|\b(?:affiche|montre|révèle)\b[^.!?\n]{0,20}\b(?:prompt|message) (?:du )?système|\b(?:zeig|nenn|gib)\w{0,2}\b[^.!?\n]{0,20}\bsystemprompt|(?:显示|输出|告诉我)[^。\n]{0,8}系统提示|покажи[^.!?\n]{0,20}системн"),
)  # fmt: skip
WORDS = (
    "discard", "cancel", "revoke", "revoked", "nullify", "void", "abandon", "disobey", "aside", "obey",
    "obeying", "expired", "suspended", "overridden", "superseded", "guidance", "told", "taught", "henceforth",
    "limits", "limit", "restriction", "filter", "filters", "verbatim", "unrestricted", "ais", "llm", "llms",
    "chatbot", "chatbots", "assistants", "bots", "hidden", "secretly", "silently", "passwords",
    "credentials", "keys", "variables", "emails", "files", "tool", "gelten", "vergesst", "vergeet", "beperkingen",
    "limiti", "restricciones", "restrizioni", "limites", "systemprompt", "nstruct", "usuario",
    "utilisateur", "utente", "nutzer", "benutzer", "administrator",
)  # fmt: skip
"""Most texts of this kind in ASCII hold one of these, or one that the older phrases name. Words that stand in every second
system message, such as "assistant", would let every row through to the slow look."""
MARKS = (
    "einschränk", "beschränk", "vergiss", "gelten", "olvid", "límite", "restric", "précède", "soumis", "limite", "esqueça",
    "vergeet", "забудь", "огранич", "忘记", "忘掉", "忽略", "无视", "限制", "dimentica", "actúa", "système", "sistema",
)  # fmt: skip
"""The same for other texts, as parts of words."""
