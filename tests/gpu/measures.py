"""Copies of pages against plain copies of as many bytes: GB/s by layout, path and CTAs.

A figure and what it is held against take turns in the same run. Seconds are the device's own, from
the first of a copy's work to the last; `wall` is what the caller sees, planning included.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpu_machine import copy_bytes
from layouts import Shape
from plan_checks import Way
from rig import GB, OutOfTime, PagedOnDevice, Rig, TimeBox, Work, device_s, take_turns, tell, wall_s

from kvtier.backends import cuda_paths

Figures = dict[str, Any]
"""What goes into the JSON."""

BLOCKS_GOAL = 0.95
"""Of a plain copy, for blocks of 2 MiB."""
SMALL_PAGES_GOAL = 0.85
"""The same for runs of 2 KiB."""
WITHIN_GOAL = 0.80
"""Of a plain copy within the device, by a kernel on all multiprocessors."""
RUN_BYTES_BULK_MIN = 512  # shorter ones are none of the bulk kernels'
CALLS_MAX = 256


def plain(rig: Rig, direction: str, nbytes: int) -> Work:
    """One copy of one piece: ``h2d``, ``d2h`` or ``d2d``."""
    ends = {
        "h2d": (rig.memory, rig.host),
        "d2h": (rig.host, rig.memory),
        "d2d": (rig.memory, rig.memory),
    }[direction]
    target, source = (allocate(nbytes) for allocate in ends)
    return lambda turn: device_s(copy_bytes(rig.device, target, source, nbytes))


def rate(nbytes: int, seconds: float) -> float:
    """GB/s of 10^9 bytes."""
    return float(f"{nbytes / max(seconds, 1e-12) / GB:.4g}")


def ceilings(rig: Rig, box: TimeBox) -> Figures:
    """GB/s of plain copies, each by itself."""
    nbytes = rig.sizes.copy_bytes
    works = {direction: plain(rig, direction, nbytes) for direction in ("h2d", "d2h", "d2d")}
    times = take_turns(works, rig.sizes.rounds, box)
    return {f"{name}_gb_s": rate(nbytes, seconds) for name, seconds in times.items()}


def host_ways(rig: Rig, run_bytes: int) -> list[Way]:
    """Ways between pages and the host that the device has for such runs.

    Bulk copies of host memory are not among them: see `direct_bulk`.
    """
    ways = [Way("dma")]
    if rig.device.kernels:
        has_bulk = rig.device.compute_capability >= (9, 0) and run_bytes >= RUN_BYTES_BULK_MIN
        for is_bulk in (False, True) if has_bulk else (False,):
            ways += [Way("staged", is_bulk, ctas) for ctas in rig.sizes.ctas]
        ways += [Way("direct", False, ctas) for ctas in rig.sizes.ctas]
    return ways


def within_ways(rig: Rig, run_bytes: int) -> list[Way]:
    """Ways of kernels within the device: a few CTAs, and all that there is room for."""
    count = rig.device.sm_count
    has_bulk = rig.device.compute_capability >= (9, 0) and run_bytes >= RUN_BYTES_BULK_MIN
    ctas = sorted({1, 8, count, 2 * count, 4 * count})
    bulks = (False, True) if has_bulk else (False,)
    return [Way("direct", is_bulk, n) for is_bulk in bulks for n in ctas]


def sound(
    kv: PagedOnDevice, is_gather: bool, ways: Iterable[Way], found: Figures, samples: int = 24
) -> list[Way]:
    """The ways that copy right; what is wrong with the others goes into `found`, under ``wrong``."""
    right = []
    for way in ways:
        tell(f"check of {way}")
        try:
            kv.check(is_gather, way, 0, samples)
            right.append(way)
        except (AssertionError, ValueError) as error:
            name = f"{'gather' if is_gather else 'scatter'}, {way}"
            found.setdefault("wrong", {})[name] = str(error)
    return right


def chosen_ways(rig: Rig, kv: PagedOnDevice) -> tuple[Way, Way]:
    """What the library takes by itself for these pages, out and in; found anew."""
    tell("what each way costs")
    costs = cuda_paths.measure(rig.device, rig.sizes.calibration_bytes)
    run_bytes, vector_bytes = kv.plan.run_bytes, kv.plan.vector_bytes
    out = costs.ways("gather", run_bytes, vector_bytes)[0]
    into = costs.ways("scatter", run_bytes, vector_bytes)[0]
    return Way(out.path, out.is_bulk), Way(into.path, into.is_bulk)


def small_pages(shape: Shape) -> Shape:
    """As many bytes in pages of one token."""
    return Shape(shape.layers, shape.pages * shape.tokens, 1, shape.heads, shape.run_bytes)


def layouts(rig: Rig) -> Mapping[str, tuple[str, Shape]]:
    """What an engine's pages look like, from long runs to short ones."""
    kv = rig.sizes.kv
    return {
        "blocks of all layers": ("cross_layer", kv),
        "page by layer": ("kv_first", kv),
        "latent": ("latent", rig.sizes.latent),
        "one token a page": ("kv_first", small_pages(kv)),
        "heads outside": ("head_major", kv),
    }


