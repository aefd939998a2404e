"""What went wrong with a model hub, in one sentence that says what to do."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Any

from tunesmith.core.errors import DataError, Refused

_HUB = "https://huggingface.co"
_TOKEN = "create a token in the settings of your account and set HF_TOKEN"  # noqa: S105 - advice, no token


_LIBRARIES = ("huggingface_hub", "httpx2", "httpcore2", "httpx", "httpcore", "json", "hf_xet")
"""Whose errors are about the hub; any other one is a bug of ours, and stays as it is."""


class HubError(DataError):
    """The hub cannot be reached, or does not give what was asked for."""

    code = "hub"


class HubUnreachable(HubError):
    """No hub answers here, or none may be asked."""


@contextlib.contextmanager
def explained(source: str, revision: str | None) -> Iterator[None]:
    """Turn everything that the hub's library raises inside into a HubError."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(
            f"{source}: is gated (HTTP {_status(error)}); accept its terms at {_host()}/{source}, {_TOKEN}"
            f"{_seen_token()}"
        ) from None
    except errors.DisabledRepoError:
        raise HubError(f"{source}: the hub has disabled this model; choose another one") from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            f"{source}: no such model on {_host()}, or it is private; check the spelling, and for a private model "
            f"{_TOKEN}{_seen_token()}"
        ) from None
    except errors.RevisionNotFoundError:
        raise HubError(
            f"{source}: has no revision {revision!r}; write a branch, a tag or a commit that its page lists"
        ) from None
    except errors.HfHubHTTPError as error:
        raise HubError(f"{source}: {_http_reason(_status(error))}") from None
    except errors.LocalEntryNotFoundError as error:  # the library looked for a copy of its own after this
        status = _status(error.__cause__)
        if status is not None:
            raise HubError(f"{source}: {_http_reason(status)}") from None
        raise _unreachable(source, error.__cause__ or error) from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Refused(f"{source}: the disk is full; make room and fetch it again: what came stays") from None
        if isinstance(error, PermissionError | IsADirectoryError | NotADirectoryError):
            raise Refused(f"{source}: cannot be written ({error.strerror}); name another folder with --to") from None
        raise _unreachable(source, error) from None
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _LIBRARIES:
            raise
        raise _unreachable(source, error) from None


def _http_reason(status: int | None) -> str:
    if status == 401:
        return f"the hub does not accept the token in HF_TOKEN (HTTP 401); {_TOKEN}"
    if status == 403:
        return f"the hub forbids it (HTTP 403); {_TOKEN} with the right to read this model"
    if status == 429:
        return "the hub answers no more for now (HTTP 429, too many requests); wait some minutes and fetch it again"
    return f"the hub answered HTTP {status}; try again later: files that came stay"


def _unreachable(source: str, error: BaseException) -> HubUnreachable:
    if os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE"):
        return HubUnreachable(
            f"{source}: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, so no hub is asked; unset it to fetch"
        )
    said = " ".join(str(error).split())[:160]
    return HubUnreachable(
        f"{source}: {_host()} cannot be reached ({type(error).__name__}: {said}); check the network, HTTPS_PROXY, and "
        "HF_ENDPOINT for a mirror, then fetch it again: files that came stay. Without any hub: "
        "`tunesmith base fetch smollm2`, or copy a model's folder here and name its path"
    )


def _status(error: Any) -> int | None:
    response = getattr(error, "response", None)
    return None if response is None else int(response.status_code)


def _host() -> str:
    return (os.environ.get("HF_ENDPOINT") or _HUB).rstrip("/")


def _seen_token() -> str:
    return "; the token in HF_TOKEN has no access to it" if os.environ.get("HF_TOKEN") else ""
