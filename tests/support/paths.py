"""Owns where this checkout lies, and what the processes that tests start are told so that they import from it.

`conftest.py` puts ``SEARCH_PATH`` into the environment once, for all of them; tests name files of the repository by ``ROOT``.
"""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: A value for PYTHONPATH: zhooks and offload, tests, and zprof.
SEARCH_PATH = os.pathsep.join([str(ROOT), str(ROOT / "tools")])
