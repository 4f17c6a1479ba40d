"""What the fork server of ``ranks.py`` imports first: it ends with the process that started it, in the middle of an import too.

Nothing else imports it.
"""

from __future__ import annotations

from tests.support.parent import end_with_parent

end_with_parent()
