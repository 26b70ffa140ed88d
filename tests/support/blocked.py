"""Python processes in which some modules cannot be imported, as on a machine that lacks them."""

import os
from pathlib import Path

BLOCK = """
import sys

for name in {names!r}:
    sys.modules[name] = None
"""


def without(folder: Path, *modules: str) -> dict[str, str]:
    """An environment whose Python processes, and the processes that they start, lack modules.

    :param folder: takes the file that Python runs at each start.
    :param modules: with a package its submodules are gone.
    """
    (folder / "sitecustomize.py").write_text(BLOCK.format(names=modules), encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PYTHONPATH": path}
