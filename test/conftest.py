"""All of the suite is one process: what its test files have imported, and the trees of sources that they keep, stays."""

import atexit
import gc

atexit.register(gc.unfreeze)  # Or libraries would report what is still there at the end.


def pytest_collection_finish() -> None:
    """Later collections of garbage need not look at any of it: many tests collect, and each took two seconds."""
    gc.freeze()
