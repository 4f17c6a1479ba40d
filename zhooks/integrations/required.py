"""The libraries that an integration needs: their versions are checked before they are imported."""

from __future__ import annotations

import re
from importlib import metadata

from offload.errors import CapabilityError


def require(integration: str, library: str, oldest: tuple[int, int]) -> None:
    """Raise unless ``library`` is installed in a version that the integration was written for.

    Raises:
        CapabilityError: it is not installed, or is older than ``oldest``.
    """
    try:
        found = metadata.version(library)
    except metadata.PackageNotFoundError:
        found = ""
    if not found or tuple(map(int, re.findall(r"\d+", found)[:2])) < oldest:
        raise CapabilityError(
            f"zhooks.integrations.{integration} needs {library} >= {'.'.join(map(str, oldest))}, found {found or 'none'}. "
            f"Run `pip install 'zhooks[{integration}]'` (in a checkout: '.[{integration}]')."
        )
