"""What is slow to import or to compile, once for all ranks: the fork server of ``ranks.py`` imports it in a whole run.

It starts no thread, for a fork would lose it.  A run of few tests does without: their ranks import what they need.
"""

from __future__ import annotations

import importlib
from contextlib import suppress

import torch

from offload import kernels
from offload.kernels.loops import adam_loop, sgd_loop

LIBRARIES = ("peft", "torch_geometric.nn", "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama")
for name in LIBRARIES:
    # What a library lacks is for the tests that need it to say.
    with suppress(Exception):
        importlib.import_module(name)
if kernels.available() is None:
    # The forms of the tests' own optimizers: AdamW, and SGD with momentum, its first step and the later ones.
    for copy in (None, torch.bfloat16, torch.float16):
        adam_loop(torch.float32, torch.float32, copy, coupled=False, light=True)
    for first in (True, False):
        sgd_loop(torch.float32, torch.float32, None, coupled=False, buffered=True, first=first, nesterov=False)
