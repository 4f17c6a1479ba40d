"""Several hosts on one machine: each has network, hostname, processes, /dev/shm and /etc/hosts of its own; a bridge joins them.

Tests run ranks there, take a host's link down and up, and kill hosts.  It needs root and Linux namespaces: ``unavailable`` says
what is missing.  Nothing has a name outside: every namespace lives in a process that ends with the test's, however that ends.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from tests.support.parent import end_with_parent
from tests.support.ranks import forks
from tests.support.waiting import soon

NAMESPACES = ("net", "uts", "ipc", "mnt", "pid")
_TOOLS = ("bash", "ip", "mount", "nsenter", "unshare")
_SWITCH = "ip link add br0 type bridge && ip link set br0 up && echo ready && read -r"
# Process 1 of a host: its processes end with it, and it ends when the test closes its standard input.
_HOST = """
read -r pid rest < /proc/self/stat
mount -t proc proc /proc && mount -t tmpfs -o size=256m tmpfs /dev/shm && mount --bind {names} /etc/hosts &&
echo {name} > /proc/sys/kernel/hostname && ip link set lo up && echo $pid && read -r
"""


@cache
def unavailable() -> str:
    """Why there can be no hosts here; "" where there can."""
    if sys.platform != "linux" or os.geteuid():
        return "several hosts on one machine need root on Linux"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"several hosts on one machine need {', '.join(missing)}"
    try:
        with Hosts(1):
            return ""
    except (OSError, RuntimeError, subprocess.CalledProcessError) as error:
        return f"this machine allows no namespaces: {error}"


class Host:
    """One of them: its processes see no others."""

    def __init__(self, number: int, names: Path, switch: int) -> None:
        self.number, self.name, self.address = number, f"host{number}", f"10.77.0.{number + 1}"
        self._switch, self._programs = switch, list[subprocess.Popen[bytes]]()
        kinds = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--propagation", "private")
        self._holder, said = _hold([*kinds], _HOST.format(names=shlex.quote(str(names)), name=self.name))
        #: Its process 1, as the test sees it.
        self.pid = int(said)
        # The host's end of the cable is made where it belongs; nothing is ever in the machine's own network.
        self._on_switch("link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid))
        self._on_switch("link", "set", self._port, "master", "br0", "up")
        self._inside("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self._inside("ip", "link", "set", "eth0", "up")

    @property
    def _port(self) -> str:
        return f"p{self.number}"

    def link(self, state: str) -> None:
        """Take the cable "down" or "up", at the switch's end: no connection is closed by that."""
        self._on_switch("link", "set", self._port, state)

    def kill(self) -> None:
        """End the host and all that runs there, at once."""
        os.kill(self.pid, signal.SIGKILL)
        self._holder.wait()

    def start(self, words: Sequence[str], output: Path, environment: Mapping[str, str]) -> None:
        """Start a program, which writes into ``output``; it ends with the host."""
        with output.open("wb") as out:
            command = [*self._enter(), *words]
            self._programs.append(
                subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
            )

    def fork(self, target: Callable[..., None], *args: Any) -> Running:
        """Start ``target`` in a process that has torch imported already, which an interpreter takes seconds for."""
        return Running(self, target, args)

    def close(self) -> None:
        """End it, if it has not ended."""
        if self._holder.poll() is None:
            self.kill()
        for program in self._programs:
            program.wait()
        for pipe in (self._holder.stdin, self._holder.stdout):
            if pipe is not None:
                pipe.close()

    def _enter(self) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--"]

    def _inside(self, *words: str) -> None:
        _run([*self._enter(), *words])

    def _on_switch(self, *words: str) -> None:
        _run(["nsenter", "-t", str(self._switch), "--net", "--", "ip", *words])


class Running:
    """A process of a host.

    Attributes:
        pid: its number, as the test sees it.
    """

    def __init__(self, host: Host, target: Callable[..., None], args: Sequence[Any]) -> None:
        ours, theirs = forks().Pipe(duplex=False)
        self._outside: BaseProcess = forks().Process(target=_serve, args=(host.pid, theirs, target, args), daemon=False)
        self._outside.start()
        theirs.close()
        with ours:
            assert ours.poll(60), f"nothing starts on {host.name}"
            self.pid: int = ours.recv()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def ended(self, within_s: float) -> bool:
        """Whether it has ended in that time."""
        self._outside.join(within_s)
        return self._outside.exitcode is not None


class Hosts:
    """``count`` hosts, for the block of a ``with``."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._closing: list[Callable[[], None]] = []
        self.each: list[Host] = []

    def __getitem__(self, number: int) -> Host:
        return self.each[number]

    def __enter__(self) -> Hosts:
        import tempfile

        names = Path(tempfile.mkdtemp(prefix="hosts-")) / "hosts"
        self._closing.append(lambda: shutil.rmtree(names.parent))
        known = [f"10.77.0.{number + 1} host{number}\n" for number in range(self._count)]
        names.write_text("127.0.0.1 localhost\n" + "".join(known), encoding="ascii")
        try:
            switch, _ = _hold(["--net"], _SWITCH)
            self._closing.append(lambda: _end(switch))
            for number in range(self._count):
                self.each.append(Host(number, names, switch.pid))
                self._closing.append(self.each[-1].close)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End them all."""
        while self._closing:
            self._closing.pop()()


def _hold(kinds: Sequence[str], script: str) -> tuple[subprocess.Popen[bytes], str]:
    """A process with namespaces of its own, which ends with this one, and what it says once they are ready."""
    pipe = subprocess.PIPE
    held = subprocess.Popen(["unshare", *kinds, "bash", "-c", script], stdin=pipe, stdout=pipe, stderr=pipe)
    assert held.stdout is not None and held.stderr is not None
    said = held.stdout.readline().decode().strip()
    if not said:
        why = held.stderr.read().decode().strip()
        _end(held)
        raise RuntimeError(why)
    held.stderr.close()
    return held, said


def _end(held: subprocess.Popen[bytes]) -> None:
    held.kill()
    held.wait()
    for pipe in (held.stdin, held.stdout, held.stderr):
        if pipe is not None:
            pipe.close()


def _run(words: Sequence[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(words)}: {done.stderr.strip()}")


# ---- the side of a fork


def _serve(host: int, pipe: Connection, target: Callable[..., None], args: Sequence[Any]) -> None:
    """Enter the host, and run ``target`` in a child, for a process keeps the space of process numbers that it began in."""
    end_with_parent()
    setns = ctypes.CDLL(None, use_errno=True).setns
    spaces = [os.open(f"/proc/{host}/ns/{kind}", os.O_RDONLY) for kind in NAMESPACES]
    for space in spaces:
        if setns(space, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(space)
    child = os.fork()
    if child == 0:
        pipe.close()
        _become(target, args)
    pipe.send(child)
    pipe.close()
    _, status = os.waitpid(child, 0)
    os._exit(0 if status == 0 else 1)


def _become(target: Callable[..., None], args: Sequence[Any]) -> NoReturn:
    code = 1
    try:
        target(*args)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def written(path: Path, within_s: float) -> str:
    """What a rank has written there, as soon as it has; "" if it does not."""
    return path.read_text(encoding="utf-8") if soon(path.exists, within_s) else ""
