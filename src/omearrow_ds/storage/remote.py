"""Access to objects on a server: `Storage` configures it, `ObjectStore` reads objects below a URL."""

from __future__ import annotations

import bisect
import configparser
import functools
import importlib.util
import os
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from omearrow_ds.errors import ArgumentError, BackendError, FormatError, MissingPathError, OMEArrowDSError, StorageError
from omearrow_ds.options import refuse_options, refuse_value
from omearrow_ds.storage.byte_source import ByteRange, coalesced
from omearrow_ds.storage.formats._error_translation import refuse
from omearrow_ds.storage.formats._handles import ProcessLocal
from omearrow_ds.storage.formats._urls import Url, as_parsed
from omearrow_ds.text import as_keywords

_SILENT_S = 30.0  # Time without a byte until an error is raised, regardless of the number of tries.
READ_S, _CONNECT_S = 14, 5  # Timeouts of one try; several tries fit in that time.
_SOONER_S = (3, 2, 2, 2, 2, 2)  # Timeouts of the first tries of a byte request: most stalled ones succeed on retry.
_QUICK_S, _SOON_S = 0.25, (1, 1, 1, 1, 2, 2, 2, 3)  # Timeouts for servers whose slowest answer took at most 0.25 s.
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0  # Upper limits; pauses are random so that hosts do not retry at the same time.
_RETRIES = {"max_retries": 12, "retry_timeout": timedelta(seconds=10)}  # Limits per piece of a large upload.
_CHUNK_BYTES = 2**18
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,60})</Code>")
_NO_CREDENTIALS = ("ExpiredToken", "InvalidToken", "TokenRefreshRequired")  # Error codes with status 400.
_PASSING = {408, 425, 429}  # 4xx statuses after which the same request may succeed later.
_AZURE = "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"
_KEYS = {"gs": "GOOGLE_APPLICATION_CREDENTIALS", "az": _AZURE, "abfs": _AZURE}  # Variables that obstore reads.
_ENDPOINTS, _REGIONS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"), ("AWS_REGION", "AWS_DEFAULT_REGION")
_BEYOND = 416  # Status if a range begins after the end of the object.
_UNHEARD_S = {"dns error": 2.0, "refused": 8.0}  # Seconds until a server that never answered is an error.
_AT_ONCE = 8  # Concurrent range requests for one object.
_first_process = functools.cache(os.getpid)  # This process used the client first, or the one it was forked from.
Sink = Callable[[memoryview], object]
Span = tuple[int, int | None]  # First byte, and the one after the last; None is the end of the object.
Result = TypeVar("Result")


@dataclass(frozen=True)
class Storage:
    """Settings for access to an object store: endpoint, region and credentials profile.

    An instance holds no secret. Each process finds credentials as the AWS tools do: in the environment
    (``AWS_ACCESS_KEY_ID``, ...), in ``~/.aws``, or from the role of the machine. For Google and Azure, they come from
    their environment variables or the role.

    Parameters
    ----------
    anonymous
        ``False`` signs requests. ``True`` does not, as public buckets need it.
    endpoint
        ``None`` is ``AWS_ENDPOINT_URL``, or Amazon. Otherwise the URL of an S3-compatible server.
    region
        ``None`` is the region of the environment or profile. Otherwise an S3 region.
    profile
        ``None``, or the profile of ``~/.aws`` with the credentials.

    Raises
    ------
    ArgumentError
        If arguments contradict each other, or ``endpoint`` is not a URL or contains a password.

    Examples
    --------
    >>> from omearrow_ds import Storage
    >>> Storage(anonymous=True, region="us-east-1")
    Storage(anonymous=True, region='us-east-1')
    """

    anonymous: bool = False
    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None

    def __post_init__(self) -> None:
        if self.endpoint is not None and re.fullmatch(r"https?://[^/@?#\s]+/?", self.endpoint) is None:
            allowed = "http://HOST:PORT or https://HOST:PORT, without a user or password"
            raise ArgumentError(option="endpoint", allowed=allowed)
        if self.anonymous and self.profile is not None:
            refuse_value("profile", self.profile, "conflicts with anonymous=True", "pass only one of them")

    def __repr__(self) -> str:
        return f"Storage({', '.join(as_keywords({name: value or None for name, value in vars(self).items()}))})"


