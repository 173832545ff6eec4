"""kvtier's compiled core."""

from collections.abc import Sequence
from typing import Annotated

import numpy
from numpy.typing import NDArray


class CopyPool:
    """
    Threads for memory copies and checksums; the calling thread is one of them. Calls from several threads queue up.
    """

    def __init__(self, thread_count: int) -> None: ...

    @property
    def thread_count(self) -> int:
        """Threads, the caller included."""

    @staticmethod
    def modes() -> list[str]:
        """The copy modes that this machine runs; the first is auto."""

    def copy(self, targets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], sources: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], mode: str = 'auto') -> None:
        """Copy bytes between addresses, piece by piece, in parallel."""

    def checksum(self, addresses: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> bytes:
        """XXH3-128 of each piece, 16 bytes each, concatenated."""

    def verify(self, addresses: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], digests: bytes) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """1 for each piece whose checksum is the one given, else 0."""

class CopyPlan:
    """
    Where each byte of an engine's paged KV lies, and the copies between it and block-first segments. Usable from any thread.
    """

    def __init__(self, plane_addresses: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], page_count: int, page_stride: int, rows: int, row_stride: int, cols: int, col_stride: int, run_bytes: int) -> None: ...

    @property
    def plane_count(self) -> int:
        """Planes: one per (layer, K or V)."""

    @property
    def page_count(self) -> int:
        """Pages in each plane."""

    @property
    def plane_bytes(self) -> int:
        """Bytes of one page in one plane."""

    def gather(self, pool: CopyPool, page_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], page_offsets: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], segments: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], first_plane: int, plane_count: int, mode: str = 'auto') -> int:
        """Copy engine pages into segments; returns the bytes moved."""

    def scatter(self, pool: CopyPool, page_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], page_offsets: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], segments: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], first_plane: int, plane_count: int, mode: str = 'auto') -> int:
        """Copy segments into engine pages; returns the bytes moved."""

class DeviceJob:
    """
    Copies under way on a device, wave by wave. Any thread. OSError when the device has failed.
    """

    @property
    def nbytes(self) -> int:
        """Bytes moved when it is done."""

    @property
    def wave_count(self) -> int:
        """Waves."""

    def order_after(self, stream: int, wave: int = -1) -> None:
        """
        Let what is put on the stream from now on wait for a wave, or for all; not the host.
        """

    def is_done(self, wave: int = -1) -> bool:
        """Whether the bytes of a wave, or of all, are in place."""

    def wait(self, timeout_s: float) -> bool:
        """Sleep until all is in place; False when the time is over first."""

    def elapsed_s(self) -> float:
        """Device time from start to end, once it is done."""

