"""``python -m tests.cuda_api``: installs the CUDA build of torch, builds the stubs, and runs ``calls.py`` over them.

Exit codes: 0 where every check ran, 1 where one failed, 4 where something needed is missing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from tests.cuda_api.stubs import Missing, build

ROOT = Path(__file__).resolve().parents[2]


def cache() -> Path:
    """Where torch and the stubs lie: `$ZHOOKS_CUDA_API_CACHE`, or below the user's cache."""
    given = os.environ.get("ZHOOKS_CUDA_API_CACHE")
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "zhooks-cuda-api"


def interpreter(into: Path, torch: str) -> Path:
    """The python of an environment with this torch alone, without NVIDIA's libraries; all else is this environment's.

    Raises:
        Missing: pip has no such torch.
    """
    folder = into / f"venv-{sys.version_info[0]}.{sys.version_info[1]}-{torch.replace('=', '')}"
    python = folder / "bin" / "python"
    stamp = folder / "installed"
    if not stamp.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        command = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", torch]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            why = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
            raise Missing(f"pip cannot install {torch}: {(why or ['it did not say why'])[0]}")
        own = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
        (Path(own) / "zz-main.pth").write_text(sysconfig.get_path("purelib") + "\n")
        stamp.touch()
    return python


def torch_folder(python: Path) -> Path:
    """The folder of its torch, which cannot be imported without the stubs.

    Raises:
        Missing: it is not a CUDA build.
    """
    program = "import importlib.util; print(importlib.util.find_spec('torch').submodule_search_locations[0])"
    folder = Path(subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True).stdout.strip())
    if not (folder / "lib" / "libtorch_cuda.so").exists():
        raise Missing("pip installs a torch here that is not built for CUDA (no libtorch_cuda.so): name one by --torch")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.cuda_api", description="Call the CUDA API of torch over stubs.")
    parser.add_argument("--torch", default="torch==2.14.1", help="what pip installs (%(default)s)")
    parser.add_argument("words", nargs="*", help="run only checks whose name has one of these")
    asked = parser.parse_args()
    try:
        into = cache()
        into.mkdir(parents=True, exist_ok=True)
        python = interpreter(into, asked.torch)
        stubs = build(torch_folder(python) / "lib", into)
    except Missing as missing:
        print(f"cuda-api: {missing}", file=sys.stderr)
        sys.exit(4)
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(stubs),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tools")]),
        "OMP_NUM_THREADS": "1",
        # Each out of memory is a line of torch's on standard error, and is wanted here.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    ended = subprocess.run([str(python), "-m", "tests.cuda_api.calls", *asked.words], cwd=ROOT, env=environment).returncode
    if ended < 0:
        print(f"\nfailed: ended by signal {-ended}", file=sys.stderr)
    sys.exit(1 if ended else 0)


if __name__ == "__main__":
    main()