def against_plain(rig: Rig, box: TimeBox, *, is_gather: bool, is_small: bool = False) -> Figures:
    """Every way of moving pages to or from the host, against a plain copy of as many bytes.

    Of blocks of all layers, or of pages of one token, whose runs are short. `ratio` is that of the
    way that the library takes by itself.
    """
    layout, shape = layouts(rig)["one token a page" if is_small else "blocks of all layers"]
    kv = PagedOnDevice(rig, layout, shape, page_count=_page_count(rig, shape, is_small))
    direction = "d2h" if is_gather else "h2d"
    found: Figures = {}
    works = {"plain": plain(rig, direction, kv.nbytes)}
    for way in sound(kv, is_gather, host_ways(rig, kv.run_bytes), found):
        works[str(way)] = _mover(kv, is_gather, way)
    times = take_turns(works, rig.sizes.rounds, box)
    chosen = chosen_ways(rig, kv)[not is_gather]
    plain_s, chosen_s = times["plain"], times.get(str(chosen))
    found |= _compared(kv, times)
    found |= {"best_ratio": found["ratio"], "chosen": str(chosen), "ratio": None}
    if chosen_s is None:
        return found  # it is among the wrong ones
    walls = take_turns(
        {"own": lambda turn: wall_s(lambda: [kv.copy(is_gather, chosen, turn)])},
        rig.sizes.rounds,
        box,
    )
    return {
        **found,
        "chosen_gb_s": rate(kv.nbytes, chosen_s),
        "chosen_wall_gb_s": rate(kv.nbytes, walls["own"]),
        "ratio": round(plain_s / chosen_s, 4),
    }


def direct_bulk(rig: Rig, box: TimeBox) -> Figures:
    """Bulk copies of host memory, blocks of all layers out and in, against plain copies.

    By themselves, because not every machine may be able to do them, and a device that cannot is lost.
    """
    layout, shape = layouts(rig)["blocks of all layers"]
    kv = PagedOnDevice(rig, layout, shape)
    found: Figures = {}
    for is_gather in (True, False):
        direction = "d2h" if is_gather else "h2d"
        works = {"plain": plain(rig, direction, kv.nbytes)}
        ways = [Way("direct", True, ctas) for ctas in rig.sizes.ctas]
        for way in sound(kv, is_gather, ways, found):
            works[str(way)] = _mover(kv, is_gather, way)
        times = take_turns(works, rig.sizes.rounds, box.part(1 + is_gather))
        rates = {name: rate(kv.nbytes, seconds) for name, seconds in times.items()}
        found[f"{direction}_gb_s"] = rates
    return found


def within(rig: Rig, box: TimeBox, *, is_gather: bool) -> Figures:
    """The kernels between pages and blocks in device memory, against a plain copy there."""
    layout, shape = layouts(rig)["page by layer"]
    kv = PagedOnDevice(rig, layout, shape, on_device=True)
    found: Figures = {}
    works = {"plain": plain(rig, "d2d", kv.nbytes)}
    for way in sound(kv, is_gather, within_ways(rig, kv.run_bytes), found):
        works[str(way)] = _mover(kv, is_gather, way)
    return found | _compared(kv, take_turns(works, rig.sizes.rounds, box))


def table(rig: Rig, box: TimeBox, *, rounds: int) -> Figures:
    """GB/s of every layout, both directions, every way, in host and in device memory."""
    found: Figures = {}
    kinds = [(name, on_device) for name in layouts(rig) for on_device in (False, True)]
    for at, (name, on_device) in enumerate(kinds):
        layout, shape = layouts(rig)[name]
        part = box.part(len(kinds) - at)
        with Rig(rig.device, rig.sizes) as own:
            kv = PagedOnDevice(own, layout, shape, on_device=on_device)
            for is_gather in (True, False):
                where = "device" if on_device else "host"
                key = f"{'gather' if is_gather else 'scatter'}, {name}, {where}"
                try:
                    found[key] = _row(own, kv, is_gather, part.part(1 + is_gather), rounds)
                except OutOfTime as error:
                    found[key] = {"not measured": str(error)}
    return found


