"""Checks of the machine itself: processor, memory, limits, libraries, devices."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import resource
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from kvtier._core import CopyPool, FileEngine, Slab
from kvtier.doctor.report import Asked, Figure, Finding, Verdict, in_gb_s
from kvtier.errors import BackendUnavailable
from kvtier.shared_pool import SharedPool, free_huge_bytes

_FLAGS = ("avx2", "avx512f", "sha_ni", "erms")  # what copies, checksums and keys can use
_PACKAGES = ("numpy", "msgspec", "lmdb", "torch", "vllm", "boto3", "libucx-cu12", "libucx-cu13")
_COPY_BYTES = 256 << 20
_ROUNDS = 3
_FAULT_S_MAX = 4.0  # for memory to become real, before it is measured as it is


def processor(asked: Asked) -> Finding:
    """Model, cores and the instructions that are used where they are there."""
    pairs = (line.partition(":") for line in _read("/proc/cpuinfo").splitlines())
    fields = {name.strip(): value.strip() for name, _, value in pairs}
    flags = fields.get("flags", "").split()
    known = [flag for flag in _FLAGS if flag in flags]
    cores = len(os.sched_getaffinity(0))
    name = fields.get("model name", platform.machine())
    modes = CopyPool.modes()
    says = f"{name}, {cores} cores usable, {' '.join(known) or 'no vector instructions known'}"
    figures: dict[str, Figure] = {
        "model": name,
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "cores": cores,
        "flags": known,
        "copy_modes": modes,
    }
    return Finding(
        name="", verdict=Verdict.OK, says=f"{says}; copies: {' '.join(modes)}", figures=figures
    )


def memory(asked: Asked) -> Finding:
    """Speed of a copy in each mode, on one thread and on four."""
    nbytes = asked.sample_bytes(_COPY_BYTES)
    slabs = [Slab(nbytes) for _ in range(2)]
    ends_s = time.monotonic() + _FAULT_S_MAX
    while any(slab.prefaulted_bytes < nbytes for slab in slabs) and time.monotonic() < ends_s:
        time.sleep(0.005)
    target, source = (np.array([slab.address], np.uint64) for slab in slabs)
    lengths = np.array([nbytes], np.uint64)
    figures: dict[str, Figure] = {}
    threads = min(4, len(os.sched_getaffinity(0)))
    for mode, count in [*((mode, 1) for mode in CopyPool.modes()), ("auto", threads)]:
        pool = CopyPool(count)
        spent_s = []
        for _ in range(_ROUNDS):
            begin_s = time.perf_counter()
            pool.copy(target, source, lengths, mode)
            spent_s.append(time.perf_counter() - begin_s)
        figures[f"{mode}_{count}_threads_gb_s"] = in_gb_s(nbytes, min(spent_s))
    one, all_of_them = figures["auto_1_threads_gb_s"], figures[f"auto_{threads}_threads_gb_s"]
    says = f"copies {one} GB/s on 1 thread, {all_of_them} on {threads}; " + ", ".join(
        f"{mode} {figures[f'{mode}_1_threads_gb_s']}" for mode in CopyPool.modes() if mode != "auto"
    )
    return Finding(verdict=Verdict.OK, says=says, figures=figures)


def limits(asked: Asked) -> Finding:
    """What the system lets one process have."""
    figures: dict[str, Figure] = {
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "locked_bytes": _limit(resource.RLIMIT_MEMLOCK),
        "memory_total_bytes": _meminfo("MemTotal"),
        "memory_available_bytes": _meminfo("MemAvailable"),
        "cgroup_memory_bytes": _cgroup_bytes(),
        "ptrace_scope": _number("/proc/sys/kernel/yama/ptrace_scope"),
    }
    try:
        shm = os.statvfs("/dev/shm")
        figures["dev_shm_free_bytes"] = shm.f_bavail * shm.f_frsize
    except OSError:
        figures["dev_shm_free_bytes"] = None
    says = (
        f"open files (ulimit -n) {_or_unlimited(figures['open_files'])}, "
        f"locked memory (ulimit -l) {_size(figures['locked_bytes'])}, "
        f"memory {_size(figures['memory_available_bytes'])} available of "
        f"{_size(figures['memory_total_bytes'])}, /dev/shm {_size(figures['dev_shm_free_bytes'])}"
    )
    return Finding(verdict=Verdict.OK, says=says, figures=figures)


def packages(asked: Asked) -> Finding:
    """Versions of what kvtier uses if it is installed."""
    figures: dict[str, Figure] = {}
    for name in _PACKAGES:
        try:
            figures[name] = version(name)
        except PackageNotFoundError:
            figures[name] = None
    there = ", ".join(f"{name} {found}" for name, found in figures.items() if found)
    absent = ", ".join(name for name, found in figures.items() if not found)
    says = there + (f"; not installed: {absent}" if absent else "")
    return Finding(verdict=Verdict.OK, says=says, figures=figures)


def huge_pages(asked: Asked) -> Finding:
    """What memory and pools can lie on."""
    figures: dict[str, Figure] = {
        "transparent": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "transparent_shared": _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "set_aside_free_bytes": free_huge_bytes(),
    }
    transparent = figures["transparent"]
    says = (
        f"transparent: {transparent or 'unknown to this kernel'}, for shared memory: "
        f"{figures['transparent_shared'] or 'unknown'}; "
        f"{_size(figures['set_aside_free_bytes'])} set aside and free"
    )
    if transparent not in ("always", "madvise"):
        return Finding(verdict=Verdict.ABSENT, says=says, figures=figures)
    return Finding(verdict=Verdict.OK, says=says, figures=figures)


def shared_memory(asked: Asked) -> Finding:
    """Whether a pool can be made, sealed and attached."""
    nbytes = 32 << 20
    try:
        with SharedPool(nbytes, prefault=False) as pool, SharedPool.attach(pool.fd) as seen:
            pool.view(0, 6)[:] = b"kvtier"
            if bytes(seen.view(0, 6)) != b"kvtier":
                return Finding(verdict=Verdict.FAILED, says="a pool is not shared")
            says = f"a sealed pool on {pool.pages}"
            return Finding(verdict=Verdict.OK, says=says, figures={"pages": pool.pages})
    except BackendUnavailable as error:
        return Finding(verdict=Verdict.FAILED, says=str(error))


def io_uring(asked: Asked) -> Finding:
    """Whether the kernel lets us use it; threads do its work where it does not."""
    try:
        FileEngine(method="uring").close()
    except (OSError, RuntimeError) as error:
        says = f"not to be had ({error}): threads do its work"
        return Finding(verdict=Verdict.ABSENT, says=says)
    return Finding(verdict=Verdict.OK, says="works")


def rdma(asked: Asked) -> Finding:
    """The devices that the kernel knows, and whether their ports are up."""
    ports = []
    for port in sorted(Path("/sys/class/infiniband").glob("*/ports/*")):
        state = _read(port / "state").partition(":")[2].strip()
        rate = _read(port / "rate").strip()
        ports.append(f"{port.parts[-3]}/{port.name}: {state}, {rate}")
    if not ports:
        return Finding(verdict=Verdict.ABSENT, says="no device", figures={"ports": []})
    return Finding(verdict=Verdict.OK, says="; ".join(ports), figures={"ports": ports})


def cuda(asked: Asked) -> Finding:
    """Driver and devices, without any CUDA package."""
    library = _open(["libcuda.so.1", "libcuda.so"])
    if isinstance(library, str):
        return Finding(verdict=Verdict.ABSENT, says=library)
    code = int(library.cuInit(0))
    if code != 0:
        return Finding(verdict=Verdict.FAILED, says=f"cuInit: error {code}")
    number, count = ctypes.c_int(), ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(number))
    library.cuDeviceGetCount(ctypes.byref(count))
    names = []
    for device in range(count.value):
        name = ctypes.create_string_buffer(100)
        library.cuDeviceGetName(name, len(name), device)
        names.append(name.value.decode(errors="replace"))
    driver = f"{number.value // 1000}.{number.value % 1000 // 10}"
    says = f"driver for CUDA {driver}, {count.value} devices: {', '.join(names) or 'none'}"
    verdict = Verdict.OK if names else Verdict.ABSENT
    return Finding(
        name="", verdict=verdict, says=says, figures={"driver": driver, "devices": names}
    )


def cufile(asked: Asked) -> Finding:
    """Whether its library loads, and whether the kernel has the module for the direct path."""
    names = ["libcufile.so.0", "libcufile.so"]
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        names += [str(path) for path in sorted(Path(root).glob("*/lib/libcufile.so*"))]
    library = _open(names)
    if isinstance(library, str):
        return Finding(verdict=Verdict.ABSENT, says=library)
    has_module = Path("/proc/driver/nvidia-fs").exists()
    says = "loads; " + (
        "nvidia-fs is there" if has_module else "without nvidia-fs: it would bounce"
    )
    return Finding(verdict=Verdict.OK, says=says, figures={"nvidia_fs": has_module})


def _open(names: list[str]) -> ctypes.CDLL | str:
    """The first that loads, or why the first does not."""
    reasons = []
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
    return reasons[0]


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _chosen(path: str) -> str | None:
    """Which of a sysfs file's choices stands in brackets."""
    text = _read(path)
    return text.partition("[")[2].partition("]")[0] or None


def _number(path: str) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _limit(which: int) -> int | None:
    """The soft limit; None if there is none."""
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _meminfo(name: str) -> int | None:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return None


def _cgroup_bytes() -> int | None:
    """The limit of this process's cgroup, of either version; None if there is none."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        found = _number(path)
        if found is not None and found < 1 << 60:
            return found
    return None


def _or_unlimited(value: Figure) -> str:
    return "unlimited" if value is None else str(value)


def _size(nbytes: Figure) -> str:
    if not isinstance(nbytes, int):
        return "unlimited" if nbytes is None else str(nbytes)
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes / scale:.3g} {unit}"
    return f"{nbytes} B"
