"""The doctor as a command: its report, and what hangs, crashes or is missing as lines of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kvtier.doctor import Asked, Finding, Report, Verdict, as_text
from kvtier.doctor.runner import TOTAL_S, run_check
from kvtier.registry import transfer_backends

SLACK_S = 20.0  # for interpreters to start on a busy machine
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "eu-west-1"}


def doctor(
    folder: Path, *options: str, environment: Mapping[str, str] | None = None
) -> tuple[str, float]:
    """What ``kvtier doctor`` says, and how long it takes."""
    begin_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kvtier", "doctor", "--folder", str(folder), *options],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout, time.monotonic() - begin_s


def found(said: str) -> dict[str, Any]:
    """The checks of a JSON report by name."""
    return {check["name"]: check for check in json.loads(said)["checks"]}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("doctor")
    said, seconds = doctor(folder, "--json")
    assert seconds < TOTAL_S[False] + SLACK_S
    assert list(folder.iterdir()) == []  # it leaves nothing behind
    return said


def test_the_json_report_keeps_its_form(report: str) -> None:
    whole = json.loads(report)
    assert list(whole) == ["kvtier", "quick", "seconds", "checks"]
    assert whole["quick"] is False
    for check in whole["checks"]:
        assert list(check) == ["verdict", "says", "figures", "name", "seconds"]
        assert check["verdict"] in [verdict.value for verdict in Verdict]
        assert check["says"]
        for name, value in check["figures"].items():
            assert name == name.lower().replace("-", "_") or check["name"] == "packages"
            assert value is None or isinstance(value, (str, int, float, bool, list))


def test_every_part_and_every_transfer_backend_is_looked_at(report: str) -> None:
    names = list(found(report))
    assert names[:12] == [
        "processor",
        "memory",
        "limits",
        "packages",
        "huge pages",
        "shared memory",
        "io_uring",
        "disk",
        "rdma",
        "cuda",
        "cufile",
        "object store",
    ]
    installed = sorted(transfer_backends())
    more = ["ucx by tcp"] if "ucx" in installed else []
    assert names[12:] == [f"transfer {name}" for name in [*installed, *more]]


def test_what_works_is_measured(report: str) -> None:
    checks = found(report)
    figures = {
        "memory": "auto_1_threads_gb_s",
        "disk": "write_gb_s",
        "transfer host": "read_dram_dram_gb_s",
        "transfer shm": "read_dram_peer_dram_gb_s",
        "transfer posix": "write_dram_file_gb_s",
    }
    for name, figure in figures.items():
        assert checks[name]["verdict"] == "ok", checks[name]["says"]
        assert checks[name]["figures"][figure] > 0


def test_what_is_not_there_is_absent_with_its_reason(report: str) -> None:
    checks = found(report)
    assert checks["object store"]["verdict"] == "absent"
    assert "--s3-url" in checks["object store"]["says"]
    if not Path("/dev/nvidiactl").exists():
        assert checks["cuda"]["verdict"] in ("absent", "failed")
        assert "libcuda" in checks["cuda"]["says"] or "cuInit" in checks["cuda"]["says"]


def test_the_text_has_a_line_for_each(report: str) -> None:
    findings = [
        Finding(name="disk", verdict=Verdict.OK, says="fine"),
        Finding(name="object store", verdict=Verdict.SILENT, says="no answer in 2 s"),
    ]
    text = as_text(Report(kvtier="1", quick=False, seconds=1.0, checks=findings))
    assert text.splitlines() == [
        "kvtier 1, 1.0 s",
        "    ok  disk          fine",
        "silent  object store  no answer in 2 s",
    ]


def test_a_folder_that_cannot_be_written_is_a_finding() -> None:
    said, _ = doctor(Path("/proc"), "--json")
    checks = found(said)
    assert checks["disk"]["verdict"] == "failed"
    assert "/proc (proc" in checks["disk"]["says"]
    assert checks["transfer posix"]["verdict"] == "failed"
    assert checks["transfer host"]["verdict"] == "ok"


def test_a_folder_that_is_not_there_is_a_finding(tmp_path: Path) -> None:
    finding = run_check("disk", Asked(folder=str(tmp_path / "nowhere")))
    assert (finding.name, finding.verdict) == ("disk", Verdict.FAILED)
    assert "No such file" in finding.says


@pytest.mark.parametrize(
    ("url", "home", "reason"),
    [
        ("bucket/kv", "/root", "is not s3://"),
        ("s3:///kv", "/root", "is not s3://"),
        ("s3://bucket/kv", "/nowhere", "credentials"),
    ],
)
def test_wrong_urls_and_missing_credentials_are_findings(
    monkeypatch: pytest.MonkeyPatch, url: str, home: str, reason: str
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, home)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    asked = Asked(folder=".", s3_url=url, endpoint="http://127.0.0.1:9")
    finding = run_check("object store", asked)
    assert finding.verdict is Verdict.FAILED
    assert reason in finding.says


def test_an_endpoint_that_nobody_listens_on_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    asked = Asked(folder=".", s3_url="s3://bucket/kv", endpoint=f"http://127.0.0.1:{port}")
    finding = run_check("object store", asked)
    assert finding.verdict is Verdict.FAILED
    assert f"127.0.0.1:{port}" in finding.says


class Store(BaseHTTPRequestHandler):
    """As much of an object store as the doctor asks for; keeps what it was asked."""

    objects: ClassVar[dict[str, bytes]] = {}
    asked: ClassVar[list[str]] = []
    spoils: ClassVar[bool] = False

    def do_HEAD(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self.objects[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer()

    def do_GET(self) -> None:
        body = self.objects[self.path]
        self._answer(b"x" + body[1:] if self.spoils else body)

    def do_DELETE(self) -> None:
        del self.objects[self.path]
        self._answer()

    def _answer(self, body: bytes = b"") -> None:
        self.asked.append(self.command)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *said: object) -> None:
        pass


@pytest.mark.parametrize("spoils", [False, True])
def test_an_object_goes_there_and_back_and_is_removed(
    monkeypatch: pytest.MonkeyPatch, spoils: bool
) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(Store, "spoils", spoils)
    monkeypatch.setattr(Store, "asked", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Store) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        asked = Asked(folder=".", s3_url="s3://bucket/kv", endpoint=endpoint, quick=True)
        finding = run_check("object store", asked)
        server.shutdown()
        thread.join()
    assert (Store.asked, Store.objects) == (["HEAD", "PUT", "GET", "DELETE"], {})
    if spoils:
        assert (finding.verdict, "not the bytes" in finding.says) == (Verdict.FAILED, True)
    else:
        assert finding.verdict is Verdict.OK, finding.says
        assert min(finding.figures[name] for name in ("put_gb_s", "get_gb_s")) > 0  # type: ignore[type-var, operator]


def test_without_boto3_the_object_store_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    finding = run_check("object store", Asked(folder=".", s3_url="s3://bucket/kv"))
    assert finding.verdict is Verdict.ABSENT
    assert "pip install 'kvtier[s3]'" in finding.says


def test_an_endpoint_that_never_answers_costs_its_time_and_nothing_else(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        options = ("--s3-url", "s3://bucket", "--endpoint", f"http://127.0.0.1:{port}")
        said, seconds = doctor(tmp_path, "--json", "--quick", *options, environment=CREDENTIALS)
    checks = found(said)
    assert checks["object store"]["verdict"] == "silent"
    assert checks["object store"]["says"].startswith("no answer in ")
    assert checks["disk"]["verdict"] == "ok"
    assert seconds < TOTAL_S[True] + SLACK_S


def test_a_backend_that_hangs_crashes_or_refuses_is_a_line_of_its_own(tmp_path: Path) -> None:
    """One package's fault costs that package's line only."""
    package = tmp_path / "package"
    (package / "faulty-1.dist-info").mkdir(parents=True)
    (package / "faulty-1.dist-info" / "METADATA").write_text("Name: faulty\nVersion: 1\n")
    names = ("abort", "hang", "raises", "refuses")
    lines = "\n".join(f"a-{name} = faulty:{name}" for name in names)
    (package / "faulty-1.dist-info" / "entry_points.txt").write_text(
        f"[kvtier.transfers]\n{lines}\n"
    )
    (package / "faulty.py").write_text("""
