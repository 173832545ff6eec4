"""What the doctor is asked, what it answers, and the two forms of the answer."""

from __future__ import annotations

import enum

import msgspec

Figure = float | int | str | bool | None | list[str]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a report is about."""

    folder: str
    """Where a disk tier would lie; files are made in it and removed."""
    s3_url: str = ""
    """``s3://bucket/prefix`` to try; one object is written below it and removed."""
    endpoint: str = ""
    """The object store's address, if it is not Amazon's."""
    quick: bool = False
    """Smaller samples: rougher figures in a few seconds."""

    def sample_bytes(self, nbytes: int) -> int:
        """How much to move where `nbytes` make a good figure."""
        return nbytes // 8 if self.quick else nbytes


class Verdict(enum.Enum):
    """What a check came to."""

    OK = "ok"
    ABSENT = "absent"
    """Not here, or not set up: whatever needs it is not to be had, and nothing is broken."""
    FAILED = "failed"
    """It is here and does not work; `Finding.says` is the reason."""
    SILENT = "silent"
    """No answer within the time limit."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the report."""

    verdict: Verdict
    says: str
    """For a reader: the result, or why there is none."""
    figures: dict[str, Figure] = {}
    """For a program: units last in the name."""
    name: str = ""
    """Of the check; whoever runs it fills this in."""
    seconds: float = 0.0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found; as JSON it is one object with these fields."""

    kvtier: str
    """Version of this library."""
    quick: bool
    seconds: float
    checks: list[Finding]

    def as_json(self) -> str:
        """One object, on one line."""
        return msgspec.json.encode(self).decode()


def as_text(report: Report) -> str:
    """One line for each finding, for a terminal."""
    width = max((len(finding.name) for finding in report.checks), default=0)
    lines = [
        f"{finding.verdict.value:>6}  {finding.name:<{width}}  {finding.says}"
        for finding in report.checks
    ]
    return "\n".join([f"kvtier {report.kvtier}, {report.seconds:.1f} s", *lines])


def in_gb_s(nbytes: int, seconds: float) -> float:
    """Speed in units of 10^9 bytes per second, three digits."""
    return float(f"{nbytes / max(seconds, 1e-9) / 1e9:.3g}")
