"""Finds personal data: e-mail addresses, phone numbers, bank and card numbers, national ids; network addresses apart."""

# ruff: noqa: E501 - a pattern or an example reads better in one line

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator

from tunesmith.datasets.screens.finding import Hit, redacted

_EMAIL = re.compile(
    r"(?<![\w.+%/:=@-])([A-Za-z0-9](?:[\w.+%-]{0,62}[\w+-])?)(?:@|\s?[\[(]at[\])]\s?)"
    r"((?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,4}[A-Za-z]{2,18})(?![\w@(/-]|:[/~\w])"
)
_ROLES = frozenset(
    [
        "abuse",
        "admin",
        "billing",
        "bounce",
        "careers",
        "contact",
        "contacto",
        "customer",
        "customerservice",
        "dev",
        "git",
        "help",
        "hello",
        "hi",
        "hr",
        "info",
        "jobs",
        "kontakt",
        "legal",
        "mail",
        "mailer",
        "marketing",
        "news",
        "newsletter",
        "no-reply",
        "noreply",
        "notifications",
        "office",
        "orders",
        "postmaster",
        "press",
        "privacy",
        "root",
        "sales",
        "security",
        "service",
        "shop",
        "support",
        "team",
        "test",
        "user",
        "username",
        "webmaster",
        "you",
        "your",
        "name",
        "email",
        "me",
        "foo",
        "bar",
        "someone",
        "somebody",
        "anyone",
        "nobody",
        "first.last",
        "firstname.lastname",
    ]
)
_RESERVED = re.compile(
    r"(?:^|\.)(?:example|test|invalid|localhost|local|internal|lan|home|corp)$|(?:^|\.)example\.(?:com|org|net|edu)$"
    r"|^(?:your|my)-?\w+\.\w+$|^(?:domain|company|server|host|email|website)\.\w+$",
    re.IGNORECASE,
)
_FILE_ENDINGS = frozenset(
    [
        "png",
        "jpg",
        "jpeg",
        "gif",
        "svg",
        "webp",
        "css",
        "js",
        "ts",
        "tsx",
        "py",
        "rb",
        "go",
        "rs",
        "java",
        "kt",
        "html",
        "json",
        "yml",
        "yaml",
        "md",
    ]
)
_PHONE = re.compile(
    r"(?<![\w+.-])\+[1-9]\d{0,2}[ .\-/]?(?:\(0?\d{1,4}\)[ .\-/]?)?\d{1,4}(?:[ .\-/]?\d{2,5}){1,5}(?![\w-])"
    r"|(?<![\w.+-])\(?[2-9]\d{2}\)?[ .-][2-9]\d{2}[ .-]\d{4}(?![\w-])"
)
_CALLED = re.compile(
    r"(?:\b(?:tel|phone|mobile|cell|call me|call|fax|whatsapp|telefon|handy|rufnummer|téléphone|portable|teléfono"
    r"|móvil|telefono|cellulare|telefone|my number|mein[e]? nummer|hotline|sms)\b|телефон|电话|電話)[^\d\n+]{0,20}(\(?0?\d{2,5}\)?(?:[ ./-]?\d{2,5}){1,5})(?![\w-])",
    re.IGNORECASE,
)
_IBAN = re.compile(
    r"(?<![A-Za-z0-9])[a-z]{2}\d{13,29}(?![A-Za-z0-9])|(?<![A-Za-z0-9])[A-Z]{2}\d{2}(?:[ -]?[A-Z0-9]{4}){2,7}(?:[ -]?[A-Z0-9]{1,3})?(?![A-Za-z0-9])"
)
_IBAN_SIZES = {
    "AD": 24, "AE": 23, "AT": 20, "BE": 16, "BG": 22, "BR": 29, "CH": 21, "CY": 28, "CZ": 24, "DE": 22, "DK": 18,
    "EE": 20, "ES": 24, "FI": 18, "FR": 27, "GB": 22, "GR": 27, "HR": 21, "HU": 28, "IE": 22, "IL": 23, "IS": 26,
    "IT": 27, "LI": 21, "LT": 20, "LU": 20, "LV": 21, "MC": 27, "MT": 31, "NL": 18, "NO": 15, "PL": 28, "PT": 25,
    "RO": 24, "RS": 22, "SA": 24, "SE": 24, "SI": 19, "SK": 24, "SM": 27, "TR": 26, "UA": 29,
}  # fmt: skip
_CARD = re.compile(r"(?<![\w.-])[3-6]\d{3}(?:([ -]?)\d{4}\1\d{4}\1\d{1,7}|[ -]?\d{6}[ -]?\d{4,5})(?![\w-])(?!\.\d)")
_CARD_SIZES = re.compile(r"4(?:.{12}|.{15}|.{18})|5.{15}|3[47].{13}|3[068].{12}|35.{14}|6.{15}|6.{18}")
_TEST_CARDS = ("4111111111111111", "4242424242424242", "5555555555554444", "378282246310005", "4000000000000002")
_IPV4 = re.compile(r"(?<![\w.-])(?:\d{1,3}\.){3}\d{1,3}(?![\w-])(?!\.\d)")
_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){3,7}[0-9A-Fa-f]{0,4}(?![\w:.])")
_SSN = re.compile(
    r"(?<=SSN )(?!000|666|9)\d{3} (?!00)\d{2} (?!0000)\d{4}(?!\w)|(?<![\w-])(?!000|666|9)\d{3}-(?!00)\d{2}-(?!0000)\d{4}(?![\w-])"
)
_CPF = re.compile(r"(?<![\w.-])\d{3}\.\d{3}\.\d{3}-\d{2}(?![\w-])")
_DNI = re.compile(r"(?<![\w.-])[XYZ]?\d{7,8}-?[A-HJ-NP-TV-Z](?![\w-])")
_CODICE = re.compile(r"(?<!\w)[A-Z]{6}\d{2}[ABCDEHLMPRST]\d{2}[A-Z]\d{3}[A-Z](?!\w)")
_NIR = re.compile(r"(?<![\w.-])[12] ?\d{2} ?(?:0[1-9]|1[0-2]) ?\d[\dAB] ?\d{3} ?\d{3} ?\d{2}(?![\w-])")
_AADHAAR = re.compile(r"(?<![\w.-])[2-9]\d{3} \d{4} \d{4}(?![\w-])(?! \d)")
_TAX_ID = re.compile(r"(?:steuer-?id(?:entifikations)?(?:nummer|nr)?|idnr)\W{0,4}([1-9]\d{10})(?!\d)", re.IGNORECASE)
_PESEL = re.compile(r"PESEL\W{0,4}(\d{11})(?!\d)", re.IGNORECASE)
_ODD = dict(
    zip("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ", map(int, ["1", "0", "5", "7", "9", "13", "15", "17", "19", "21", "1", "0", "5", "7", "9", "13", "15", "17", "19", "21", "2", "4", "18", "20", "11", "3", "6", "8", "12", "14", "16", "10", "22", "25", "24", "23"]), strict=True)
)  # fmt: skip


