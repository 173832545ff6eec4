"""Plants faults into the native code that drives a GPU, one at a time, and runs the tests of it.

    python tests/sim/core_mutations.py [WORDS]

Each fault is a wait, a record, an order, an address or a bound that is taken away; the tests on the
stand-in for the driver must fail with it. Builds the core for each, half a minute of two cores, so
it is run by hand when that code or its tests change; the faults of the kernels themselves are
`test_mutations.py`, which always runs. Ends with 1 if a fault survives.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/sim/test_device_paths.py", "tests/sim/test_cuda_pages.py")
TIMEOUT_S = 600


@dataclass(frozen=True)
class Fault:
    """Words that stand once in a file of `csrc/src`, and what stands there in their place."""

    name: str
    file: str
    before: str
    after: str


FAULTS = [
    Fault(
        "copies do not wait for the engine",
        "device_state.cpp",
        "      if (after != nullptr) {\n        Event engine(shared_from_this());\n"
        "        engine.record(*after);\n        engine.wait_on(stream);  //",
        "      if (after != nullptr) {\n        Event engine(shared_from_this());\n"
        "        engine.record(*after);  //",
    ),
    Fault(
        "kernels do not wait for the engine",
        "device_copy.cpp",
        "engine.wait_on(kernel_stream_);",
        "",
    ),
    Fault(
        "a slot is filled while it is emptied",
        "device_staging.cpp",
        "ended_[slot]->wait_on(stream);",
        "(void)stream;",
    ),
    Fault(
        "a slot is emptied while it is filled",
        "device_staging.cpp",
        "filled_[slot]->wait_on(second);",
        "(void)second;",
    ),
    Fault(
        "a table is written while it is read",
        "device_staging.cpp",
        "&& buffer->last_use.is_over()",
        "",
    ),
    Fault(
        "a table comes by another stream",
        "device_copy.cpp",
        "state_.tables->upload(table, table_bytes_, kernel_stream_);",
        "state_.tables->upload(table, table_bytes_, state_.within);",
    ),
    Fault(
        "a wave is said to be over before its bytes are in place",
        "device_copy.cpp",
        "? engine_stream_\n",
        "? kernel_stream_\n",
    ),
    Fault(
        "pages are said to be free before they were read",
        "device_copy.cpp",
        "work.pages.back()->record(kernel_stream_);",
        "work.pages.back()->record(state_.within);",
    ),
    Fault(
        "a staged slot is read in any order",
        "device_copy.cpp",
        "copy_.is_gather ? cuda::SourceOrder::kStream : cuda::SourceOrder::kAny",
        "cuda::SourceOrder::kAny",
    ),
    Fault(
        "pages are read in any order",
        "device_plan.cpp",
        "is_gather || on_device ? cuda::SourceOrder::kStream : cuda::SourceOrder::kAny",
        "cuda::SourceOrder::kAny",
    ),
    Fault(
        "kernels take the host's address",
        "device_plan.cpp",
        "wave.device_addresses[c] != 0 ? wave.device_addresses[c]",
        "wave.device_addresses[c] != 0 ? wave.request.segments[c]",
    ),
    Fault("vectors are as wide as the pages allow", "device_plan.cpp", "joined |= stored;", ""),
    Fault(
        "a later part of a block goes to its begin",
        "device_copy.cpp",
        "slots_ != nullptr ? slot : page.stored_address + skipped",
        "slots_ != nullptr ? slot : page.stored_address + 0 * skipped",
    ),
    Fault(
        "a later part of a staged block goes to its begin",
        "device_copy.cpp",
        "wave.pages[part.first_page + i].stored_address + skipped;",
        "wave.pages[part.first_page + i].stored_address + 0 * skipped;",
    ),
    Fault(
        "a segment may overlap the pages",
        "device_plan.cpp",
        "if (nbytes != 0 && extents.overlaps",
        "if (nbytes == 1 && extents.overlaps",
    ),
    Fault(
        "memory that is neither pinned nor the device's is taken",
        "device_plan.cpp",
        "if (wave.kinds[c] == MemoryKind::kUnpinned) {",
        "if (false) {",
    ),
    Fault(
        "a failed device goes on",
        "device_state.cpp",
        "if (const std::string words = failure(); !words.empty()) {",
        'if (const std::string words = failure(); words == "never") {',
    ),
]


def main() -> int:
    """Try the faults whose names have the words of the command line."""
    words = " ".join(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        bench = _Bench(Path(folder))
        assert bench.passes(), "the tests fail without a fault"
        survivors = []
        for fault in FAULTS:
            if words not in fault.name:
                continue
            is_caught = not bench.passes_with(fault)
            print(f"{'caught  ' if is_caught else 'SURVIVED'}  {fault.name}", flush=True)
            if not is_caught:
                survivors.append(fault)
    return 1 if survivors else 0


class _Bench:
    """A copy of the tree that is built in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._tree = folder / "tree"
        self._site = folder / "site"
        # What is installed here, but not its kvtier: hooks of editable installs stay behind.
        venv.create(folder / "venv", with_pip=False)
        self._python = folder / "venv" / "bin" / "python"
        (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        paths = [path for path in sys.path if path.endswith("-packages")]
        (site / "installed.pth").write_text("\n".join(paths))
        names = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.split()
        for name in names:
            target = self._tree / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target, follow_symlinks=False)
        self._build()

    def passes_with(self, fault: Fault) -> bool:
        path = self._tree / "csrc" / "src" / fault.file
        original = path.read_text()
        assert original.count(fault.before) == 1, f"{fault.name}: not once in {fault.file}"
        path.write_text(original.replace(fault.before, fault.after))
        try:
            self._build()
            return self.passes()
        finally:
            path.write_text(original)

    def passes(self) -> bool:
        command: list[str | Path] = [self._python, "-P", "-m", "pytest", "-q", "-x", *TESTS]
        environment = {**os.environ, "PYTHONPATH": str(self._site)}
        run = subprocess.run(
            command,
            cwd=self._tree,
            env=environment,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        return run.returncode == 0

    def _build(self) -> None:
        """Cubins for one architecture only: the stand-in plays that."""
        shutil.rmtree(self._site, ignore_errors=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-build-isolation",
            "--no-deps",
        ]
        subprocess.run(
            [*command, "--target", str(self._site), "."],
            cwd=self._tree,
            check=True,
            env={**os.environ, "KVTIER_CUBINS": "90"},
        )


if __name__ == "__main__":
    sys.exit(main())
