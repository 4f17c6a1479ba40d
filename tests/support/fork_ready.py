"""What the fork server of ``ranks.py`` imports last: all that it holds is out of the collector's sight, in its forks too.

Nothing else imports it.  A fork would walk through half a million objects of libraries at every collection, and zhooks looks
through all objects at each attach; it would copy the pages that they lie on, too.
"""

from __future__ import annotations

import gc

gc.enable()
gc.collect()
gc.freeze()