_ZONE = re.compile(r"[0-9](?:[^0-9]{0,12}[0-9]){6,}")
_BEFORE, _BEHIND = 45, 12  # characters around a zone that belong to its numbers: a country, a word like "phone"


def emails(text: str) -> Iterator[Hit]:
    """Addresses of persons; those of roles ("info@") and of reserved names ("example.com") are nobody's."""
    if "@" not in text and "at]" not in text and "at)" not in text:
        return
    for found in _EMAIL.finditer(text):
        name, host = found[1].lower(), found[2]
        if name in _ROLES or _RESERVED.search(host) or host.rpartition(".")[2].lower() in _FILE_ENDINGS:
            continue
        if "@" not in found[0] and "." not in name and len(name) < 4:
            continue
        yield Hit(*found.span(), "an e-mail address", f"…@{host}")


def numbers(text: str) -> Iterator[Hit]:
    """Numbers that belong to a person; checked by their own check digits where they have some."""
    end = 0
    for zone in _ZONE.finditer(text):  # the rest holds no number that is long enough
        begin, end = max(end, zone.start() - _BEFORE), zone.end() + _BEHIND
        yield from _numbers(text, begin, end)


def _numbers(text: str, begin: int, end: int) -> Iterator[Hit]:
    for found in _CARD.finditer(text, begin, end):
        digits = _digits(found[0])
        if _CARD_SIZES.fullmatch(digits) and digits not in _TEST_CARDS and len(set(digits)) > 3 and _is_luhn(digits):
            yield Hit(*found.span(), "a card number with the right check digit", redacted(found[0], 0))
    for found in _IBAN.finditer(text, begin, end):
        if (iban := _iban_of(found[0])) is not None:
            yield Hit(*found.span(), "an IBAN with the right check digits", redacted(iban, 2))
    for found in _PHONE.finditer(text, begin, end):
        digits = _digits(found[0])
        if 9 <= len(digits) <= 15 and not digits[:-2].endswith("55501") and len(set(digits)) > 3:
            yield Hit(*found.span(), "a phone number", redacted(found[0], 0))
    for found in _CALLED.finditer(text, begin, end):
        digits = _digits(found[1])
        if 7 <= len(digits) <= 13 and not digits[:-2].endswith("55501") and len(set(digits)) > 3:
            yield Hit(*found.span(1), "a phone number, by the word before it", redacted(found[1], 0))
    yield from _national_ids(text, begin, end)