class CudaDevice:
    """
    One CUDA device: its memory, page-locked host memory, and copies on streams of its own. Any thread. OSError, with the reason, where it cannot be used.
    """

    def __init__(self, ordinal: int = 0, mode: str = 'auto', staging_bytes: int = 67108864, sm_budget: int = 0, launch_items_max: int = 2147483647) -> None: ...

    @staticmethod
    def count() -> int:
        """Devices; 0 without a driver."""

    @staticmethod
    def missing() -> str:
        """Why there are none; empty if some."""

    @property
    def ordinal(self) -> int:
        """Its number."""

    @property
    def name(self) -> str:
        """Its model."""

    @property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor."""

    @property
    def sm_count(self) -> int:
        """Multiprocessors."""

    @property
    def driver_version(self) -> int:
        """1000 * major + 10 * minor of the newest CUDA that the driver knows."""

    @property
    def sm_budget(self) -> int:
        """CTAs of a copy kernel; 0: as many as its way needs."""

    @property
    def slot_bytes(self) -> int:
        """What a plane of a page may have at most for kernels to copy it."""

    @property
    def has_batch_copy(self) -> bool:
        """Whether the driver takes many copies in one call (12.8 and later)."""

    @property
    def kernels(self) -> str:
        """Which kernels it runs, such as "cubin sm_90"; empty if none."""

    @property
    def no_kernels(self) -> str:
        """Why there are none; else empty."""

    @property
    def failure(self) -> str:
        """
        The error that ended the device for this process; empty while it lives.
        """

    def register_host(self, address: int, nbytes: int) -> int:
        """Page-lock host memory; gives a number for `unregister_host`."""

    def unregister_host(self, number: int) -> None:
        """Undo it, after what is under way."""

    def memory_kind(self, address: int, nbytes: int) -> str:
        """
        "device", "host" (page-locked), "managed" or "unpinned"; ValueError if mixed.
        """

    def device_address(self, address: int, nbytes: int) -> int:
        """Where kernels find that memory; ValueError if they cannot reach it."""

    def allocate(self, nbytes: int) -> int:
        """Memory of the device."""

    def free(self, address: int) -> None:
        """Give it back."""

    def allocate_host(self, nbytes: int) -> int:
        """Page-locked host memory."""

    def free_host(self, address: int) -> None:
        """Give it back."""

    def copy(self, targets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], sources: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], after: int | None = None) -> DeviceJob:
        """Begin to copy pieces; `after` is a stream to follow."""

    def launch(self, name: str, grid: int, block: int, shared_bytes: int, argument: bytes, after: int | None = None, stream: int | None = None) -> DeviceJob:
        """
        Launch a kernel with the bytes of its argument; `after` is a stream to follow, `stream` one to launch on.
        """

    def reserve_staging(self) -> None:
        """Take the staging memory of both directions now."""

    def release_staging(self) -> None:
        """
        Give it back, after what uses it; the next copy that needs it takes it again.
        """

    def create_stream(self) -> int:
        """A stream such as an engine has."""

    def destroy_stream(self, stream: int) -> None:
        """End it."""

    def synchronize(self, stream: int) -> None:
        """Return when the stream has done what is on it."""

    def close(self) -> None:
        """
        Wait for what is under way and let go of everything; again, do nothing.
        """

class DevicePlan:
    """
    Where each byte of an engine's paged KV lies on a device, and the copies between it and block-first segments. Usable from any thread.
    """

    def __init__(self, device: CudaDevice, plane_addresses: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], page_count: int, page_stride: int, rows: int, row_stride: int, cols: int, col_stride: int, run_bytes: int) -> None: ...

    @property
    def plane_count(self) -> int:
        """Planes: one per (layer, K or V)."""

    @property
    def page_count(self) -> int:
        """Pages in each plane."""

    @property
    def plane_bytes(self) -> int:
        """Bytes of one page in one plane."""

    @property
    def run_bytes(self) -> int:
        """Bytes of one plane that are copied as one piece."""

    @property
    def joined_planes(self) -> int:
        """
        Planes, from the first on, that lie one behind the other on both sides.
        """

    @property
    def vector_bytes(self) -> int:
        """The widest vector of kernels on the engine's side."""

    def gather(self, page_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], page_offsets: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], segments: Annotated[NDArray[numpy.uint64], dict(shape=(None, None), order='C', device='cpu', writable=False)], waves: Annotated[NDArray[numpy.uint64], dict(shape=(None, None), order='C', device='cpu', writable=False)], stream: int, path: str = 'dma', is_bulk: bool = False, ctas: int = 0) -> DeviceJob:
        """Begin to copy pages into segments, after what is on `stream` now."""

    def scatter(self, page_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], page_offsets: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], segments: Annotated[NDArray[numpy.uint64], dict(shape=(None, None), order='C', device='cpu', writable=False)], waves: Annotated[NDArray[numpy.uint64], dict(shape=(None, None), order='C', device='cpu', writable=False)], stream: int, path: str = 'dma', is_bulk: bool = False, ctas: int = 0) -> DeviceJob:
        """Begin to copy segments into pages, after what is on `stream` now."""

class JitResult:
    """What NVRTC made of the device kernels."""

    @property
    def image(self) -> bytes:
        """A cubin, or PTX with its zero byte; empty on failure."""

    @property
    def target(self) -> str:
        """Such as sm_90, or compute_121 for PTX."""

    @property
    def compiler(self) -> str:
        """Such as NVRTC 12.9."""

    @property
    def failure(self) -> str:
        """Why there is no image; else empty."""

    @property
    def is_cached(self) -> bool:
        """It came from the cache on disk."""

    @property
    def no_cache(self) -> str:
        """Why it could not be kept there; else empty."""

def cubin_architectures() -> list[int]:
    """Such as [80, 90]: what cubins of the device kernels are built in for."""

def find_cubin(major: int, minor: int) -> bytes:
    """
    The built-in cubin that a device of this compute capability runs, or nothing.
    """

def compile_kernels(major: int, minor: int) -> JitResult:
    """
    Compile the device kernels for a compute capability by NVRTC, or take them from the cache. Any thread; never raises.
    """

def xxh3_128(data: object) -> bytes:
    """
    XXH3-128 of any contiguous buffer: 16 bytes in canonical (big-endian) form.
    """

def chain_keys(parent: bytes, tokens: object, chunk_tokens: int) -> bytes:
    """
    Chained keys of all whole chunks of `tokens`, 32 bytes each, concatenated.
    """

