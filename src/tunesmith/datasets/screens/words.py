"""A text as words: in lower case, without signs; the same for every screen that compares texts."""

from __future__ import annotations

_FOLD = bytes(ord(chr(byte).lower()) if chr(byte).isalnum() else ord(" ") for byte in range(128)) + bytes(
    range(128, 256)
)


def words_of(text: str) -> list[bytes]:
    """The words of a text; letters beyond ASCII stay as they are."""
    return text.encode("utf-8", "surrogatepass").translate(_FOLD).split()


def asked(shape: str, contents: list[str], num_prompt: int) -> str:
    """What a row asks. The system message and definitions of functions are the same in many rows by design."""
    return "\n".join([text for code, text in zip(shape[:num_prompt], contents, strict=False) if code not in "sd"])
