"""Which bucket is meant, where its server is, and what proves to it who asks: by boto3's own rules.

boto3 reads profiles, environment, instance roles and endpoint settings as every AWS tool does, and
its signer signs; the bytes themselves go over `s3_client`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import parse_qs, quote, urlsplit

from kvtier.errors import BackendUnavailable, ConfigError

Addressing = Literal["auto", "path", "virtual"]

_URL = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/(.*))?")
_PROBE = "k"  # an object's name, to see what URL boto3 makes of it


@dataclass(frozen=True, slots=True)
class Place:
    """One bucket on one server. Signs from any thread."""

    bucket: str
    host: str
    """As the ``Host`` header has it."""
    address: tuple[str, int]
    base: str
    """What stands before an object's name in the path of its URL."""
    ca_file: str | None
    """Certificates that a TLS server is checked against; None: those of the system."""
    is_tls: bool
    sign: Callable[[str, str, Mapping[str, str]], dict[str, str]]
    """(method, path with query, headers) -> the headers to send, the signature among them."""

    def path(self, name: str, query: Mapping[str, str] | None = None) -> str:
        """What a request for an object asks for; the bucket itself if `name` is empty."""
        path = self.base + quote(name, safe="/-_.~") if name else self.base.rstrip("/") or "/"
        if query:
            path += "?" + "&".join(
                f"{quote(key, safe='-_.~')}={quote(value, safe='-_.~')}"
                for key, value in sorted(query.items())
            )
        return path


def split_url(url: str) -> tuple[str, str]:
    """Bucket and the rest of ``s3://bucket/rest``.

    Raises:
        ConfigError: it is no such URL.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise ConfigError(f"url: {url!r}, expected s3://bucket/prefix")
    return match[1], match[2] or ""


def open_place(
    bucket: str,
    *,
    endpoint: str = "",
    region: str = "",
    profile: str = "",
    addressing: Addressing = "auto",
) -> Place:
    """Find the bucket's server and credentials; asks nothing of the server itself.

    Raises:
        BackendUnavailable: boto3 is not installed, or finds no credentials, profile or server.
    """
    try:
        import boto3
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise BackendUnavailable(
            "object storage needs boto3, which is not installed: pip install 'kvtier[s3]'"
        ) from error

    try:
        session = boto3.Session(profile_name=profile or None, region_name=region or None)
        credentials = session.get_credentials()
        if credentials is None:
            raise BackendUnavailable(
                f"s3://{bucket}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
                "or whatever else boto3 reads"
            )
        # Of a server that is not Amazon's nobody knows whether it answers to bucket.host.
        style = "path" if addressing == "auto" and endpoint else addressing
        client = session.client(
            "s3",
            endpoint_url=endpoint or None,
            config=Config(
                signature_version="s3v4",
                s3={"addressing_style": style},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )
        example = client.generate_presigned_url(
            "get_object", Params={"Bucket": bucket, "Key": _PROBE}
        )
        client.close()
        ca_file = session._session.get_config_variable("ca_bundle")
    except (BotoCoreError, ValueError) as error:
        raise BackendUnavailable(f"s3://{bucket}: {error}") from error
    url = urlsplit(example)
    scope = parse_qs(url.query)["X-Amz-Credential"][0].split("/")
    origin, signing_region = f"{url.scheme}://{url.netloc}", scope[-3]

    class Unsigned(S3SigV4Auth):  # type: ignore[misc]
        """Signs the request and not its body: records carry checksums of their own."""

        def payload(self, request: Any) -> str:
            return "UNSIGNED-PAYLOAD"

    def sign(method: str, path: str, headers: Mapping[str, str]) -> dict[str, str]:
        request = AWSRequest(method, origin + path, headers=dict(headers))
        # Frozen anew each time, since credentials of a role are renewed while they are in use.
        frozen = credentials.get_frozen_credentials()
        Unsigned(frozen, "s3", signing_region).add_auth(request)
        return dict(request.headers.items())

    is_tls = url.scheme == "https"
    return Place(
        bucket=bucket,
        host=url.netloc,
        address=(url.hostname or "", url.port or (443 if is_tls else 80)),
        base=url.path.removesuffix(_PROBE),
        ca_file=ca_file,
        is_tls=is_tls,
        sign=sign,
    )
