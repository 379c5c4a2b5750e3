"""Settings and errors of libraries with their own clients for object stores, such as Lance."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from omearrow_ds.errors import FormatError, OMEArrowDSError, StorageError
from omearrow_ds.storage.remote import Patience, Remote, Storage, keys_of, settings_of_s3

Found = TypeVar("Found")
_KINDS = {"s3": "aws", "gs": "google", "az": "azure"}
_LIMITS = {  # Without a byte for 28 s, in four tries, a request fails.
    "connect_timeout": "5s",
    "read_timeout": "7s",
    "timeout": "1day",  # Limit of the whole request: a slow link is not an error.
    "client_max_retries": "3",
    "client_retry_timeout": "28",
    "download_retry_count": "0",  # Retries of all tries above.
}
_OF_SERVER = re.compile(r"status code|Generic (S3|GCS|MicrosoftAzure) error|HTTP error|error sending request")


def settings(url: str, storage: Storage) -> dict[str, str]:
    """Return Lance's ``storage_options``; they may contain the secret keys of a profile and must not be stored.

    Raises
    ------
    FormatError
        If Lance does not support the URL scheme.
    """
    kind = _KINDS.get(url.partition(":")[0])
    if kind is None:
        raise FormatError(
            f"{url}: Lance reads only {', '.join(f'{scheme}://' for scheme in _KINDS)}; pass such a URL, "
            f"or copy it to this machine"
        )
    options = dict(_LIMITS)
    if storage.anonymous:
        options[f"{kind}_skip_signature"] = "true"
    if kind == "aws":
        config, provider = settings_of_s3(storage)
        options |= {f"aws_{name}": str(config[name]) for name in ("endpoint", "region") if name in config}
        options["allow_http"] = str(options.get("aws_endpoint", "").startswith("http:")).lower()
        options |= {} if provider is None else {f"aws_{name}": value for name, value in keys_of(provider).items()}
    return options


class PassingError(StorageError):
    """Error for a request to a server that failed, but may succeed if repeated."""


def failed(remote: Remote, where: str, error: BaseException) -> OMEArrowDSError | None:
    """Return the server error that caused ``error``, without text that may contain secrets; None for other errors."""
    if not isinstance(error, Exception) or _OF_SERVER.search(str(error)) is None:
        return None
    try:
        return PassingError(remote.refuse_final(where, error))
    except OMEArrowDSError as final:
        return final


def again(subject: str, read: Callable[[], Found]) -> Found:
    """Return the result of ``read``, which is called again for up to half a minute while the server does not answer."""
    patience = Patience(subject)
    while True:
        patience.begin()
        try:
            return read()
        except PassingError as error:
            problem = str(error)
        patience.wait(problem, "no response")
