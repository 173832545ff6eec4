"""Implementations of kvtier's backends, one module each; loaded by name, never imported by the core."""

if (
    __name__ != "kvtier.backends"
):  # reached as a bare top-level folder: a second copy of every class
    raise ImportError("import kvtier.backends, not backends")
