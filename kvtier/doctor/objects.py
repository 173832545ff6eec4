"""The object store: is the server there, are we let in, and how fast do objects come and go."""

from __future__ import annotations

import importlib
import os
import secrets
import time
from typing import Any

from kvtier.doctor.report import Asked, Figure, Finding, Verdict, in_gb_s

_OBJECT_BYTES = 32 << 20
_CONNECT_S = 1.5
_READ_S = 3.0


def object_store(asked: Asked) -> Finding:
    """Put an object, get it, compare, delete it."""
    if not asked.s3_url:
        says = "not asked for: give --s3-url s3://bucket/prefix"
        return Finding(verdict=Verdict.ABSENT, says=says)
    if not asked.s3_url.startswith("s3://") or not asked.s3_url[5:].split("/")[0]:
        says = f"{asked.s3_url!r} is not s3://bucket/prefix"
        return Finding(verdict=Verdict.FAILED, says=says)
    try:
        boto3, config = (importlib.import_module(name) for name in ("boto3", "botocore.config"))
    except ImportError:
        says = "boto3 is not installed: pip install 'kvtier[s3]'"
        return Finding(verdict=Verdict.ABSENT, says=says)
    bucket, _, prefix = asked.s3_url[5:].partition("/")
    prefix = prefix.rstrip("/") + "/" if prefix else ""
    key = f"{prefix}kvtier-doctor-{secrets.token_hex(8)}"
    where = asked.endpoint or "Amazon's S3"
    try:
        client = boto3.Session().client(
            "s3",
            endpoint_url=asked.endpoint or None,
            config=config.Config(
                connect_timeout=_CONNECT_S,
                read_timeout=_READ_S,
                retries={"total_max_attempts": 1},
                request_checksum_calculation="when_required",  # others than Amazon refuse more
                response_checksum_validation="when_required",
                s3={"addressing_style": "path" if asked.endpoint else "auto"},
            ),
        )
        return _try(client, bucket, key, where, asked)
    except Exception as error:  # noqa: BLE001 - boto3's errors have no common root
        says = f"{where}, bucket {bucket}: {type(error).__name__}: {error}"
        return Finding(verdict=Verdict.FAILED, says=says, figures={"endpoint": where})


def _try(client: Any, bucket: str, key: str, where: str, asked: Asked) -> Finding:
    nbytes = asked.sample_bytes(_OBJECT_BYTES)
    body = os.urandom(1 << 20) * (nbytes >> 20)
    begin_s = time.perf_counter()
    client.head_bucket(Bucket=bucket)
    answer_s = time.perf_counter() - begin_s
    begin_s = time.perf_counter()
    client.put_object(Bucket=bucket, Key=key, Body=body)
    put_s = time.perf_counter() - begin_s
    try:
        begin_s = time.perf_counter()
        found = client.get_object(Bucket=bucket, Key=key)["Body"].read()
        get_s = time.perf_counter() - begin_s
    finally:
        client.delete_object(Bucket=bucket, Key=key)
    if found != body:
        says = f"{where}, bucket {bucket}: not the bytes that were put"
        return Finding(verdict=Verdict.FAILED, says=says)
    figures: dict[str, Figure] = {
        "endpoint": where,
        "answer_ms": round(answer_s * 1e3, 1),
        "put_gb_s": in_gb_s(nbytes, put_s),
        "get_gb_s": in_gb_s(nbytes, get_s),
    }
    says = (
        f"{where}, bucket {bucket}: puts {figures['put_gb_s']}, gets {figures['get_gb_s']} GB/s "
        f"by one request, answers in {figures['answer_ms']} ms"
    )
    return Finding(verdict=Verdict.OK, says=says, figures=figures)
