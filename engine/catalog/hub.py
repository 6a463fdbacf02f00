"""Requests to the Hugging Face hub: the files of a repository, their contents, and failures in plain sentences.

All requests go through the library huggingface_hub, which handles HF_ENDPOINT, the user's token, offline mode and
proxies. It takes a quarter of a second to import, so it is imported when it is needed.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any, Never, TypeVar
from urllib.parse import quote, urlsplit

from engine.catalog.files import is_safe
from engine.catalog.names import HubModel, public_address
from engine.errors import ModelFileError, UsageError
from engine.formats.gguf import printable
from engine.system import own_thread
from engine.system.web_client import credentials, making_client

TIMEOUT_S = 10.0  # between two reads of a response
ANSWER_S = 60.0
"""What the hub states has to arrive in so long, and of a file the head of its response: a server may send a byte now
and then for ever."""
MOST_BYTES = 8 << 20  # of what the hub states: 20,000 files take so much
RETRIES = 4  # in a row, if none of them brings a byte
FIRST_DELAY_S = 0.5
MAX_DELAY_S = 60.0
SILENCE_S = 10.0  # a longer wait needs someone who is told of it


_T = TypeVar("_T")
_ERRNO = re.compile(r"^\[Errno -?\d+\] ")


class DownloadError(ModelFileError):
    """A model could not be downloaded. The bytes that arrived are kept for the next try, unless they are damaged."""


@dataclass(frozen=True)
class RemoteFile:
    """What the hub states about a file. `digest`: its SHA-256 or, for a small file that is stored in git, its SHA-1 as
    git computes it; "" if neither is stated. `size_bytes` None: not stated."""

    name: str
    size_bytes: int | None
    digest: str


@dataclass(frozen=True)
class Repository:
    """A repository at one commit. `architecture`: that of its GGUF files; "" if the hub does not state it."""

    commit: str
    files: dict[str, RemoteFile]
    architecture: str


def fetch_repository(model: HubModel) -> Repository:
    """Asks the hub about the repository of a model. Raises DownloadError and UsageError."""
    hub = _library()
    try:
        hub.utils.validate_repo_id(model.repository)
        url = (
            f"{endpoint()}/api/models/{model.repository}/revision/{quote(model.revision, safe='')}?blobs=True"
        )
        info = _with_retries(lambda: _in_time(lambda: _stated(url), on_hub=True, url=url))
        files = []
        for sibling in info["siblings"] or ():
            lfs = sibling.get("lfs")
            size = lfs["size"] if lfs else sibling.get("size")
            digest = lfs["sha256"] if lfs else sibling.get("blobId") or ""
            if size is not None and (type(size) is not int or size < 0):
                raise ValueError("no size")
            files.append(RemoteFile(sibling["rfilename"], size, str(digest)))
        if not re.fullmatch(r"[0-9a-f]{40}", str(info["sha"])):
            raise ValueError("no commit")
        architecture = str((info.get("gguf") or {}).get("architecture", ""))
        return Repository(
            str(info["sha"]), {file.name: file for file in files if is_safe(file.name)}, architecture
        )
    except http_errors() as error:
        raise_download_error(error, str(model))
    except hub.errors.HFValidationError:
        raise UsageError(f"hf.co/{model.repository} cannot be the name of a repository.") from None
    # The response has an unknown form.
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise DownloadError(
            f"{endpoint()} does not answer as the hub does.",
            "Check HF_ENDPOINT, and whether the network shows a log-in page first.",
        ) from None


def endpoint() -> str:
    """The URL of the hub, or of a mirror of it."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"


def file_url(model: HubModel, commit: str, file: str) -> str:
    url: str = _library().hf_hub_url(model.repository, file, revision=commit, endpoint=endpoint())
    return url


