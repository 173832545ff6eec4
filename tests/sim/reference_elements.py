"""Elements of KV in numpy, bf16 included: how the kernels' numbers are written in memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvtier.backends.cuda_arguments import Element

Floats = npt.NDArray[np.float32]
Raw = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


def to_elements(values: Floats, element: Element) -> Raw:
    """Rounded to nearest, ties to even, as the bits that lie in memory."""
    values = np.ascontiguousarray(values, np.float32)
    if element is Element.FLOAT32:
        return values.view(np.uint32)
    with np.errstate(over="ignore"):
        if element is Element.FLOAT16:
            return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)


def to_floats(raw: Raw, element: Element) -> Floats:
    """The values, exactly."""
    if element is Element.FLOAT32:
        return raw.view(np.float32)
    if element is Element.FLOAT16:
        return raw.view(np.float16).astype(np.float32)
    return (raw.astype(np.uint32) << 16).view(np.float32)


def raw_type(element: Element) -> type[np.uint16 | np.uint32]:
    """The type of the bits."""
    return np.uint32 if element is Element.FLOAT32 else np.uint16


def same_but_nans(a: Raw, b: Raw, element: Element) -> bool:
    """Whether both are the same bits, where any NaN is as good as any other."""
    nans = np.isnan(to_floats(a, element))
    return bool(
        np.array_equal(nans, np.isnan(to_floats(b, element))) and np.array_equal(a[~nans], b[~nans])
    )
