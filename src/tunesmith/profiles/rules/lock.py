"""What is read once and stays: the facts of a profile's base, and its split."""

from __future__ import annotations

from tunesmith.core.section import Section


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
