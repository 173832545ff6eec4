"""Every Python block of README and docs runs, and the config reference is what the code says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from config_reference import reference

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


def test_the_documented_backend_passes_the_whole_suite(tmp_path: Path) -> None:
    code = "\n".join(blocks(ROOT / "docs" / "write-a-backend.md"))
    (tmp_path / "test_documented.py").write_text(code)
    run = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert " passed" in run.stdout


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_config_reference_is_up_to_date() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == reference()


def test_the_hand_over_example_generates_the_same_tokens(tmp_path: Path) -> None:
    measured = tmp_path / "measured.json"
    run = subprocess.run(
        [sys.executable, "-P", str(ROOT / "examples" / "pd_handover.py"), "--json", str(measured)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    seen = json.loads(measured.read_text())
    assert seen["tokens"] == seen["without"]
    assert len(set(seen["tokens"])) > 2, "a model that says one thing shows nothing"
    assert seen["ready_s"][0] < seen["computed_s"][-1], "decode began before prefill ended"