@contextlib.contextmanager
def open_url(url: str, headers: dict[str, str], *, on_hub: bool) -> Iterator[Any]:
    """The response to a GET request, whose body is to be streamed. The user's token is sent to the hub only: not to
    other servers, and not to those that the hub redirects to. They get the name and the password that netrc has for
    them. Raises DownloadError, the errors of `http_errors`, and UsageError if netrc cannot be read."""
    response = _in_time(lambda: _response_to(url, headers, on_hub), on_hub=on_hub, url=url)
    with contextlib.closing(response):
        yield response


def _response_to(url: str, headers: dict[str, str], on_hub: bool) -> Any:
    """See `open_url`. Bodies of redirects and of errors are not read: they may be of any length, or unpack to it."""
    hub = _library()
    token = None if on_hub else False
    headers = {"Accept-Encoding": "identity", **headers}
    headers = hub.utils.build_hf_headers(token=token, library_name="orin-chat", headers=headers)
    session = hub.utils.get_session()
    known = None if on_hub else credentials(url)
    options = {"auth": known} if known else {}  # else those in the address
    request = session.build_request("GET", url, headers=headers, timeout=TIMEOUT_S)
    for _ in range(session.max_redirects):
        response = session.send(request, stream=True, follow_redirects=False, **options)
        if not response.has_redirect_location:
            break
        response.close()
        if not (request := response.next_request):
            raise _client().InvalidURL("it redirects to an address that is none")
        options = {}
    else:
        raise _client().TooManyRedirects("it redirects too often", request=request)
    if not response.is_success:
        response.close()
        head_alone = type(response)(response.status_code, headers=response.headers, request=response.request)
        hub.utils.hf_raise_for_status(head_alone)
    return response


def _stated(url: str) -> Any:
    """What the hub states at `url`. Raises the errors of `http_errors`, ValueError and RecursionError."""
    with contextlib.closing(_response_to(url, {}, on_hub=True)) as response:
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise ValueError("it is compressed, which nobody asked for")
        text = bytearray()
        for piece in response.iter_raw():
            text += piece
            if len(text) > MOST_BYTES:
                raise ValueError("it is too long")
    return json.loads(text)


def _in_time(work: Callable[[], _T], *, on_hub: bool, url: str) -> _T:
    """What `work` returns or raises. Raises DownloadError if it takes longer than ANSWER_S; it goes on then."""
    done = own_thread.begin(work, "hub")
    try:
        return done.result(ANSWER_S)
    except TimeoutError:
        if done.done():
            raise
        host = f"The hub ({endpoint()})" if on_hub else printable(public_address(url))
        raise DownloadError(
            f"{host} has not answered within {ANSWER_S:.0f} s.", "Check the network, or try again later."
        ) from None


def lock(path: str, timeout_s: float) -> contextlib.AbstractContextManager[object]:
    """The lock on a file that all programs take that use the hub's cache. Raises TimeoutError."""
    held: contextlib.AbstractContextManager[object] = _library().utils.WeakFileLock(path, timeout=timeout_s)
    return held


def http_errors() -> tuple[type[Exception], ...]:
    """The errors of a failed request: the library's own, and those of its HTTP client, of which that for an address has
    another base class."""
    errors, client = _library().errors, _client()
    return (errors.HfHubHTTPError, errors.OfflineModeIsEnabled, client.HTTPError, client.InvalidURL)


def _client() -> ModuleType:
    """The HTTP client of the library: httpx or httpx2, depending on its version."""
    base: type[Exception] = _library().errors.HfHubHTTPError.__bases__[0]
    return import_module(base.__module__.partition(".")[0])


def http_status(error: Exception) -> int:
    """The HTTP status that a server answered with; 0 if it did not answer."""
    response = _response(error)
    return 0 if response is None else int(response.status_code)


def _response(error: Exception) -> Any:
    """The answer of the server; None if there is none."""
    return getattr(error, "response", None)