class TransientError(StorageError):
    """Error for a request to a server that failed, but may succeed if repeated."""


class ObjectVersion(NamedTuple):
    """Version of an object: the size, and the ETag or modification time."""

    size_bytes: int
    tag: str

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> ObjectVersion:
        """Return the version in obstore's metadata of an object."""
        return cls(int(meta["size"]), (meta["e_tag"] or meta["last_modified"].isoformat()).strip('"'))


class ObjectStore:
    """Objects below a URL, for reading."""

    _option = "storage"  # Name of the argument that passes its `Storage`.
    _missing = "does not exist; restore it, or correct the URL"

    def __init__(self, url: Url, storage: Storage) -> None:
        of_s3 = {name: value for name, value in vars(storage).items() if value is not None and name != "anonymous"}
        if url.scheme != "s3":
            refuse_options(of_s3, f"applies only to S3 URLs, not to {url}", remedy="leave it out of Storage")
        self.url, self.storage = url, storage
        new_clients = partial(functools.cache, partial(open_client, url, storage))
        self._clients: ProcessLocal[Callable[..., Any]] = ProcessLocal(new_clients)
        self._has_answered, self._unheard_s = False, 0.0  # Whether it ever answered, and since when it has not.
        self._slowest_s = 0.0  # Time of its slowest answer, which determines later timeouts.

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, self.storage)

    def client(self, read_s: int = 0, *, retries: bool = False) -> Any:
        """Return the client of this process, see `open_client`; it must exist before threads use it."""
        return self._clients.get()(read_s or READ_S, retries)

    def read(self, name: str, *, version: ObjectVersion | None = None) -> memoryview:
        data = bytearray()
        self.fetch(name, None, data.extend, version=version)
        return memoryview(data)

    def ranges(
        self, name: str, spans: Sequence[ByteRange], version: ObjectVersion | None = None, size_bytes: int | None = None
    ) -> tuple[list[memoryview], ObjectVersion]:
        """Return the bytes of several byte ranges of an object, fetched concurrently, and the version of the object.

        Spans that are near each other share a request. The last may reach beyond the end. For errors, see `fetch`.
        """
        runs = coalesced(spans)
        fetched = [bytearray() for _ in runs]

        def fetch(run: ByteRange, data: bytearray) -> ObjectVersion:
            return self.fetch(name, size_bytes, data.extend, span=run, version=version)

        if len(runs) == 1:
            versions = {fetch(runs[0], fetched[0])}
        else:
            with ThreadPoolExecutor(min(len(runs), _AT_ONCE), "omearrow-ds-range") as pool:
                versions = set(pool.map(fetch, runs, fetched))
        if len(versions) > 1:
            raise self._changed(name)
        parts = []
        for start, stop in spans:
            index = bisect.bisect_left(runs, (start + 1,)) - 1
            first = runs[index][0]
            parts.append(memoryview(fetched[index])[start - first : stop - first])
        return parts, versions.pop()

    def _changed(self, name: str) -> FormatError:
        problem = "was replaced or changed since it was opened"
        return FormatError(problem, path=f"{self.url}/{name}", remedy="open it again")

    def listed(self, prefix: str) -> dict[str, ObjectVersion]:
        """Return the version of each object below a prefix, by object name relative to the prefix."""
        store, subject = self.client(), f"{self.url}/{prefix}"
        if self.url.is_web:
            raise StorageError(f"{subject}: a web server cannot list files; pass the URLs of the files")

        def attempt() -> dict[str, ObjectVersion]:
            objects = chain.from_iterable(store.list(prefix or None, chunk_size=1000))
            return {str(entry["path"]).removeprefix(prefix).lstrip("/"): ObjectVersion.of(entry) for entry in objects}

        return self.repeat(RetryDeadline(subject, "listing failed"), attempt)

    def fetch(
        self,
        name: str,
        size_bytes: int | None,
        sink: Sink,
        span: Span = (0, None),
        version: ObjectVersion | None = None,
    ) -> ObjectVersion:
        """Pass an object to ``sink`` in pieces, resume after interruptions, and return the version of the object.

        ``span`` limits it to the bytes from start to stop, or to its end if earlier. Raises `StorageError` if no byte
        arrives for 30 s, or the server refuses it; `MissingPathError` if it does not exist; `FormatError` if its size
        is not ``size_bytes``, or its version is not ``version``.
        """
        subject, (start, stop) = f"{self.url}/{name}", span
        deadline = RetryDeadline(subject, "no data", try_s=_SILENT_S / 10)
        self.client(self._timeout_s(deadline))  # Raises an error if obstore is missing.
        done, total = 0, -1

        def attempt() -> ObjectVersion:
            nonlocal version, done, total
            if version is not None and done == total:  # An error followed the last byte.
                return version
            first, begun_s = start + done, time.monotonic()
            byte_range = {"offset": first} if stop is None else (first, stop)
            options: Any = {"range": byte_range} if first or stop is not None else None
            answer = self.client(self._timeout_s(deadline)).get(name, options=options)
            self._has_answered, self._slowest_s = True, max(self._slowest_s, time.monotonic() - begun_s)
            current = ObjectVersion.of(answer.meta)
            if size_bytes not in (None, current.size_bytes):
                refuse(subject, f"has {current.size_bytes:,} bytes, expected {size_bytes:,}", "restore the file")
            if version not in (None, current):
                raise self._changed(name)
            version, total = current, min(current.size_bytes, stop or current.size_bytes) - start
            for piece in answer.stream(min_chunk_size=_CHUNK_BYTES):
                sink(memoryview(piece))
                done += len(piece)
                deadline.reset()
            if done > total:
                raise StorageError(f"{subject}: {done:,} bytes were received, expected {total:,}; repair the server")
            if done < total:
                raise TransientError(f"{done:,} of {total:,} bytes were received")
            return version

        return self.repeat(deadline, attempt)

    def repeat(self, deadline: RetryDeadline, attempt: Callable[[], Result]) -> Result:
        """Return the result of an attempt, which is repeated until another try would exceed the deadline."""
        from obstore.exceptions import BaseError  # noqa: PLC0415

        while True:
            deadline.num_tries, deadline.num_silent_tries = deadline.num_tries + 1, deadline.num_silent_tries + 1
            begun_s = time.monotonic()
            try:
                result = attempt()
            except TransientError as error:
                problem = str(error)
            except OMEArrowDSError:
                raise
            except FileNotFoundError:
                self._has_answered = True
                raise MissingPathError(self._missing, path=deadline.subject) from None
            except BaseError as error:
                problem = self.refuse_final(deadline.subject, error)
            else:
                self._has_answered = True
                return result
            tried_s, silent_s = time.monotonic() - begun_s, deadline.silent_s
            pause_s = max(0.0, deadline.pause_s * random.random() - tried_s)  # noqa: S311  # Not a secret.
            if silent_s + pause_s + (deadline.try_s or tried_s) > _SILENT_S:
                problem = f"{deadline.silent} for {silent_s:.0f} s in {deadline.num_tries} tries: {problem}"
                remedy = "check the server and the network, and repeat the command to continue"
                raise StorageError(problem, path=deadline.subject, remedy=remedy)
            time.sleep(pause_s)
            deadline.pause_s = min(2 * deadline.pause_s, _LONGEST_PAUSE_S)

    def _timeout_s(self, deadline: RetryDeadline) -> int:
        index = max(0, deadline.num_silent_tries - 1)
        first_s = _SOON_S if 0 < self._slowest_s <= _QUICK_S else _SOONER_S
        is_slow = self._slowest_s > _SOONER_S[0] or index >= len(first_s)
        timeout_s = READ_S if is_slow else min(first_s[index], READ_S)
        return max(1, min(timeout_s, int(_SILENT_S - deadline.silent_s)))

    def refuse_final(self, subject: str, error: Exception) -> str:
        """Raise an error that would recur if the request was repeated; for other errors, return a short description."""
        status = _STATUS.search(str(error))
        number = int(status[1]) if status else 0
        kind, cause, answer = type(error).__name__, describe(error), str(error).lower()
        refused = number in (401, 403) or kind in ("PermissionDeniedError", "UnauthenticatedError")
        if refused or any(code in cause for code in _NO_CREDENTIALS):
            identity, remedy = self._identity()
            problem = f"the server refuses access with {identity} ({cause}); {remedy}"
        elif "redirect" in answer or 300 <= number < 400:
            problem = "the bucket is in another region; pass storage=Storage(region=)"
            if self.url.is_web:
                problem = "the server redirects in a loop; pass the final URL"
        elif number == _BEYOND:
            problem = "the requested bytes do not exist: the object is empty or incomplete"
            raise FormatError(problem, path=subject, remedy="restore it") from None
        elif "non-partial" in answer or "range request not supported" in answer:
            problem = "the server does not support byte ranges; pass part_cache=, or copy it to this machine"
        elif 400 <= number < 500 and number not in _PASSING:
            problem = f"the server refuses the request: {cause}"
        elif number == 501 or kind == "NotSupportedError":
            problem = f"the server does not support the request: {cause}"
        else:
            self._has_answered = self._has_answered or status is not None
            if not self._has_answered:
                self._refuse_unheard(subject, cause)
            return cause
        raise StorageError(problem, path=subject) from None

    def _refuse_unheard(self, subject: str, cause: str) -> None:
        """Raise `StorageError` if a server that never answered has been unknown or refused connections for a while."""
        wait_s = next((wait_s for text, wait_s in _UNHEARD_S.items() if text in cause), None)
        now_s = time.monotonic()
        if wait_s is not None:
            self._unheard_s = self._unheard_s or now_s
        if wait_s is None or now_s - self._unheard_s < min(wait_s, _SILENT_S / 2):
            return
        self._unheard_s = 0.0
        if self.url.scheme == "s3":
            server = s3_settings(self.storage)[0].get("endpoint") or "Amazon's S3 (no endpoint is set)"
            remedy = f"pass {self._option}=Storage(endpoint=), or set AWS_ENDPOINT_URL, for another server"
        else:
            server = f"{self.url.scheme}://{self.url.parts[1]}"
            remedy = "check the host name, and whether the server is running"
        raise StorageError(f"{server} cannot be reached ({cause})", path=subject, remedy=remedy) from None

    def _identity(self) -> tuple[str, str]:
        """Return the identity of requests for errors, and how to use another one."""
        scheme, profile, has_keys = self.url.scheme, self.storage.profile, "AWS_ACCESS_KEY_ID" in os.environ
        identity = "anonymous requests"
        if self.url.is_web:
            return identity, "make it public, or pass an s3://, gs:// or az:// URL, which is signed"
        public = f"{self._option}=Storage(anonymous=True) for a public bucket"
        if scheme != "s3":
            if self.storage.anonymous:
                return identity, "leave out anonymous=True"
            return "credentials of the environment or this machine's role", f"set {_KEYS[scheme]}, or pass {public}"
        remedies = [] if profile is not None or has_keys else ["set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"]
        if self.storage.anonymous:
            remedies += ["leave out anonymous=True"] * has_keys
        elif profile is not None:
            identity = f"profile {profile!r}"
        elif has_keys:
            identity = "the keys in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        elif _profile(os.environ.get("AWS_PROFILE", "default")):
            identity = "credentials of the environment, ~/.aws or this machine's role"
        else:
            identity = "this machine's role, because AWS_ACCESS_KEY_ID and ~/.aws are empty"
        remedies.append(f"pass {self._option}=Storage(profile=) with another profile")
        remedies += [public] * (not self.storage.anonymous)
        return identity, f"{', '.join(remedies[:-1])}, or {remedies[-1]}"


