"""The RoPE shift in numpy, after the words of `csrc/cuda/rope_args.h`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from reference_elements import Floats


def shift(k: Floats, units: Floats, is_neox: bool) -> Floats:
    """`k` [..., element] rotated by `units` [..., pair, 2] of cosine and sine; not rounded yet."""
    pairs = units.shape[-2]
    cosine, sine = units[..., 0], units[..., 1]
    first: npt.NDArray[np.intp] = np.arange(pairs) if is_neox else np.arange(pairs) * 2
    second = first + (pairs if is_neox else 1)
    out = k.copy()
    x, y = k[..., first], k[..., second]
    with np.errstate(invalid="ignore", over="ignore"):
        out[..., first] = x * cosine - y * sine
        out[..., second] = y * cosine + x * sine
    return out
