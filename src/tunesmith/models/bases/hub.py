"""A base from a model hub: pinned to a commit, every file checked, the folder whole or absent.

Only what tunesmith reads is fetched: config, tokenizer, chat template, generation config, safetensors, licence. Pickled
weights and Python code never are. Files that came whole stay when a fetch is interrupted; the next one goes on.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tunesmith.core.errors import DataError, MissingExtra, Refused, UsageError, quoted
from tunesmith.core.files import publish_folder, sha256_file
from tunesmith.models.bases.hub_errors import HubError, HubUnreachable, explained
from tunesmith.models.bases.place import FetchedBase, as_fetched, find_whole, is_whole, origin_of, read_fetched
from tunesmith.profiles.architecture import read_architecture, read_tensor_shapes
from tunesmith.profiles.whole_base import is_tokenizer_complete

Progress = Callable[[int, int], None]
"""Bytes that are there, and bytes of all files."""

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}\Z", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors\Z")
_SMALL = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template"
    r"|model\.safetensors\.index)\.json\Z|tokenizer\.model\Z|merges\.txt\Z|chat_template\.jinja\Z"
    r"|(LICEN[SC]E|NOTICE|USE_POLICY)[\w.-]*\Z|README\.md\Z"
)
_CODE = re.compile(r"\.(py|bin|pt|pth|ckpt|pkl|pickle)\Z")
_TIMEOUT_S = 30.0
_LOOK_EVERY_S = 0.2
_RESERVE_BYTES = 64 << 20


def is_hub_id(text: str) -> bool:
    """Whether a text can be the id of a model on a hub: ORG/NAME."""
    return _ID.match(text) is not None and ".." not in text and "--" not in text


@dataclass(frozen=True)
class HubFile:
    """One file of a listing; hashes as far as the hub tells them."""

    name: str
    size: int
    sha256: str | None
    git_id: str | None

    @property
    def is_weights(self) -> bool:
        return _WEIGHTS.match(self.name) is not None


@dataclass(frozen=True)
class Listing:
    """What a revision of a model holds."""

    commit: str
    files: tuple[HubFile, ...]


def fetch_from_hub(
    source: str,
    place: Path,
    *,
    revision: str | None = None,
    to: Path | None = None,
    on_progress: Progress | None = None,
) -> FetchedBase:
    """The base at exactly one commit, in a folder of `place`, or in `to`. What is there already is not fetched again.

    A full commit that is there is found without asking the hub; for a branch or tag, the hub says the commit. Without
    a revision and without a hub, the newest one that is there is taken, with a note.
    """
    if not is_hub_id(source):
        raise UsageError(f"{quoted(source)} is not the id of a model on a hub; write ORG/NAME")
    if revision is not None and _COMMIT.match(revision) and (known := _known(place, to, source, revision)) is not None:
        return known
    try:
        listing = _list(source, revision)
    except HubUnreachable:
        known = find_whole(place, source) if revision is None and to is None else None
        if known is None:
            raise
        return replace(known, note="the hub cannot be reached: nobody asked whether there is a newer revision")
    known = _known(place, to, source, listing.commit)
    if known is not None:
        return known
    wanted = choose_files(source, listing)
    final = to or place / source.replace("/", "--") / listing.commit[:12]
    final.parent.mkdir(parents=True, exist_ok=True)
    staged = final.parent / f".fetching-{final.name}-{listing.commit[:12]}"
    with (final.parent / f".{final.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits here, then finds the first one's work
        if (known := _known(place, to, source, listing.commit)) is not None:
            return known
        staged.mkdir(exist_ok=True)
        _check_room(staged, wanted)
        _download(source, listing.commit, wanted, staged, on_progress or (lambda _done, _total: None))
        shutil.rmtree(staged / ".cache", ignore_errors=True)  # notes of the downloader
        if read_fetched(final) is not None:
            shutil.rmtree(final)  # damaged, or with --to another revision
        made = as_fetched(final, publish_folder(staged, final, origin_of(source, listing.commit)), is_new=True)
    assert made is not None
    return made


def _known(place: Path, to: Path | None, source: str, commit: str) -> FetchedBase | None:
    if to is None:
        return find_whole(place, source, commit)
    known = read_fetched(to)
    return known if known is not None and known.revision == commit and is_whole(to) else None


def choose_files(source: str, listing: Listing) -> list[HubFile]:
    """The files to fetch, small ones first; DataError where they would make no base that can be trained."""
    names = frozenset(file.name for file in listing.files)
    weights = [file for file in listing.files if file.is_weights]
    small = [file for file in listing.files if _SMALL.match(file.name)]
    if "config.json" not in names:
        raise DataError(f"{source}: has no config.json, so it is no model in Hugging Face format; choose another model")
    if not weights:
        raise DataError(f"{source}: {_without_weights(names)}")
    if not is_tokenizer_complete(names):
        raise DataError(f"{source}: has no tokenizer that can be used; choose another model")
    if any(file.name != "model.safetensors" for file in weights) and "model.safetensors.index.json" not in names:
        raise DataError(f"{source}: its weights are in several files without an index; choose another revision")
    return [*sorted(small, key=lambda file: file.name), *sorted(weights, key=lambda file: file.name)]


def _without_weights(names: frozenset[str]) -> str:
    if any(name.lower().endswith(".gguf") for name in names):
        return (
            "holds GGUF files and no safetensors; GGUF files are for serving and cannot be trained. Fetch the model "
            "that they were made from; its page names it"
        )
    if any(_CODE.search(name) for name in names):
        return (
            "has no model.safetensors, only pickled weights, which can run code when they are loaded and are never "
            "fetched; look for a revision with safetensors, such as --revision refs/pr/1, or another model"
        )
    return "has no model.safetensors; choose another model"


def _list(source: str, revision: str | None) -> Listing:
    """Ask the hub which commit a revision is, and what it holds."""
    hub = _library()
    with explained(source, revision):
        about = hub.HfApi(endpoint=_endpoint()).model_info(
            source, revision=revision, files_metadata=True, timeout=_TIMEOUT_S
        )
    if not (isinstance(about.sha, str) and _COMMIT.match(about.sha)) or not about.siblings:
        raise HubError(f"{source}: the hub told no commit or no files; check that {_endpoint() or 'it'} is a model hub")
    return Listing(about.sha, tuple(_file(sibling) for sibling in about.siblings))


def _file(sibling: Any) -> HubFile:
    lfs = sibling.lfs
    return HubFile(
        sibling.rfilename, int(sibling.size or 0), None if lfs is None else lfs.sha256,
        sibling.blob_id if lfs is None else None,
    )  # fmt: skip


def _download(source: str, commit: str, files: Sequence[HubFile], staged: Path, on_progress: Progress) -> None:
    hub = _library()
    total = sum(file.size for file in files)
    wanted = {file.name for file in files}
    for path in staged.iterdir():
        if path.name not in wanted and path.name != ".cache":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    is_checked = False
    with _reporting(staged, total, on_progress), _quiet(hub):
        for file in files:
            if file.is_weights and not is_checked:
                read_architecture(staged)  # what could never be used is said before gigabytes are fetched
                is_checked = True
            with explained(source, commit):
                hub.hf_hub_download(
                    source, file.name, revision=commit, local_dir=staged, endpoint=_endpoint(), etag_timeout=_TIMEOUT_S
                )
            _check_file(source, staged / file.name, file)
    read_tensor_shapes(staged)


def _check_file(source: str, path: Path, file: HubFile) -> None:
    """Refuse bytes that are not those of the commit, and remove them, so that the next fetch asks for them again."""
    is_right = path.is_file() and not path.is_symlink()
    if is_right and file.sha256 is not None:
        is_right = sha256_file(path) == file.sha256
    elif is_right and file.git_id is not None:
        is_right = _git_id(path) == file.git_id
    if not is_right:
        path.unlink(missing_ok=True)
        raise DataError(f"{source}: {file.name} came with other bytes than the hub lists; fetch it again")


def _git_id(path: Path) -> str:
    """The id that git gives a file's content."""
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    digest.update(path.read_bytes())
    return digest.hexdigest()


