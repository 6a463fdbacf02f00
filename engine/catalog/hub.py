"""What the hub says: the files of a repository, their bytes, and in a sentence why there are none.

All that touches the network goes through the library huggingface_hub, which knows HF_ENDPOINT, the user's
token, offline mode and proxies. It takes a quarter of a second to import, so that happens when it is needed.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Never

from engine.catalog.files import is_safe
from engine.catalog.names import HubModel
from engine.errors import ModelFileError, UsageError
from engine.formats.gguf import shown

TIMEOUT_S = 10.0  # for an answer to begin, and between two pieces of it
RETRIES = 4  # without a byte gained
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 60.0


class DownloadError(ModelFileError):
    """A model could not be had. What arrived of it is kept for the next try."""


@dataclass(frozen=True)
class RemoteFile:
    """A file as the server states it. `digest` is its SHA-256 or, for a small file kept in git, git's SHA-1
    of it; "" where neither is stated. `size_bytes` None: not stated."""

    name: str
    size_bytes: int | None
    digest: str


@dataclass(frozen=True)
class Repository:
    """A repository at one commit. `architecture` is that of its GGUF files; "" where the hub does not say."""

    commit: str
    files: dict[str, RemoteFile]
    architecture: str


def repository(model: HubModel) -> Repository:
    """What the hub says of a repository. Raises DownloadError and UsageError."""
    hub = _hub()
    api = hub.HfApi(endpoint=endpoint(), library_name="orin-chat")
    try:
        info = _patiently(
            lambda: api.model_info(
                model.repository, revision=model.revision, timeout=TIMEOUT_S, files_metadata=True
            )
        )
        files = [
            RemoteFile(
                sibling.rfilename,
                sibling.lfs.size if sibling.lfs else sibling.size,
                str(sibling.lfs.sha256 if sibling.lfs else sibling.blob_id or ""),
            )
            for sibling in info.siblings or ()
        ]
        if not re.fullmatch(r"[0-9a-f]{40}", str(info.sha)):
            raise ValueError("no commit")
        return Repository(
            commit=str(info.sha),
            files={file.name: file for file in files if is_safe(file.name)},
            architecture=str((info.gguf or {}).get("architecture", "")),
        )
    except http_errors() as error:
        fail(error, str(model))
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # an answer in no form that is known
        if isinstance(error, hub.errors.HFValidationError):
            raise UsageError(f"hf.co/{model.repository} cannot be the name of a repository.") from None
        raise DownloadError(
            f"{endpoint()} does not answer as the hub does.",
            "Check HF_ENDPOINT, and that no log-in page of the network is in between.",
        ) from None


def endpoint() -> str:
    """The hub's address, or that of a mirror."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def file_url(model: HubModel, commit: str, file: str) -> str:
    url: str = _hub().hf_hub_url(model.repository, file, revision=commit, endpoint=endpoint())
    return url


@contextlib.contextmanager
def opened(url: str, headers: dict[str, str], *, on_hub: bool) -> Iterator[Any]:
    """The response to a GET, its body to be streamed. The user's token goes to the hub alone: neither to
    where it redirects to nor to other addresses. Raises what `http_errors` lists."""
    hub = _hub()
    token = None if on_hub else False
    headers = hub.utils.build_hf_headers(token=token, library_name="orin-chat", headers=headers)
    session = hub.utils.get_session()
    with session.stream("GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True) as response:
        hub.utils.hf_raise_for_status(response)
        yield response


def lock(path: str, timeout_s: float) -> contextlib.AbstractContextManager[object]:
    """The lock that every user of the hub's cache takes on a file. Raises TimeoutError."""
    held: contextlib.AbstractContextManager[object] = _hub().utils.WeakFileLock(path, timeout=timeout_s)
    return held


def http_errors() -> tuple[type[Exception], ...]:
    """What the library raises for a request that failed: errors of its own, or httpx's (which has another
    name in other versions of the library)."""
    errors = _hub().errors
    base: type[Exception] = errors.HfHubHTTPError.__bases__[0]
    return (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, base)


def status(error: Exception) -> int:
    """The status with which a server answered, 0 where none did."""
    response = getattr(error, "response", None)
    return 0 if response is None else int(response.status_code)


def retry_after_s(error: Exception, failures: int) -> float | None:
    """How long to wait before the next try after `failures` in a row; None where another makes no sense."""
    if isinstance(error, _hub().errors.OfflineModeIsEnabled) or failures > RETRIES:
        return None
    delay: float = FIRST_DELAY_S * 2 ** (failures - 1)
    if not status(error):
        return delay
    if status(error) not in (408, 429, 500, 502, 503, 504):
        return None
    asked = error.response.headers.get("Retry-After", "")  # type: ignore[attr-defined]
    return min(float(asked), MAX_DELAY_S) if asked.isdecimal() else delay


def fail(error: Exception, what: str, *, on_hub: bool = True) -> Never:
    """Raises DownloadError: why `what` could not be had, in one sentence, and one on what to do."""
    errors = _hub().errors
    code = status(error)
    keeps = "What was downloaded is kept for the next try."
    if isinstance(error, errors.OfflineModeIsEnabled):
        message, hint = f"{what} is not on this machine, and HF_HUB_OFFLINE forbids to get it.", "Unset it."
    elif isinstance(error, errors.GatedRepoError) or code == 403:
        message = f"{what} is gated: its owner must let you in."
        hint = "Accept its terms on its page, then give your token: HF_TOKEN=…, or `hf auth login`."
    elif isinstance(error, errors.RevisionNotFoundError):
        message, hint = f"{what} names a revision that does not exist.", "Leave it away for the newest."
    elif code in (401, 404):
        message = f"{what} does not exist, or it is private."
        hint = "Check the name; for a private one give your token: HF_TOKEN=…, or `hf auth login`."
    elif code == 429:
        message, hint = "The hub has had too many requests from here.", f"Try again in some minutes. {keeps}"
    elif code:
        message, hint = f"The server failed to give {what} (status {code}).", f"Try again later. {keeps}"
    else:
        where = f"The hub ({endpoint()})" if on_hub else what
        reason = shown(" ".join(str(error).split())) or type(error).__name__
        message = f"{where} cannot be reached: {reason.rstrip('.')}."
        hint = f"Check the network, or name a mirror with HF_ENDPOINT. {keeps}"
    raise DownloadError(message, hint) from error


def _patiently(ask: Callable[[], Any]) -> Any:
    """What `ask` returns, asked again while the server is busy. Without a network it fails at once."""
    failures = 0
    while True:
        try:
            return ask()
        except http_errors() as error:
            failures += 1
            delay = retry_after_s(error, failures)
            if delay is None or not status(error):
                raise
            time.sleep(delay)


def _hub() -> ModuleType:
    """The library, told to keep to itself: no telemetry, and nothing written to the terminal."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read once, at import
    import huggingface_hub
    import huggingface_hub.errors
    import huggingface_hub.utils

    huggingface_hub.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    return huggingface_hub
