"""Every fault that is planted into a kernel's source is seen: the checks can fail.

By default a third of the faults; all with KVTIER_ALL_MUTATIONS=1 in the environment.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path

import machine
import mutant
import mutations
import pytest
from mutations import End, Fault
from mutations_computing import FAULTS as COMPUTING
from mutations_copying import FAULTS as COPYING

FAULTS = [*COPYING, *COMPUTING]


def chosen() -> list[Fault]:
    """Some of each file, always the same."""
    if os.environ.get("KVTIER_ALL_MUTATIONS") == "1":
        return FAULTS
    by_file = itertools.groupby(sorted(FAULTS, key=attrgetter("file")), attrgetter("file"))
    return [fault for _, faults in by_file for fault in list(faults)[::3]]


class Mutants:
    """The faults of this run, planted and looked for ahead of their tests, on all cores."""

    def __init__(self, folder: Path, faults: list[Fault]) -> None:
        self._folder = folder
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._ends: dict[Fault, Future[tuple[End, str]]] = {
            fault: self._pool.submit(self._end_of, number, fault)
            for number, fault in enumerate(faults)
        }

    def end(self, fault: Fault) -> tuple[End, str]:
        return self._ends[fault].result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _end_of(self, number: int, fault: Fault) -> tuple[End, str]:
        library = mutations.planted(fault, self._folder / str(number))
        end = mutations.check(library, fault.check, is_sanitized=fault.is_sanitized)
        library.unlink()
        return end


@pytest.fixture(scope="module")
def mutants(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mutants]:
    asked = {
        item.callspec.params["fault"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and "fault" in getattr(item, "fixturenames", ())
    }
    found = Mutants(tmp_path_factory.mktemp("mutants"), [each for each in FAULTS if each in asked])
    yield found
    found.close()


@pytest.mark.parametrize("fault", chosen(), ids=lambda fault: str(fault)[:100])
def test_no_fault_survives(mutants: Mutants, fault: Fault) -> None:
    end, words = mutants.end(fault)
    assert end is not End.SURVIVED, words


def test_every_fault_can_be_planted() -> None:
    """Also those that this run does not plant."""
    for fault in FAULTS:
        text = (mutations.CUDA / fault.file).read_text()
        assert text.count(fault.before) == 1, f"{text.count(fault.before)} times: {fault}"
        assert fault.after not in (fault.before, None)
    assert len(set(FAULTS)) == len(FAULTS)


def test_every_check_has_a_fault() -> None:
    assert {fault.check for fault in FAULTS} == set(mutant.CHECKS)


@pytest.mark.parametrize("name", mutant.CHECKS)
def test_checks_pass_where_there_is_no_fault(name: str) -> None:
    end, words = mutations.check(machine.default_library(), name)
    assert end is End.SURVIVED, words


@pytest.mark.parametrize("name", sorted({each.check for each in FAULTS if each.is_sanitized}))
def test_checks_pass_under_sanitizers_where_there_is_no_fault(name: str) -> None:
    end, words = mutations.check(machine.build(machine.SANITIZE), name, is_sanitized=True)
    assert end is End.SURVIVED, words