@dataclass
class RetryDeadline:
    """Time limit for repeating a request: 30 s since the server last made progress.

    Errors start with ``subject``, and describe a server without progress by ``silent``. A further try is expected to
    take ``try_s`` seconds, or as long as the last one.
    """

    subject: str
    silent: str
    try_s: float | None = None
    num_tries: int = 0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._progress_s, self.pause_s, self.num_silent_tries = time.monotonic(), _PAUSE_S, 0

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._progress_s


def describe(error: Exception) -> str:
    """Return a short description of an error, without the server's answer: it may contain keys and signatures."""
    text = str(error)
    status, code = _STATUS.search(text), _CODE.search(text)
    if status is not None:
        return f"HTTP status {status[1]}{f' ({code[1]})' if code else ''}"
    known = ("timed out", "refused", "reset", "dns error", "certificate", "closed", "broken pipe")
    lower = text.lower().replace("timedout", "timed out")
    return next((f"connection: {problem}" for problem in known if problem in lower), type(error).__name__)


def open_client(url: Url, storage: Storage, read_s: int, retries: bool) -> Any:
    """Return an obstore client with this read timeout, which repeats failed requests only with ``retries``."""
    if importlib.util.find_spec("obstore") is None:
        raise BackendError(f"{url}: obstore is not installed; run pip install 'omearrow-ds[remote]'")
    if _first_process() != os.getpid():
        remedy = "start workers by 'forkserver' or 'spawn', as OMEArrowDataLoader does"
        raise StorageError("the client does not work in a process forked after its use", path=url, remedy=remedy)
    from obstore.store import from_url  # noqa: PLC0415  # The import takes seconds.

    unsigned = {"skip_signature": True} if storage.anonymous else {}
    config, provider = s3_settings(storage) if url.scheme == "s3" else (unsigned, None)
    client = {
        "allow_http": "http" in [url.scheme, str(config.get("endpoint", "")).partition(":")[0]],
        "connect_timeout": f"{_CONNECT_S}s",
        "read_timeout": f"{read_s}s",
        "timeout": "1day",  # Limit of the whole request: a slow link is not an error.
    }
    options: dict[str, Any] = {"client_options": client, "retry_config": _RETRIES if retries else {"max_retries": 0}}
    if not url.is_web:
        options |= {"config": config, "credential_provider": provider}
    return from_url(as_parsed(url), **{name: value for name, value in options.items() if value})