def chain_key(parent: bytes, tokens: object, extra: bytes = ...) -> bytes:
    """
    One key over all of `tokens`; `extra`, when not empty, is mixed in with its length.
    """

class StopFlag:
    """How a batch that runs is told that nobody waits for it. Any thread."""

    def __init__(self) -> None: ...

    def set(self) -> None:
        """Begin nothing more; it cannot be taken back."""

    @property
    def is_set(self) -> bool:
        """Whether it was."""

    @property
    def moved_bytes(self) -> int:
        """Bytes of the batch's segments that are over, so far."""

class FileEngine:
    """
    Batches of positional reads and writes on open files, cut into segments, `depth` of them in flight. Any thread, several at once.
    """

    def __init__(self, depth: int = 16, segment_bytes: int = 1048576, method: str = 'auto') -> None: ...

    @property
    def method(self) -> str:
        """The method in use: uring or threads."""

    def read(self, fds: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], addresses: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], stop: StopFlag | None = None) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """
        Bytes read per item, fewer where the file ends, or -errno; once `stop` is set nothing more is begun, and what is not whole then is -ECANCELED.
        """

    def write(self, fds: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], addresses: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], stop: StopFlag | None = None) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """Bytes written per item, all of them, or -errno; `stop` as in `read`."""

    def allocate(self, fds: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """
        Give each file its size and room on the disk ahead of the writes: 0 or -errno.
        """

    def sync(self, fds: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], data_only: bool = True) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """
        Bring each to stable storage: 0 or -errno. A folder's new names need data_only=False.
        """

    def close(self) -> None:
        """
        Wait for the calls in progress and release everything. Calling it again does nothing.
        """

class GdsEngine:
    """
    Batches of reads and writes between files and GPU or host memory by cuFile, cut into segments, `depth` of them in flight. Any thread, several at once. OSError, with the reason, where cuFile cannot be used.
    """

    def __init__(self, depth: int = 16, segment_bytes: int = 4194304, wheel_path: str = '', mode: str = 'threads') -> None: ...

    @property
    def library_path(self) -> str:
        """The cuFile library in use."""

    @property
    def no_cuda(self) -> str:
        """Why GPU memory cannot be served; empty if it can."""

    def add_file(self, fd: int) -> None:
        """Make an open file known; it stays open until `remove_file`."""

    def remove_file(self, fd: int) -> None:
        """Forget a file."""

    def add_memory(self, address: int, nbytes: int, device: int | None = None) -> int:
        """
        Make memory known, of a GPU if `device` says of which; gives its number.
        """

    def remove_memory(self, address: int, number: int) -> None:
        """Forget memory."""

    def read(self, fds: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], addresses: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], stop: StopFlag | None = None) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """
        As `FileEngine.read`; a failure may be a code of cuFile's or CUDA's, see `meaning`.
        """

    def write(self, fds: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], addresses: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], stop: StopFlag | None = None) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """As `FileEngine.write`, with codes as `read`."""

    def meaning(self, code: int) -> tuple[int, str]:
        """
        The errno nearest to a failure's code, and what the code means in words.
        """

    def close(self) -> None:
        """
        Wait for the calls in progress, forget all files and memory, close cuFile's driver. Calling it again does nothing.
        """

class Slab:
    """
    One mapping, on huge pages if there are any, allocated in multiples of 4 KiB. Any thread.
    """

    def __init__(self, capacity_bytes: int, prefault: bool = True) -> None: ...

    @staticmethod
    def over(fd: int, size_bytes: int, is_writable: bool, prefault: bool = True) -> Slab:
        """
        Shared with whoever maps the same file, which has `size_bytes` and never becomes shorter; `fd` may be closed afterwards.
        """

    @property
    def address(self) -> int:
        """Address of the first byte; 0 once closed."""

    @property
    def capacity_bytes(self) -> int:
        """Bytes that can be allocated."""

    @property
    def used_bytes(self) -> int:
        """Bytes allocated now."""

    @property
    def prefaulted_bytes(self) -> int:
        """Bytes from the low end that the background thread has made real."""

    @property
    def joined_bytes(self) -> int:
        """
        Bytes of shared memory for which that thread has asked for huge pages; it does so after the rest, and stops where the kernel cannot.
        """

    @property
    def largest_free_bytes(self) -> int:
        """The longest run that `allocate` could give."""

    def allocate(self, nbytes: int) -> int:
        """
        Offset of a run of `nbytes`, rounded up to 4 KiB; -1 when there is none.
        """

    def free(self, offset: int) -> None:
        """
        Give back the run at `offset`; ValueError when none is allocated there.
        """

    def memory(self, offset: int, nbytes: int) -> memoryview:
        """
        The bytes themselves, writable if the mapping is; they keep the memory mapped.
        """

    def close(self) -> None:
        """
        Stop prefaulting and unmap once no memoryview is left. Calling it again does nothing.
        """

