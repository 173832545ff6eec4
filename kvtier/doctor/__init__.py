"""``kvtier doctor``: what works on this machine, how fast, and why the rest does not.

`examine` makes the report. Every check runs in a process of its own making, under a time limit, so
that a disk that hangs, a server that is silent or a library that crashes is a line of the report
and not its end.
"""

from kvtier.doctor.report import Asked, Finding, Report, Verdict, as_text
from kvtier.doctor.runner import examine

__all__ = ["Asked", "Finding", "Report", "Verdict", "as_text", "examine"]
