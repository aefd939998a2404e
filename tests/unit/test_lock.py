"""What is locked stays: every field, one line each; only the context may shrink."""

from __future__ import annotations

from typing import Any

import pytest

from tunesmith.core.errors import ConfigError, LockedError
from tunesmith.profiles.profile import Base, DataSettings, Profile, Role
from tunesmith.profiles.rules.lock import ArchitectureLock, ProfileLock, check_lock, lock_differences, lock_of

ARCHITECTURE = ArchitectureLock(
    architecture="LlamaForCausalLM",
    family="llama",
    vocab_size=32000,
    context=2048,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    chat_template_sha256="a" * 64,
)
LOCK = ProfileLock(architecture=ARCHITECTURE, heldout_share=0.1, validation_share=0.05)


def changed(**fields: Any) -> ProfileLock:
    return LOCK.model_copy(update={"architecture": ARCHITECTURE.model_copy(update=fields)})


def test_lock_same_has_no_difference() -> None:
    assert lock_differences("dates", LOCK, LOCK) == []
    check_lock("dates", LOCK, LOCK)


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("architecture", "Qwen3ForCausalLM", "architecture: locked LlamaForCausalLM, now Qwen3ForCausalLM"),
        ("family", "qwen3", "family: locked llama, now qwen3"),
        ("vocab_size", 151936, "vocab_size: locked 32000, now 151936"),
        ("context", 4096, "context: locked 2048, now 4096"),
        ("hidden_size", 65, "hidden_size: locked 64, now 65"),
        ("num_layers", 3, "num_layers: locked 2, now 3"),
        ("num_heads", 8, "num_heads: locked 4, now 8"),
        ("num_kv_heads", 1, "num_kv_heads: locked 2, now 1"),
        ("chat_template_sha256", "b" * 64, "chat_template_sha256: locked aaaaaaaaaaaa…, now bbbbbbbbbbbb…"),
        ("chat_template_sha256", None, "chat_template_sha256: locked aaaaaaaaaaaa…, now None"),
    ],
)
def test_lock_each_field_of_the_architecture_is_refused_by_name(field: str, value: Any, line: str) -> None:
    assert lock_differences("dates", LOCK, changed(**{field: value})) == [line]


def test_lock_covers_every_field_of_the_architecture() -> None:
    for field, value in ARCHITECTURE.model_dump().items():
        other = value + 1 if isinstance(value, int) else f"{value}x"
        assert len(lock_differences("dates", LOCK, changed(**{field: other}))) == 1


def test_lock_context_may_shrink() -> None:
    assert lock_differences("dates", LOCK, changed(context=512)) == []


@pytest.mark.parametrize("share", ["heldout_share", "validation_share"])
def test_lock_split_shares_stay(share: str) -> None:
    differences = lock_differences("dates", LOCK, LOCK.model_copy(update={share: 0.2}))
    assert len(differences) == 1
    assert differences[0].startswith(f"data.{share}: locked 0.")
    assert 'tunesmith profile lock dates --new-split --reason "' in differences[0]


def test_lock_all_differences_are_listed_in_one_error() -> None:
    with pytest.raises(LockedError) as caught:
        check_lock("dates", LOCK, changed(vocab_size=1, num_layers=9))
    assert caught.value.message.splitlines() == [
        "profile dates: vocab_size: locked 32000, now 1",
        "profile dates: num_layers: locked 2, now 9",
    ]
    assert isinstance(caught.value, ConfigError)


def test_lock_of_takes_the_shares_of_the_profile() -> None:
    data = DataSettings(heldout_share=0.2, validation_share=0.1)
    profile = Profile(name="x", role=Role.ASSISTANT, base=Base(path="m", family="llama"), data=data)
    assert lock_of(profile, ARCHITECTURE, "d" * 64) == ProfileLock(
        architecture=ARCHITECTURE,
        heldout_share=0.2,
        validation_share=0.1,
        base_digest="d" * 64,
        is_split_decided=False,
    )


def test_lock_base_of_the_same_architecture_and_other_content_is_refused_in_one_line() -> None:
    locked, now = (LOCK.model_copy(update={"base_digest": letter * 64}) for letter in "ab")
    [line] = lock_differences("dates", locked, now)
    assert line.startswith("base: locked aaaaaaaaaaaa…, now bbbbbbbbbbbb…: its weights, tokenizer or settings changed")
    assert lock_differences("dates", LOCK, now) == [], "locked before the digest was kept"


def test_lock_survives_json() -> None:
    assert ProfileLock.model_validate_json(LOCK.model_dump_json()) == LOCK