def _row(rig: Rig, kv: PagedOnDevice, is_gather: bool, box: TimeBox, rounds: int) -> Figures:
    if kv.stored_on_device:
        ways = within_ways(rig, kv.run_bytes) if rig.device.kernels else []
    else:
        ways = host_ways(rig, kv.run_bytes)
        if kv.nbytes // kv.run_bytes > rig.sizes.pieces_max:
            ways = ways[1:]  # so many descriptors take the host longer than they are worth here
    found: Figures = {}
    right = sound(kv, is_gather, ways, found, samples=4)
    works = {str(way): _mover(kv, is_gather, way) for way in right}
    times = take_turns(works, rounds, box) if works else {}
    rates = {name: rate(kv.nbytes, seconds) for name, seconds in times.items()}
    return found | {"run_bytes": kv.run_bytes, "nbytes": kv.nbytes, "gb_s": rates}


def sweep(rig: Rig, box: TimeBox) -> Figures:
    """Runs from short to long: a call each, all descriptors in one go, and kernels.

    `threshold_bytes` is the shortest run from which on the copy engines are at most 5 % behind the
    better kernel; None if there is none.
    """
    found: Figures = {}
    for is_gather in (True, False):
        rows: dict[int, Figures] = {}
        for at, run in enumerate(rig.sizes.sweep_bytes):
            left = len(rig.sizes.sweep_bytes) * (1 + is_gather) - at
            try:
                rows[run] = _swept(rig, run, is_gather, box.part(left))
            except OutOfTime as error:
                rows[run] = {"not measured": str(error)}
        direction = "d2h" if is_gather else "h2d"
        found[direction] = {str(run): row for run, row in rows.items()}
        found[f"{direction}_threshold_bytes"] = _threshold(rows)
    return found


def _swept(rig: Rig, run: int, is_gather: bool, box: TimeBox) -> Figures:
    layers = 4
    pages = max(2, rig.sizes.sweep_total_bytes // (2 * layers * run))
    with Rig(rig.device, rig.sizes) as own:
        shape = Shape(layers, pages * 3 // 2, tokens=1, heads=1, run_bytes=run)
        kv = PagedOnDevice(own, "separate", shape, page_count=pages)
        works = {"plain": plain(own, "d2h" if is_gather else "h2d", kv.nbytes)}
        ways = [Way("dma")]
        if rig.device.kernels:
            ways += [Way("staged"), Way("direct")]
        found: Figures = {}
        for way in sound(kv, is_gather, ways, found, samples=4):
            works[str(way)] = _mover(kv, is_gather, way)
        count = min(CALLS_MAX, kv.nbytes // run)
        works["a call each"] = _calls(own, run, count, is_gather)
        times = take_turns(works, max(3, rig.sizes.rounds // 2), box)
        times["a call each"] *= kv.nbytes / (count * run)
        return found | {name: rate(kv.nbytes, seconds) for name, seconds in times.items()}


def _calls(rig: Rig, run: int, count: int, is_gather: bool) -> Work:
    """Wall seconds of so many copies, each by a call of its own."""
    host, memory = rig.host(count * run), rig.memory(count * run)

    targets, sources = (host, memory) if is_gather else (memory, host)
    return lambda turn: wall_s(
        lambda: [
            copy_bytes(rig.device, targets + i * run, sources + i * run, run) for i in range(count)
        ]
    )


def _threshold(rows: Mapping[int, Figures]) -> int | None:
    threshold = None
    for run in sorted(rows, reverse=True):
        kernels = [rows[run][path] for path in ("staged", "direct") if path in rows[run]]
        if "dma" not in rows[run] or not kernels or rows[run]["dma"] < 0.95 * max(kernels):
            break
        threshold = run
    return threshold


def _mover(kv: PagedOnDevice, is_gather: bool, way: Way) -> Work:
    return lambda turn: device_s(kv.copy(is_gather, way, turn))


def _page_count(rig: Rig, shape: Shape, is_small: bool) -> int:
    """So many pages that the copy engines' descriptors stay within bounds."""
    usual = max(1, shape.pages * 2 // 3)
    pieces_of_page = 2 * shape.layers if is_small else 1
    return min(usual, max(1, 4 * rig.sizes.pieces_max // pieces_of_page))


def _compared(kv: PagedOnDevice, times: dict[str, float]) -> Figures:
    """The best of all ways, and its ratio to the plain copy."""
    plain_s = times.pop("plain")
    if not times:
        raise AssertionError("no way copies right")
    best = min(times, key=lambda name: times[name])
    return {
        "run_bytes": kv.run_bytes,
        "nbytes": kv.nbytes,
        "plain_gb_s": rate(kv.nbytes, plain_s),
        "best": best,
        "best_gb_s": rate(kv.nbytes, times[best]),
        "ratio": round(plain_s / times[best], 4),
        "gb_s": {name: rate(kv.nbytes, seconds) for name, seconds in times.items()},
    }