def network_addresses(text: str) -> Iterator[Hit]:
    """Public IP addresses; private, reserved and documentation ones are nobody's."""
    for form in (_IPV4, _IPV6):
        for found in form.finditer(text):
            try:
                address = ipaddress.ip_address(found[0])
            except ValueError:
                continue
            if address.is_global and found[0] not in {"8.8.8.8", "8.8.4.4", "1.1.1.1", "9.9.9.9"}:
                yield Hit(*found.span(), "a public IP address", redacted(found[0], 0))


def _national_ids(text: str, begin: int, end: int) -> Iterator[Hit]:
    checks = (
        (_SSN, "a US social security number, by its form", lambda _: True),
        (_CPF, "a Brazilian CPF with the right check digits", _is_cpf),
        (_DNI, "a Spanish DNI or NIE with the right letter", _is_dni),
        (_CODICE, "an Italian codice fiscale with the right letter", _is_codice),
        (_NIR, "a French social security number with the right key", _is_nir),
        (_AADHAAR, "an Indian Aadhaar number with the right check digit", _is_verhoeff),
    )
    for form, reason, is_right in checks:
        for found in form.finditer(text, begin, end):
            if is_right(found[0]) and len(set(_digits(found[0]))) > 2:
                yield Hit(*found.span(), reason, redacted(found[0], 0))
    for found in _TAX_ID.finditer(text, begin, end):
        if _is_tax_id(found[1]):
            yield Hit(*found.span(1), "a German tax id with the right check digit", redacted(found[1], 0))
    for found in _PESEL.finditer(text, begin, end):
        if sum(int(d) * w for d, w in zip(found[1], (1, 3, 7, 9, 1, 3, 7, 9, 1, 3, 1), strict=True)) % 10 == 0:
            yield Hit(*found.span(1), "a Polish PESEL with the right check digit", redacted(found[1], 0))


def _digits(text: str) -> str:
    return "".join(filter(str.isdecimal, text))


def _is_tax_id(digits: str) -> bool:
    product = 10
    for digit in digits[:10]:
        total = (int(digit) + product) % 10 or 10
        product = total * 2 % 11
    return (11 - product) % 10 == int(digits[10])


def _is_luhn(digits: str) -> bool:
    doubled = sum(sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2])
    return (doubled + sum(map(int, digits[-1::-2]))) % 10 == 0


def _iban_of(text: str) -> str | None:
    """The IBAN that a text begins with, without blanks."""
    packed = text.replace(" ", "").replace("-", "").upper()
    iban = packed[: _IBAN_SIZES.get(packed[:2], 0)]
    if len(iban) < 15 or len(iban) != _IBAN_SIZES[packed[:2]]:
        return None
    return iban if int("".join(str(int(char, 36)) for char in iban[4:] + iban[:4])) % 97 == 1 else None


def _is_cpf(text: str) -> bool:
    digits = [int(digit) for digit in _digits(text)]
    for size in (9, 10):
        rest = sum(digit * weight for digit, weight in zip(digits, range(size + 1, 1, -1), strict=False)) * 10 % 11
        if rest % 10 != digits[size]:
            return False
    return True


def _is_dni(text: str) -> bool:
    packed = text.replace("-", "")
    if packed[0] not in "XYZ" and len(packed) != 9:
        return False
    number = packed[:-1].replace("X", "0", 1).replace("Y", "1", 1).replace("Z", "2", 1)
    return "TRWAGMYFPDXBNJZSQVHLCKE"[int(number) % 23] == packed[-1]


def _is_codice(text: str) -> bool:
    if not text.isascii():
        return False
    even = sum(int(char, 36) - (10 if char.isalpha() else 0) for char in text[1:15:2])
    return chr(ord("A") + (even + sum(_ODD[char] for char in text[0:15:2])) % 26) == text[15]


def _is_nir(text: str) -> bool:
    packed = text.replace(" ", "")
    number = packed[:13].replace("2A", "19", 1).replace("2B", "18", 1)
    return len(packed) == 15 and number.isdecimal() and 97 - int(number) % 97 == int(packed[13:])


_PERMUTED = (
    "0123456789",
    "1576283094",
    "5803796142",
    "8916043527",
    "9453126870",
    "4286573901",
    "2793806415",
    "7046913258",
)
_PRODUCT = (
    "0123456789", "1234067895", "2340178956", "3401289567", "4012395678",
    "5987604321", "6598710432", "7659821043", "8765932104", "9876543210",
)  # fmt: skip


def _is_verhoeff(text: str) -> bool:
    state = 0
    for place, digit in enumerate(reversed(_digits(text))):
        state = int(_PRODUCT[state][int(_PERMUTED[place % 8][int(digit)])])
    return state == 0
