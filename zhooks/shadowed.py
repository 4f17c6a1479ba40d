"""Whether ``offload`` is the package that is installed with this one, and not a script of the user's with the same name.

``zhooks/__init__.py`` imports this before anything else, as importing such a script would run it a second time.
"""

from importlib.util import find_spec
from pathlib import Path


def _check() -> None:
    spec = find_spec("offload")
    found = None if spec is None else spec.origin
    if found is not None and not (Path(found).parent / "policy").is_dir():
        raise ImportError(
            f"zhooks expected its package offload, found {found}, which has the same name and comes first on sys.path. "
            "Rename yours.",
            name="offload",
            path=found,
        )


_check()