class ChunkIndex:
    """
    key -> chunk number, with the prefix tree, the tiers that hold each chunk, and leases.

    A number names its chunk while the chunk is known: from `add` until no tier holds it and
    no lease counts on it. Not thread-safe: the caller holds one lock. Unknown numbers, bad
    tiers and ragged arrays raise ValueError and change nothing.
    """

    def __init__(self, tier_count: int) -> None: ...

    NONE: int = 4294967295

    def __len__(self) -> int: ...

    @property
    def memory_bytes(self) -> int:
        """
        Everything allocated now; room of chunks let go is kept and used again.
        """

    def lookup(self, root: bytes, tokens: object, chunk_tokens: int, page_tokens: int) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
        """
        The longest run of whole chunks that some tier holds, and after it, if one is held,
        the longest partial chunk of a multiple of `page_tokens` tokens.
        """

    def find(self, keys: bytes) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
        """The number of each 32-byte key, NONE where it is unknown."""

    def add(self, parent: int, keys: bytes, tokens: Annotated[NDArray[numpy.uint32], dict(shape=(None,), device='cpu', writable=False)], nbytes: Annotated[NDArray[numpy.uint64], dict(shape=(None,), device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
        """
        Make a run of keys known: the first continues `parent` (NONE: a root), each further
        one its predecessor. Known keys keep their number; an orphan gets its parent back.
        """

    def add_linked(self, keys: bytes, parent_keys: bytes, tokens: Annotated[NDArray[numpy.uint32], dict(shape=(None,), device='cpu', writable=False)], nbytes: Annotated[NDArray[numpy.uint64], dict(shape=(None,), device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
        """
        Make chunks known in any order, each with its parent's key, 32 zero bytes for a root.
        One whose parent is neither known nor among `keys` has NONE as its parent.
        """

    def publish(self, chunks: Annotated[NDArray[numpy.uint32], dict(shape=(None,), device='cpu', writable=False)], tier: int) -> None:
        """Say that `tier` holds these chunks."""

    def withdraw(self, chunks: Annotated[NDArray[numpy.uint32], dict(shape=(None,), device='cpu', writable=False)], tier: int) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
        """
        Say that `tier` holds them no longer; gives those that no tier holds now, each once:
        let go, but for the leased ones.
        """

    def lease(self, chunks: Annotated[NDArray[numpy.uint32], dict(shape=(None,), device='cpu', writable=False)]) -> None:
        """Count one more lease on each."""

    def release(self, chunks: Annotated[NDArray[numpy.uint32], dict(shape=(None,), device='cpu', writable=False)]) -> None:
        """Undo `lease`; chunks that nothing else keeps are let go."""

    def suffix(self, chunk: int) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
        """Every known descendant, parents before children."""

    def children(self, chunk: int) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
        """The known chunks that continue this one, in no order."""

    def parent(self, chunk: int) -> int:
        """The chunk that this one continues; NONE for a root or an orphan."""

    def held(self, tier: int) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
        """Every chunk that `tier` holds, by ascending number."""

    def tiers(self, chunks: Annotated[NDArray[numpy.uint32], dict(shape=(None,), device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,))]:
        """Bit t is set where tier t holds the chunk."""

    def tokens(self, chunks: Annotated[NDArray[numpy.uint32], dict(shape=(None,), device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
        """How many tokens each covers."""

    def nbytes(self, chunks: Annotated[NDArray[numpy.uint32], dict(shape=(None,), device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint64], dict(shape=(None,))]:
        """The size of each one's record."""

    def keys(self, chunks: Annotated[NDArray[numpy.uint32], dict(shape=(None,), device='cpu', writable=False)]) -> bytes:
        """Their keys, 32 bytes each, concatenated."""

    def leases(self, chunks: Annotated[NDArray[numpy.uint32], dict(shape=(None,), device='cpu', writable=False)]) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
        """How many leases count on each."""

class LruOrder:
    """Chunk numbers in order of last use; O(1) a chunk. Not thread-safe."""

    def __init__(self) -> None: ...

    def touch(self, chunks: Annotated[NDArray[numpy.uint32], dict(shape=(None,), device='cpu', writable=False)], insert: bool) -> None:
        """
        Make them the most recent, the last of them first, so that the root side of a run
        outlives its leaves. Those not in the order enter it if `insert`, else are passed over.
        """

    def remove(self, chunks: Annotated[NDArray[numpy.uint32], dict(shape=(None,), device='cpu', writable=False)]) -> None:
        """Take them out; those that are not in are passed over."""

    def oldest(self, count: int) -> Annotated[NDArray[numpy.uint32], dict(shape=(None,))]:
        """The `count` least recent (or all, if fewer), least recent first."""

    def __len__(self) -> int: ...

    def __contains__(self, chunk: int) -> bool: ...

    @property
    def memory_bytes(self) -> int:
        """Everything allocated now."""

class Completions:
    """Where the ends of transfers queue up until somebody asks. Any thread."""

    def __init__(self) -> None: ...

    def push(self, ticket: int, results: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], started: int, is_quiet: bool = True, detail: str = '') -> None:
        """
        The end of a transfer: bytes or -errno per piece; pieces from `started` on were never begun; unless `is_quiet`, its memory may still be touched until `push_quiet`.
        """

    def push_quiet(self, ticket: int) -> None:
        """Nothing touches the memory of this ended transfer any more."""

    def signal(self) -> None:
        """Wake whoever sleeps: there is something else to see."""

    def drain(self) -> tuple[list[tuple[int, NDArray[numpy.int64], int, bool, str]], list[int]]:
        """
        What was pushed since the last call: ends as (ticket, results, started, is_quiet, detail), and the tickets that became quiet.
        """

    @property
    def generation(self) -> int:
        """Counts pushes and signals."""

    def wait(self, seen: int, timeout_s: float) -> bool:
        """
        Sleep until `generation` is no longer `seen`; False when the time is over first.
        """

    def fileno(self) -> int:
        """An eventfd, readable from a push until `clear_fd`."""

    def clear_fd(self) -> None:
        """Make the eventfd wait for the next push."""

class UcxMemory:
    """Memory of this process that UCX has registered."""

class UcxRemote:
    """A peer's memory, as seen through one link."""

class UcxLink:
    """The way to one peer."""

class UcxPrepared:
    """What a transfer moves, checked and copied once."""

class UcxEngine:
    """
    One-sided transfers to peers through UCX, on one thread that sleeps when nothing moves. Any thread; RuntimeError where UCX does not serve.
    """

    def __init__(self, completions: Completions, wheel_path: str = '', settings: Sequence[tuple[str, str]] = [], may_copy_on_host: bool = True, copy_threads: int = 2, window_bytes: int = 8388608, window_requests: int = 128, request_bytes_max: int = 1048576, message_bytes_max: int = 1048576, drain_s: float = 1.0) -> None:
        """
        `settings` are UCX's, without UCX_; the environment's win. UCX is looked for on the system first, then at `wheel_path`.
        """

    @property
    def version(self) -> str:
        """Of the UCX library."""

    @property
    def library_path(self) -> str:
        """Where that was found."""

    @property
    def transports(self) -> list[str]:
        """What it can use here: transport/device."""

    @property
    def has_rdma(self) -> bool:
        """Whether one of them is RDMA."""

    def address(self) -> bytes:
        """How engines elsewhere reach this one."""

    def map(self, address: int, length: int, is_writable: bool = True) -> UcxMemory:
        """Register memory."""

    def unmap(self, memory: UcxMemory) -> None:
        """Release it; no transfer may use it any more."""

    def pack(self, memory: UcxMemory) -> bytes:
        """What a peer needs to reach the memory."""

    def connect(self, address: bytes, host_pid: int = -1) -> UcxLink:
        """
        A link to the engine that gave `address`; on this host if `host_pid` is its process.
        """

    def import_remote(self, link: UcxLink, packed: bytes) -> UcxRemote:
        """A peer's memory from what its `pack` gave."""

    def forget_remote(self, remote: UcxRemote) -> None:
        """Release it; no transfer may use it any more."""

    def disconnect(self, link: UcxLink) -> None:
        """
        End what is in flight on it with -ECONNRESET, and all that is started later.
        """

    def prepare(self, is_read: bool, link: UcxLink, memories: Sequence[UcxMemory], local_which: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], local_addresses: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], remotes: Sequence[UcxRemote], remote_which: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], remote_addresses: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)], lengths: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> UcxPrepared:
        """Check and copy what a transfer moves."""

    def start(self, prepared: UcxPrepared, ticket: int, deadline_s: float) -> None:
        """Begin; its end goes to the completions within `deadline_s`."""

    def cancel(self, ticket: int) -> None:
        """End it soon with -ECANCELED; unknown ones are over."""

    def progress(self, ticket: int) -> int:
        """Bytes that have arrived so far."""

    def close(self) -> None:
        """
        End all that is in flight and release all but mapped memory; again, do nothing.
        """
