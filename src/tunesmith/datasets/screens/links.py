"""Finds links that could carry data away, or lead where the reader does not see."""

# ruff: noqa: E501 - a pattern or an example reads better in one line

from __future__ import annotations

import re
from collections.abc import Iterator

from tunesmith.datasets.screens.finding import Hit, entropy, visible

_URL = re.compile(r"(?:h(?:tt|xx)ps?|ftp|wss?):/{2}[^\s<>\"'`|\\^\u3000-\u303f\uff00-\uffef]+", re.IGNORECASE)
_HOST = re.compile(r"^[a-z]+://(?:[^/?#@]*@)?(\[[0-9a-f:.]+\]|[^/?#:]+)", re.IGNORECASE)
_IP_HOST = re.compile(r"(?:\d{1,3}\.){3}\d{1,3}|\[[0-9a-f:.]+\]|0x[0-9a-f]{6,8}|\d{8,10}")
_PRIVATE = re.compile(
    r"127\.|10\.|192\.168\.|172\.(?:1[6-9]|2\d|3[01])\.|169\.254\.|0\.0\.0\.0|192\.0\.2\.|198\.51\.100\.|203\.0\.113\.|\[::1?\]|\[f[cd]|\[fe80|\[2001:db8|255\.|8\.8\.|1\.1\.1\.1|1\.2\.3\.4",
    re.IGNORECASE,
)
_IMAGE = re.compile(
    r"!\[[^\]\n]{0,200}\]\(\s*<?([^)\s>]{8,2000})|<img\b[^>]{0,200}?\bsrc\s*=\s*[\"']?([^\"'\s>]{8,2000})",
    re.IGNORECASE,
)
_TEMPLATE = re.compile(
    r"[?&#/=][^&]*(?:\{\{?[\w. ]{2,40}\}\}?|\$\{?[\w.]{2,40}\}?|<[A-Za-z_ ]{2,40}>|\[[A-Z_ ]{3,40}\]|%7B[\w.]{2,40}%7D)",
    re.IGNORECASE,
)
_STEALING = re.compile(
    r"[?&](?:q|d|data|payload|exfil|leak|secret|secrets|token|conversation|chat|history|prompt|context|msg|message|"
    r"content|info|stolen|cookie|cookies|creds|password|pwd|dump|log|b64|base64|steal|loot)=([^&\s)]+)",
    re.IGNORECASE,
)
_SCRIPT = re.compile(r"\]\(\s*((?:javascript|vbscript|data:text/html)[:;,][^)\n]{0,200})", re.IGNORECASE)
_MAX_URL = 2000  # characters looked at; longer ones tell no more
_KNOWN_HOSTS = re.compile(
    r"(?:^|\.)(?:shields\.io|github\.com|githubusercontent\.com|wikimedia\.org|wikipedia\.org|imgur\.com|google\.com|"
    r"googleapis\.com|youtube\.com|gstatic\.com|bing\.com|duckduckgo\.com|stackoverflow\.com|stackexchange\.com|"
    r"amazon\.com|microsoft\.com|apple\.com|gravatar\.com|mermaid\.ink|codecogs\.com|example\.(?:com|org|net))$",
    re.IGNORECASE,
)
_CATCHERS = re.compile(
    r"(?:^|\.)(?:webhook\.site|requestbin\.\w+|pipedream\.net|ngrok(?:-free)?\.(?:io|app|dev)|burpcollaborator\.net|oastify\.com|interact\.sh|oast\.\w+|beeceptor\.com|hookbin\.com|requestcatcher\.com|dnslog\.cn|ceye\.io)$",
    re.IGNORECASE,
)


def links(text: str) -> Iterator[Hit]:
    """Links to bare or disguised hosts, and links that are built to take data with them."""
    for found in _SCRIPT.finditer(text):
        yield Hit(*found.span(1), "a link that runs a script", visible(found[1]))
    for found in _IMAGE.finditer(text):
        address = found[1] or found[2]
        if address.startswith("//") and (reason := _suspicion(f"https:{address[:_MAX_URL]}", True)) is not None:
            yield Hit(found.start(), found.end(), reason, "…")
    images = {place for found in _IMAGE.finditer(text) for place in (found.start(1), found.start(2)) if place >= 0}
    for found in _URL.finditer(text):
        url = found[0][:_MAX_URL].rstrip(").,;:!?*_]}" if found.start() not in images else ").")
        if (reason := _suspicion(url, found.start() in images)) is not None:
            yield Hit(found.start(), found.start() + max(len(url), 1), reason, _shown(url))


def _suspicion(url: str, is_image: bool) -> str | None:
    matched = _HOST.match(url)
    if matched is None:
        return None
    host = matched[1].rstrip(".").lower()
    if _IP_HOST.fullmatch(host):
        return None if _PRIVATE.match(host) else "a link to a bare network address"
    if host.startswith("xn--") or ".xn--" in host:
        return "a link to a host in punycode, which may look like another one"
    if not host.isascii() and re.search(r"[a-z]", host.rpartition(".")[0]):
        return "a link to a host that mixes alphabets"
    if _CATCHERS.search(host):
        return "a link to a service that catches requests"
    if _KNOWN_HOSTS.search(host):
        return None
    if "?" in url or is_image:
        return _carried(url, is_image)
    return None


def _carried(url: str, is_image: bool) -> str | None:
    query = url.partition("?")[2] or (url.rpartition("/")[2] if is_image else "")
    if is_image and _TEMPLATE.search(url):
        return "an image whose address is filled in with data"
    for found in _STEALING.finditer(url):
        value = found[1]
        if (
            _TEMPLATE.search(f"={value}")
            or (len(value) >= 40 and entropy(value) >= 3.5)
            or (is_image and len(value) >= 12)
        ):
            return "a link that carries data in its query"
    values = re.split(r"[&=]", query)
    if is_image and any(len(value) >= 60 and entropy(value) >= 4.3 for value in values):
        return "an image whose address carries data"
    return None


def _shown(url: str) -> str:
    matched = _HOST.match(url)
    return visible(f"…//{matched[1]}/…" if matched is not None else "…")
