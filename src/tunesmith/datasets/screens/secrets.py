"""Finds secrets: keys of known providers, private keys, signed tokens, passwords in addresses and assignments."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator

from tunesmith.datasets.screens.finding import Hit, entropy, redacted

_EDGE = r"(?<![A-Za-z0-9])"
_PROVIDERS: tuple[tuple[str, str, str], ...] = (  # what it is, a text that each one holds, its form
    ("an Anthropic key", "sk-ant-", r"sk-ant-[\w-]{24,}"),
    ("an OpenAI key", "sk-", r"sk-(?!ant-)(?:proj-|svcacct-|admin-|or-v1-)?[A-Za-z0-9_-]{20,}"),
    ("an AWS access key id", "AKIA", r"AKIA[A-Z2-7]{16}(?![A-Za-z0-9])"),
    ("an AWS access key id", "ASIA", r"ASIA[A-Z2-7]{16}(?![A-Za-z0-9])"),
    ("a GitHub token", "gh", r"gh[pousr]_[A-Za-z0-9]{36,}"),
    ("a GitHub token", "github_pat_", r"github_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{40,}"),
    ("a GitLab token", "glpat-", r"glpat-[\w-]{20,}"),
    ("a Slack token", "xox", r"xox[abeposr]-[A-Za-z0-9-]{20,}"),
    ("a Slack webhook", "hooks.slack.com", r"hooks\.slack\.com/services/T\w{6,}/B\w{6,}/\w{16,}"),
    ("a Discord webhook", "/api/webhooks/", r"discord(?:app)?\.com/api/webhooks/\d{16,20}/[\w-]{50,}"),
    ("a Google key", "AIza", r"AIza[\w-]{35}"),
    ("a Google token", "ya29.", r"ya29\.[\w-]{24,}"),
    ("a Google client secret", "GOCSPX-", r"GOCSPX-[\w-]{24,}"),
    ("a Stripe key", "k_live_", r"[sr]k_live_[A-Za-z0-9]{16,}"),
    ("a Stripe key", "k_test_", r"[sr]k_test_[A-Za-z0-9]{16,}"),
    ("a webhook secret", "whsec_", r"whsec_[A-Za-z0-9+/=]{24,}"),
    ("a Twilio key", "SK", r"SK[0-9a-f]{32}(?![0-9a-f])"),
    ("a SendGrid key", "SG.", r"SG\.[\w-]{16,32}\.[\w-]{16,64}"),
    ("an npm token", "npm_", r"npm_[A-Za-z0-9]{36}"),
    ("a PyPI token", "pypi-Ag", r"pypi-Ag[\w-]{40,}"),
    ("a Hugging Face token", "hf_", r"hf_[A-Za-z0-9]{30,}"),
    ("a Telegram bot token", ":AA", r"\d{8,10}:AA[\w-]{32,35}"),
    ("a DigitalOcean token", "_v1_", r"do[opr]_v1_[0-9a-f]{64}"),
    ("an Azure storage key", "AccountKey=", r"AccountKey=[A-Za-z0-9+/]{80,}={0,2}"),
    ("a Shopify token", "shp", r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}"),
    ("a Databricks token", "dapi", r"dapi[0-9a-f]{32}"),
    ("a Square token", "sq0", r"sq0(?:atp|csp)-[\w-]{22,}"),
    ("a Vault token", "hvs.", r"hvs\.[\w-]{24,}"),
    ("an age secret key", "AGE-SECRET-KEY-1", r"AGE-SECRET-KEY-1[0-9A-Z]{50,}"),
    ("a Mailgun key", "key-", r"key-[0-9a-f]{32}(?![0-9a-f])"),
)
_KNOWN = [(what, mark, re.compile(_EDGE + form)) for what, mark, form in _PROVIDERS]
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?-----|PuTTY-User-Key-File-[23]:")
_JWT = re.compile(r"(?<![\w-])(eyJ[\w-]{8,})\.(eyJ[\w-]{8,})\.[\w-]{16,}")
_URL_PASSWORD = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]{1,20}://([^\s/:@\"'<>]{0,80}):([^\s/@\"'<>]{3,120})@[\w.-]+")
_SHOWN = re.compile(
    r"(?:\bcurl\b[^\n]{0,80}? -u ?|--user[ =])[\"']?[\w.@-]{1,40}:([^\s\"'@]{6,120})"
    r"|\bauthorization\W{1,4}basic ([A-Za-z0-9+/]{12,}={0,2})"
    r"|<(?:password|secret|token|apikey|api_key)>([^<>\s]{6,120})</"
    r"|\b(?:password|passwd|passcode|pw|pwd)\s{1,3}[\"'`]?([^\s\"'`<>,;:(){}=\[\]/]{8,60})",
    re.IGNORECASE,
)
_ASSIGNED = re.compile(
    r"(?:pass(?:word|wd|phrase|wort)?|passwort|pwd|secret|token|api[_-]?key|(?:access|auth|private|account)[_-]?key"
    r"|credentials?|contraseña|mot de passe|пароль|密码)[\w-]{0,20}"
    r"[\"'`*]{0,3}\s{0,4}(?:=>|:=|={1,3}|:|：|\bis\b|\blautet\b|\best\b|\bes\b)[\"'`*]{0,3}\s{0,4}[\"'`*]{0,3}"
    r"([^\s\"'`<>,;(){}\[\]]{8,200})(?![\w(\[{.])",
    re.IGNORECASE,
)
_MARKS = (
    "pass",
    "pwd",
    "secret",
    "token",
    "key",
    "credential",
    "contraseña",
    "пароль",
    "密码",
    "pw",
    "--user",
    "curl",
    "basic",
)
ASSIGNED_MARKS = tuple(mark.encode() for mark in _MARKS)
"""In lower case; a text without any of these assigns no secret."""
_BEFORE, _BEHIND = 20, 270  # characters around such a word that an assignment takes at most
_PLACEHOLDER = re.compile(
    r"example|sample|dummy|placeholder|redact|change.?me|your|\*\*\*|\.\.\.|…|insert|replace|test.?(?:key|token)|"
    r"(?-i:\bxxx|xxx\b|xxxx|\bXXX|XXX\b|XXXX)|"  # in one case only: keys drawn by chance do hold an XxX
    r"1234567|abcdef|foobar|^\$|^%|^process\.|^os\.|^env\.|^self\.|^config|^settings",
    re.IGNORECASE,
)


def secrets(text: str) -> Iterator[Hit]:
    """Every secret of a text."""
    for what, mark, form in _KNOWN:
        if mark in text:
            yield from _hits(text, form, what)
    if "PRIVATE KEY" in text or "PuTTY-User" in text:
        for found in _PRIVATE_KEY.finditer(text):
            yield Hit(*found.span(), "the beginning of a private key", "-----BEGIN … PRIVATE KEY-----")
    if "eyJ" in text:
        for found in _JWT.finditer(text):
            if _is_jwt_header(found[1]):
                yield Hit(*found.span(), "a signed token (JWT)", redacted(found[0], 3))
    if "://" in text and "@" in text:
        for found in _URL_PASSWORD.finditer(text):
            if not _is_placeholder(found[2]) and found[2].lower() not in {
                "password",
                "pass",
                "passwd",
                "pw",
                "secret",
                "guest",
                "anonymous",
            }:
                yield Hit(*found.span(2), "a password inside an address", redacted(found[2], 0))
    yield from _assigned(text)


def _assigned(text: str) -> Iterator[Hit]:
    lowered = text.lower()
    is_aligned = len(lowered) == len(text)  # a few letters grow in lower case
    for begin, end in _zones(lowered) if is_aligned else [(0, len(text))]:
        for found in _ASSIGNED.finditer(text, begin, end):
            if _is_secret_value(found[1]):
                yield Hit(*found.span(1), "a value given to something called password, secret, key or token", "…")
        for found in _SHOWN.finditer(text, begin, end):
            place = found.lastindex or 0
            if _is_secret_value(found[place]) or (place == 2 and entropy(found[place]) > 3):
                yield Hit(*found.span(place), "a password given to a program, or named in words", "…")


def _zones(lowered: str) -> list[tuple[int, int]]:
    """Where something may be assigned: around the words that name secrets."""
    zones: list[tuple[int, int]] = []
    for place in sorted(found.start() for mark in _MARKS if mark in lowered for found in re.finditer(mark, lowered)):
        begin, end = max(0, place - _BEFORE), place + _BEHIND
        if zones and begin <= zones[-1][1]:
            begin = zones.pop()[0]
        zones.append((begin, end))
    return zones


def _hits(text: str, form: re.Pattern[str], what: str) -> Iterator[Hit]:
    for found in form.finditer(text):
        value = found[0]
        if entropy(value) >= 2.8 and not _is_placeholder(value) and any(map(str.isdigit, value)) | (len(value) > 34):
            yield Hit(*found.span(), f"{what}, by its form", redacted(value, 4))


def _is_placeholder(value: str) -> bool:
    return _PLACEHOLDER.search(value) is not None


def _is_secret_value(value: str) -> bool:
    """Whether a value looks chosen by chance: letters and digits, and no word of code."""
    if _is_placeholder(value) or value.startswith(("/", "http", "-", "@", "#")):
        return False
    if not any(map(str.isalpha, value)) or not any(map(str.isdigit, value)):
        return False
    if re.fullmatch(r"[A-Za-z_]+\d{0,2}|[a-z_]+(?:[.-][a-z_]+)+\d{0,2}|v?[\d._:/-]+[a-z]{0,3}\d{0,2}", value):
        return False  # a name, a dotted path, a version, a number
    return entropy(value) >= 2.75


def _is_jwt_header(part: str) -> bool:
    try:
        header = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        return False
    return isinstance(header, dict) and ("alg" in header or "typ" in header)
