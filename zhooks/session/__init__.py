"""What is attached, as data: how it is opened, saved, loaded and closed, and what plugs into it."""

from __future__ import annotations

from zhooks.session.observe import Observation
from zhooks.session.open import abandon, close_session, open_session
from zhooks.session.plug_in import CHOOSERS, WATCHES, Chosen, Watch, needed
from zhooks.session.session import Session
from zhooks.session.state import (
    Given,
    finish_saving,
    load_full,
    load_run,
    name_run,
    run_to_load,
    run_to_save,
    save_run,
    take_full,
)
from zhooks.session.steps import admit_change, admit_layout, adopt_states, open_stepper

__all__ = [
    "CHOOSERS",
    "WATCHES",
    "Chosen",
    "Given",
    "Observation",
    "Session",
    "Watch",
    "abandon",
    "admit_change",
    "admit_layout",
    "adopt_states",
    "close_session",
    "finish_saving",
    "load_full",
    "load_run",
    "name_run",
    "needed",
    "open_session",
    "open_stepper",
    "run_to_load",
    "run_to_save",
    "save_run",
    "take_full",
]