def s3_settings(storage: Storage) -> tuple[dict[str, Any], Any]:
    """Return obstore's settings for S3, and a credential provider if a profile has the credentials, else None."""
    environ = os.environ
    name = storage.profile or environ.get("AWS_PROFILE", "default")
    ask_files = storage.profile is not None or "AWS_ACCESS_KEY_ID" not in environ
    profile = _profile(name) if ask_files and not storage.anonymous else {}
    if storage.profile is not None and not profile:
        refuse_value("profile", storage.profile, "no such profile in ~/.aws/config or ~/.aws/credentials", "correct it")
    values = {
        "endpoint": (storage.endpoint, *map(environ.get, _ENDPOINTS), profile.get("endpoint_url")),
        "region": (storage.region, *map(environ.get, _REGIONS), profile.get("region")),
        "skip_signature": (storage.anonymous,),
    }
    config = {key: value for key, choices in values.items() if (value := next(filter(None, choices), None))}
    return config, _provider(name, profile) if profile else None


def _profile(name: str) -> Mapping[str, str]:
    """Return the settings of a profile in the AWS configuration files; empty if it does not exist."""
    values: dict[str, str] = {}
    for variable, file, section in (
        ("AWS_CONFIG_FILE", "~/.aws/config", name if name == "default" else f"profile {name}"),
        ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials", name),
    ):
        parser = configparser.ConfigParser(interpolation=None)
        path = Path(os.environ.get(variable, file)).expanduser()
        try:
            parser.read(path)
        except configparser.Error as error:
            problem = f"profiles cannot be read: {type(error).__name__}"
            raise ArgumentError(problem, path=path, remedy="correct the file") from None
        if parser.has_section(section):
            values |= dict(parser[section])
    return values


def _provider(name: str, profile: Mapping[str, str]) -> Any:
    """Return a credential provider of a profile: boto3 if installed, otherwise only static keys."""
    if importlib.util.find_spec("boto3") is not None:
        from boto3.session import Session  # noqa: PLC0415  # boto3 is optional.
        from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415

        return Boto3CredentialProvider(Session(profile_name=name))
    if not {"aws_access_key_id", "aws_secret_access_key"} <= profile.keys():
        if not {"role_arn", "sso_session", "sso_start_url", "credential_process"} & profile.keys():
            return None
        raise BackendError(f"profile {name!r} of ~/.aws uses a role or login, which needs boto3; run pip install boto3")
    keys = {"access_key_id": profile["aws_access_key_id"], "secret_access_key": profile["aws_secret_access_key"]}
    return lambda: {**keys, "token": profile.get("aws_session_token"), "expires_at": None}