def retry_after_s(error: Exception, failures: int) -> float | None:
    """How long to wait before the next try after `failures` tries in a row; None if another try makes no sense."""
    hopeless = ("TooManyRedirects", "UnsupportedProtocol", "InvalidURL")  # of whichever HTTP client it is
    is_offline = isinstance(error, _library().errors.OfflineModeIsEnabled)
    if is_offline or failures > RETRIES or type(error).__name__ in hopeless:
        return None
    delay: float = FIRST_DELAY_S * 2 ** (failures - 1)
    if not http_status(error):
        return delay
    if http_status(error) not in (408, 429, 500, 502, 503, 504):
        return None
    retry_after: str = _response(error).headers.get("Retry-After", "")
    return min(float(retry_after), MAX_DELAY_S) if retry_after.isdecimal() else delay


def raise_download_error(
    error: Exception, name: str, *, on_hub: bool = True, has_arrived: bool = False
) -> Never:
    """Raises DownloadError: a sentence that says why `name` could not be downloaded, and one that says what to do.
    `has_arrived`: a part of it is on the disk."""
    errors = _library().errors
    code, server = http_status(error), "The hub" if on_hub else "The server"
    kept = " What was downloaded is kept for the next try." if has_arrived else ""
    if isinstance(error, errors.OfflineModeIsEnabled):
        message = f"{name} is not on this machine, and HF_HUB_OFFLINE forbids downloads."
        hint = "Unset HF_HUB_OFFLINE."
    elif isinstance(error, errors.GatedRepoError) or (code == 403 and on_hub):
        message = f"{name} is gated: its owner must let you in."
        hint = "Accept the terms on its page, then give your token: HF_TOKEN=…, or `hf auth login`."
    elif isinstance(error, errors.RevisionNotFoundError):
        message = f"{name} names a revision that does not exist."
        hint = "Leave the revision out to get the newest."
    elif code in (401, 403, 404):
        message = f"{name} does not exist, or it is private."
        hint = (
            "Check the name. If it is private, give your token: HF_TOKEN=…, or `hf auth login`."
            if on_hub
            else "Check the address. If it needs a password, write it into ~/.netrc."
        )
    elif code == 429:
        message = f"{server} has received too many requests from this network."
        hint = f"Try again in a few minutes.{kept}"
    elif code:
        message = f"{server} failed to deliver {name} (HTTP status {code})."
        hint = f"Try again later.{kept}"
    else:
        host = f"The hub ({endpoint()})" if on_hub else name
        reason = _ERRNO.sub("", printable(" ".join(str(error).split()))) or type(error).__name__
        message = f"{host} cannot be reached: {reason.rstrip('.')}."
        where = ", or name a mirror with HF_ENDPOINT" if on_hub else " and the address"
        hint = f"Check the network{where}.{kept}"
    raise DownloadError(message, hint) from error


def _with_retries(request: Callable[[], Any]) -> Any:
    """Calls `request` again while the server is busy. Without a network it fails at once."""
    failures = 0
    while True:
        try:
            return request()
        except http_errors() as error:
            failures += 1
            delay = retry_after_s(error, failures)
            if delay is None or not http_status(error) or delay > SILENCE_S:
                raise
            time.sleep(delay)


def _library() -> ModuleType:
    """The library huggingface_hub, without telemetry and without output to the terminal. Raises UsageError if a
    variable of the environment is not valid with which its import fails, or its HTTP client."""
    try:
        _ = urlsplit(endpoint()).port
    except ValueError as error:
        raise UsageError(f"HF_ENDPOINT is no address: {error}.", "Unset it, or name a mirror.") from None
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # read once, at import
    try:
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.utils

        huggingface_hub.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise UsageError(
            f"A variable for the library huggingface_hub is not valid: {error}.",
            "Unset those whose names begin with HF_ and that you have set.",
        ) from None

    with making_client():
        huggingface_hub.utils.get_session()  # type: ignore[attr-defined]
    return huggingface_hub