import os, sys, time
from kvtier.transfer import Unsuitable
def abort(completions):
    print("a last word", file=sys.stderr, flush=True)
    os.abort()
def hang(completions):
    time.sleep(600)
def raises(completions):
    raise RuntimeError("a fault of its own")
def refuses(completions):
    raise Unsuitable("no such device")
""")
    folder = tmp_path / "disk"
    folder.mkdir()
    environment = {"PYTHONPATH": str(package)}
    said, seconds = doctor(folder, "--json", environment=environment)
    checks = found(said)
    told = {name: checks[f"transfer a-{name}"] for name in names}
    assert told["abort"]["verdict"] == "failed"
    assert "status -6" in told["abort"]["says"]
    assert "a last word" in told["abort"]["says"]
    assert told["hang"]["verdict"] == "silent"
    assert told["raises"]["says"] == "RuntimeError: a fault of its own"
    assert (told["refuses"]["verdict"], told["refuses"]["says"]) == ("absent", "no such device")
    assert checks["transfer host"]["verdict"] == "ok"
    assert seconds < TOTAL_S[False] + SLACK_S
    assert list(folder.iterdir()) == []


def test_a_wrong_command_line_is_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kvtier", "doctor", "--sideways"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "--sideways" in done.stderr


def test_a_quick_sample_is_smaller() -> None:
    assert Asked(folder=".", quick=True).sample_bytes(800) == 100
    assert Asked(folder=".").sample_bytes(800) == 800
