"""Every Python block of README and docs runs, and the config reference is what the code says."""

import re
from pathlib import Path

import pytest
from config_reference import reference
from kvtier.testing.backend_suite import BackendSuite

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text())


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p)], ids=lambda p: p.name)
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "docs"}
    for i, block in enumerate(blocks(page)):
        exec(compile(block, f"{page.name} block {i}", "exec"), names)


def test_the_documented_backend_passes_the_suite(tmp_path: Path) -> None:
    names: dict[str, object] = {"__name__": "docs"}
    for block in blocks(ROOT / "docs" / "write-a-backend.md"):
        exec(block, names)
    kind = names["TestDictBackend"]
    assert isinstance(kind, type)
    assert issubclass(kind, BackendSuite)
    suite = kind()
    with suite.make(tmp_path) as backend:
        suite.test_get_returns_what_put_stored(backend)
        suite.test_one_missing_key_spoils_no_other(backend)


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_config_reference_is_up_to_date() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == reference()
