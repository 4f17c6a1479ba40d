"""What the fork server of ``ranks.py`` imports first: it ends with the process that started it, in the middle of an import too.

Nothing else imports it. What follows is imported without the collector, which ``fork_ready.py`` switches on at the end.
"""

from __future__ import annotations

import gc

from tests.support.parent import end_with_parent

end_with_parent()
gc.disable()
