"""What commands and ``zprof.open`` import: none that reads a run needs torch, and help not even numpy."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

from tests.support.zprof_snapshots import golden
from tests.support.zprof_traces import sample_rows, write_trace

CODE = """
import sys
sys.path.insert(0, ".")
import zprof
from zprof.cli import main
for words in sys.argv[1:]:
    if words == "open":
        assert zprof.open("run.zprof").peak().nbytes
    else:
        main(words.split(), standalone_mode=False)
    print("MODULES", *{name.partition(".")[0] for name in sys.modules})
"""
NEVER = {"torch", "numba", "zhooks"}
NOT_FOR_HELP = NEVER | {"numpy", "rich", "msgpack", "pydantic", "plotly", "tensorboard"}
#: Commands, and what each may not have brought in when it ends, the lightest first: one interpreter runs them all.
COMMANDS = {
    "check --help": NOT_FOR_HELP,
    "diff --help": NOT_FOR_HELP,
    "report --help": NOT_FOR_HELP,
    "export --help": NOT_FOR_HELP,
    "report run.zprof": NEVER | {"plotly", "pydantic"},
    "open": NEVER,
    "frag snapshot.pickle": NEVER,
    "policy check policy.toml": NEVER,
    "policy show --params 7B policy.toml": NEVER,
    "policy schema": NEVER,
    "policy convert policy.toml": NEVER,
    # TensorBoard's own reading would load TensorFlow where it is installed.
    "export run.zprof --format tensorboard": NEVER,
}


def test_a_command_imports_no_more_than_it_needs(tmp_path: Path) -> None:
    write_trace(tmp_path / "run.zprof", sample_rows(steps=2))
    (tmp_path / "snapshot.pickle").write_bytes(pickle.dumps({**golden(), "device_traces": []}))
    (tmp_path / "policy.toml").write_text("stage = 3\n")
    (tmp_path / "tensorflow.py").write_text("raise SystemError('loaded')")
    done = subprocess.run([sys.executable, "-c", CODE, *COMMANDS], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    imported = [set(line.split()[1:]) for line in done.stdout.splitlines() if line.startswith("MODULES ")]
    found = {words: now & never for (words, never), now in zip(COMMANDS.items(), imported, strict=True) if now & never}
    assert not found
