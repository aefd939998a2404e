"""The profile lock: a profile's base and its split are fixed once, and any later difference is refused by field."""

from __future__ import annotations

from tunesmith.core.errors import LockedError
from tunesmith.core.section import Section
from tunesmith.profiles.profile import Profile


class ArchitectureLock(Section):
    """Facts read from the base model's own files once; any later difference is refused by field."""

    architecture: str
    """Name of the model class, e.g. LlamaForCausalLM."""
    family: str
    """Its model_type."""
    vocab_size: int
    context: int
    """Longest sequence of the model itself, whatever the profile uses of it."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    chat_template_sha256: str | None = None
    """None for a model without a chat template."""


class ProfileLock(Section):
    """What must never change under a profile: its base, and which share of prompts is held out."""

    architecture: ArchitectureLock
    heldout_share: float
    validation_share: float
    split_number: int = 0
    """Grows when the shares change after a run has decided them: a dataset of another number is split otherwise."""
    is_split_decided: bool = True
    """False while no run has trained, or still may: the two shares may change freely."""
    base_digest: str | None = None
    """sha256 over the base's files; None: locked before it was kept, and nothing was trained since."""


def lock_of(profile: Profile, architecture: ArchitectureLock, base_digest: str) -> ProfileLock:
    """What would be locked now."""
    return ProfileLock(
        architecture=architecture,
        heldout_share=profile.data.heldout_share,
        validation_share=profile.data.validation_share,
        base_digest=base_digest,
        is_split_decided=False,
    )


def lock_differences(name: str, locked: ProfileLock, now: ProfileLock) -> list[str]:
    """Each field that differs, in words; empty when nothing does. The context may shrink, never grow."""
    found: list[str] = []
    for field in ArchitectureLock.model_fields:
        old, new = getattr(locked.architecture, field), getattr(now.architecture, field)
        if old != new and not (field == "context" and new < old):
            found.append(f"{field}: locked {_shown(old)}, now {_shown(new)}")
    if not found and locked.base_digest not in (None, now.base_digest):
        found.append(
            f"base: locked {_shown(locked.base_digest)}, now {_shown(now.base_digest)}: its weights, tokenizer or "
            "settings changed; put it back, or make a new profile for the new one"
        )
    for field in ("heldout_share", "validation_share") if locked.is_split_decided else ():
        old, new = getattr(locked, field), getattr(now, field)
        if old != new:
            found.append(
                f"data.{field}: locked {old:g}, now {new:g}; a run has trained on this split, or still may (cancelled "
                "before it trains, it decides nothing). Set it back, or split only new prompts by the new share: "
                f'tunesmith profile lock {name} --new-split --reason "another share"'
            )
    return found


def check_lock(name: str, locked: ProfileLock, now: ProfileLock, *, new_split: bool = False) -> None:
    """Raise LockedError with every difference, one line each; `new_split`: other shares are no difference."""
    if new_split:
        locked = locked.model_copy(update={"is_split_decided": False})
    differences = lock_differences(name, locked, now)
    if differences:
        raise LockedError("\n".join(f"profile {name}: {difference}" for difference in differences))


def _shown(value: object) -> str:
    """Hashes are cut: nobody compares 64 characters."""
    return f"{value[:12]}…" if isinstance(value, str) and len(value) == 64 else str(value)
