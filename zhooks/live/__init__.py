"""Changes of a living model: another policy or mesh, and parameters that are frozen in mid-run."""

from __future__ import annotations

from zhooks.live.change import apply, follow_freezes, go_over

__all__ = ["apply", "follow_freezes", "go_over"]
