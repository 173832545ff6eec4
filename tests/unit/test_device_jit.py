"""Kernels compiled when the program runs, and what is kept of that on disk."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cubins
import fake_nvrtc
import pytest
from fake_nvrtc import FakeNvrtc

from kvtier import _core

IMAGES_MAX = 32  # kCachedImagesMax


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where images are kept; not made yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvtier"


@pytest.fixture
def nvrtc(cache: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvrtc:
    FakeNvrtc.install(monkeypatch)
    return FakeNvrtc()


def kept(cache: Path) -> Path:
    (image,) = cache.iterdir()
    return image


# ------------------------------------------------------------------------------ compiling


def test_nvrtc_here_makes_what_the_build_made(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = cubins.compiler()
    path = module.library_path()
    monkeypatch.setenv("KVTIER_NVRTC_LIBRARY", str(path))
    result = _core.compile_kernels(9, 0)
    assert (result.failure, result.no_cache, result.target) == ("", "", "sm_90")
    assert "kvtier_gather_v16" in cubins.Cubin(result.image).threads
    if 90 in _core.cubin_architectures() and module.Nvrtc(path).version == module.VERSION:
        assert result.image == _core.find_cubin(9, 0)


def test_all_sources_are_given_and_a_cubin_comes_back(nvrtc: FakeNvrtc) -> None:
    result = _core.compile_kernels(9, 0)
    assert (result.target, result.compiler, result.failure) == ("sm_90", "NVRTC 12.9", "")
    text = result.image.rstrip(b"\0")
    assert text.startswith(b"--gpu-architecture=sm_90\n--std=c++20\nkernels.cu\n")
    for name, source in cubins.sources().items():
        assert name.encode() + b"\n" + source in text


@pytest.mark.parametrize(
    ("device", "target"),
    [((13, 0), "compute_121"), ((11, 0), "compute_90"), ((8, 7), "compute_80")],
)
def test_a_device_that_nvrtc_does_not_know_gets_ptx(
    nvrtc: FakeNvrtc, device: tuple[int, int], target: str
) -> None:
    result = _core.compile_kernels(*device)
    assert result.target == target
    assert result.image.startswith(f"PTX\n--gpu-architecture={target}\n".encode())
    assert result.image.endswith(b"\0")


def test_a_device_older_than_all_that_nvrtc_knows_is_refused_in_words(nvrtc: FakeNvrtc) -> None:
    result = _core.compile_kernels(7, 5)
    assert result.image == b""
    assert result.failure == "NVRTC 12.9 compiles for no sm_75 nor any before it"


def test_an_error_comes_with_the_compiler_s_words_and_is_not_kept(
    nvrtc: FakeNvrtc, cache: Path
) -> None:
    nvrtc.fail()
    result = _core.compile_kernels(9, 0)
    assert result.image == b""
    assert result.failure == (
        "NVRTC 12.9 for sm_90: NVRTC_ERROR_COMPILATION\nkernels.cu(1): error: planted"
    )
    assert not list(cache.glob("*"))


# ------------------------------------------------------------------------------ finding NVRTC


def test_a_library_that_is_named_and_missing_is_told(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_NVRTC_LIBRARY", "/nowhere/libnvrtc.so.12")
    result = _core.compile_kernels(9, 0)
    assert result.image == b""
    assert result.failure.startswith("no usable NVRTC: /nowhere/libnvrtc.so.12: cannot open")


def test_a_library_without_nvrtc_in_it_is_told(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_NVRTC_LIBRARY", "libc.so.6")
    assert _core.compile_kernels(9, 0).failure == (
        "no usable NVRTC: libc.so.6: it has no nvrtcVersion"
    )


def test_the_package_beside_kvtier_is_found(tmp_path: Path, cache: Path) -> None:
    core = tmp_path / "kvtier" / Path(_core.__file__).name
    library = tmp_path / "nvidia" / "cuda_nvrtc" / "lib" / "libnvrtc.so.12"
    for source, target in ((Path(_core.__file__), core), (fake_nvrtc.build(), library)):
        target.parent.mkdir(parents=True)
        shutil.copy(source, target)
    code = f"""
        import contextlib, ctypes, importlib.util
        for name in ("libnvrtc.so.12", "libnvrtc.so.13"):
            with contextlib.suppress(OSError):
                ctypes.CDLL(name)
                print(name)
        spec = importlib.util.spec_from_file_location("_core", {str(core)!r})
        core = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(core)
        print(core.compile_kernels(9, 0).image[:24].decode())
    """
    environment = {name: text for name, text in os.environ.items() if "NVRTC" not in name}
    run = subprocess.run(
        [sys.executable, "-I", "-S", "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    *of_system, first = run.stdout.splitlines()
    if of_system:
        pytest.skip(f"{of_system} of this system come first")
    assert first == "--gpu-architecture=sm_90"


# ------------------------------------------------------------------------------ the cache


def test_the_second_time_nothing_is_compiled(nvrtc: FakeNvrtc, cache: Path) -> None:
    first, second = _core.compile_kernels(9, 0), _core.compile_kernels(9, 0)
    assert (first.is_cached, second.is_cached, nvrtc.compiles) == (False, True, 1)
    assert first.image == second.image
    assert cache.stat().st_mode & 0o777 == 0o700
    assert kept(cache).stat().st_mode & 0o777 == 0o600


def test_another_target_or_version_of_nvrtc_is_compiled_anew(nvrtc: FakeNvrtc, cache: Path) -> None:
    _core.compile_kernels(9, 0)
    assert not _core.compile_kernels(8, 0).is_cached
    nvrtc.set_minor(8)
    assert not _core.compile_kernels(9, 0).is_cached
    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "magic", "longer"])
def test_a_damaged_image_is_compiled_anew(nvrtc: FakeNvrtc, cache: Path, damage: str) -> None:
    whole = _core.compile_kernels(9, 0).image
    path = kept(cache)
    content = path.read_bytes()
    path.write_bytes(
        {
            "flip": content[:-100] + bytes([content[-100] ^ 1]) + content[-99:],
            "truncate": content[:-1],
            "empty": b"",
            "magic": b"X" + content[1:],
            "longer": content + b"\0",
        }[damage]
    )
    again = _core.compile_kernels(9, 0)
    assert (again.is_cached, again.image) == (False, whole)
    assert path.read_bytes() == content
    assert _core.compile_kernels(9, 0).is_cached


def test_an_image_of_another_target_is_not_taken_for_this_one(
    nvrtc: FakeNvrtc, cache: Path
) -> None:
    _core.compile_kernels(8, 0)
    other = kept(cache)
    whole = _core.compile_kernels(9, 0).image
    (own,) = set(cache.iterdir()) - {other}
    shutil.copy(other, own)
    assert _core.compile_kernels(9, 0).image == whole


def test_a_link_or_a_pipe_in_an_image_s_place_is_not_read(
    nvrtc: FakeNvrtc, cache: Path, tmp_path: Path
) -> None:
    _core.compile_kernels(9, 0)
    path = kept(cache)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert not _core.compile_kernels(9, 0).is_cached
    path.unlink()
    os.mkfifo(path)
    assert not _core.compile_kernels(9, 0).is_cached


def test_a_folder_that_cannot_be_made_costs_the_cache_only(nvrtc: FakeNvrtc, cache: Path) -> None:
    cache.parent.write_text("a file where the folder should be")
    result = _core.compile_kernels(9, 0)
    assert result.image
    assert result.no_cache == f"{cache}: Not a directory"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_costs_the_cache_only(
    nvrtc: FakeNvrtc, cache: Path
) -> None:
    cache.mkdir(parents=True, mode=0o500)
    result = _core.compile_kernels(9, 0)
    assert result.image
    assert result.no_cache == f"{cache}: Permission denied"


def test_a_full_disk_costs_the_cache_only_and_leaves_nothing(nvrtc: FakeNvrtc, cache: Path) -> None:
    """A limit on file sizes stands for it; in a process of its own, as the limit stays."""
    code = """
        import resource, signal
        from kvtier import _core
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        result = _core.compile_kernels(9, 0)
        assert result.image and result.no_cache.endswith("File too large"), result.no_cache
    """
    subprocess.run([sys.executable, "-P", "-c", textwrap.dedent(code)], check=True)
    assert list(cache.iterdir()) == []


def test_a_folder_where_others_may_write_is_not_used(nvrtc: FakeNvrtc, cache: Path) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    result = _core.compile_kernels(9, 0)
    assert result.image
    assert result.no_cache == f"{cache}: other users may write there"
    assert list(cache.iterdir()) == []


def test_without_a_home_nothing_is_kept(nvrtc: FakeNvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.delenv("HOME")
    result = _core.compile_kernels(9, 0)
    assert result.image
    assert result.no_cache == "neither XDG_CACHE_HOME nor HOME is set"


def test_the_home_folder_is_used_where_nothing_is_said(
    nvrtc: FakeNvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _core.compile_kernels(9, 0).no_cache == ""
    assert kept(tmp_path / ".cache" / "kvtier").is_file()


def test_the_oldest_images_go_and_what_is_not_an_image_stays(nvrtc: FakeNvrtc, cache: Path) -> None:
    cache.mkdir(parents=True, mode=0o700)
    (cache / "calibration.json").touch()
    for age in range(IMAGES_MAX + 3):
        old = cache / f"kernels-sm_80-{age:032x}"
        old.touch()
        os.utime(old, (10_000 - age, 10_000 - age))
    _core.compile_kernels(9, 0)
    names = {path.name for path in cache.iterdir()}
    assert len(names) == IMAGES_MAX + 1
    assert "calibration.json" in names
    assert f"kernels-sm_80-{0:032x}" in names
    assert f"kernels-sm_80-{IMAGES_MAX:032x}" not in names
    assert _core.compile_kernels(9, 0).is_cached


def test_threads_at_once_all_get_the_image(nvrtc: FakeNvrtc, cache: Path) -> None:
    whole = _core.compile_kernels(9, 0).image

    def compile_or_read(_: int) -> bytes:
        for path in cache.glob("kernels-sm_90-*"):
            path.unlink(missing_ok=True)
        return _core.compile_kernels(9, 0).image

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(compile_or_read, range(200))) == {whole}


def test_processes_at_once_all_get_the_image(nvrtc: FakeNvrtc, cache: Path) -> None:
    """Each takes away what the others keep; none ever reads half an image."""
    code = f"""
        import pathlib
        from kvtier import _core
        for _ in range(100):
            result = _core.compile_kernels(9, 0)
            assert result.failure == "" and result.no_cache == "", result.no_cache
            for path in pathlib.Path({str(cache)!r}).glob("kernels-sm_90-" + 32 * "?"):
                path.unlink(missing_ok=True)
            print(hash(result.image))
    """
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    command = [sys.executable, "-P", "-c", textwrap.dedent(code)]
    running = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    output = [process.communicate(timeout=60)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0]
    assert len({line for lines in output for line in lines.split()}) == 1


def test_nvrtc_s_package_is_where_the_build_looks() -> None:
    """The group `kernels` brings it, so that nothing above is skipped where the tests run."""
    assert importlib.util.find_spec("nvidia.cuda_nvrtc") is not None