def _check_room(folder: Path, files: Sequence[HubFile]) -> None:
    there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    needed = sum(file.size for file in files) - there + _RESERVE_BYTES
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise Refused(
            f"{folder.parent}: {needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free; "
            "make room, or name a folder on another disk with --to"
        )


@contextlib.contextmanager
def _reporting(folder: Path, total: int, on_progress: Progress) -> Iterator[None]:
    """Report now and then how many bytes have arrived, whichever way they come."""
    ended = threading.Event()

    def report() -> None:
        while not ended.wait(_LOOK_EVERY_S):
            on_progress(min(_bytes_on_disk(folder), total), total)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    on_progress(total, total)


def _bytes_on_disk(folder: Path) -> int:
    """Blocks, not sizes: a file that is made at its full length at once is not there yet."""
    found = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            about = path.stat()
            found += min(about.st_size, about.st_blocks * 512)
    return found


@contextlib.contextmanager
def _quiet(hub: Any) -> Iterator[None]:
    """Without the library's own bars: we have one for all files."""
    was_off = hub.utils.are_progress_bars_disabled()
    hub.utils.disable_progress_bars()
    try:
        yield
    finally:
        if not was_off:
            hub.utils.enable_progress_bars()


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _library() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise MissingExtra.named("train", "fetching a model from a hub") from None
    return huggingface_hub
