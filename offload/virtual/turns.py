"""Several machines in one process: a program for each, on a thread of its own, of which one runs at a time.

Stages of a pipeline are simulated by it.  A program runs until it needs what another one has not done yet, and goes on when
that has been done, so that a run is the same every time.  Who waits takes the time from
what it waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Generic, TypeVar

from offload.errors import SimulationError
from offload.virtual.machine import Machine, machines_on
from offload.virtual.memory import turn_to

__all__ = ["Turns"]

T = TypeVar("T")


class _Ended(BaseException):
    """Ends a program because another one has failed."""


class _Program(Generic[T]):
    def __init__(self, number: int, machine: Machine, run: Callable[[], T]) -> None:
        self.number, self.machine, self.run = number, machine, run
        self.turn = threading.Semaphore(0)
        #: What it waits for, and how it is called; None while nothing keeps it.
        self.ready: Callable[[], bool] | None = None
        self.what = ""
        self.over = False
        self.result: list[T] = []

    @property
    def can_run(self) -> bool:
        return not self.over and (self.ready is None or self.ready())


class Turns(Generic[T]):
    """Runs one program a machine.

    Args:
        programs: for each machine what it runs.
        begin: called with the number of the program whose turn it is, each time.
        name: what a program is called in errors, by its number.
    """

    def __init__(
        self, machines: Sequence[Machine], programs: Sequence[Callable[[], T]], begin: Callable[[int], None],
        name: Callable[[int], str],
    ) -> None:  # fmt: skip
        self._programs = [
            _Program(number, machine, run) for number, (machine, run) in enumerate(zip(machines, programs, strict=True))
        ]
        self._begin, self._name = begin, name
        self._error: BaseException | None = None
        self._threads: dict[int, int] = {}

    def run(self) -> list[T]:
        """What each returned; the first error of any."""
        threads = [threading.Thread(target=self._run, args=(program,), daemon=True) for program in self._programs]
        with machines_on():
            for thread in threads:
                thread.start()
            self._programs[0].turn.release()
            try:
                for thread in threads:
                    thread.join()
            except BaseException as error:
                # The program that runs ends when it next waits for another one.
                self._error = self._error or error
                for thread in threads:
                    thread.join()
                raise
        if self._error is not None:
            raise self._error
        return [program.result[0] for program in self._programs]

    @property
    def current(self) -> int:
        """The number of the program of this thread.

        Raises:
            SimulationError: it is no program's own thread: autograd's, which all programs share.
        """
        number = self._threads.get(threading.get_ident())
        if number is None:
            raise SimulationError(
                "simulate expected calls that wait for another pipeline stage outside of backward, found one inside, where "
                "autograd has one thread for all simulated stages. Start it before or after backward()."
            )
        return number

    def until(self, ready: Callable[[], bool], what: str) -> None:
        """Go on when ``ready`` says so; ``what`` it waits for is named where nobody can go on."""
        mine = self._programs[self.current]
        if ready():
            return
        mine.ready, mine.what = ready, what
        self._pass_on(mine)
        self._take(mine)
        mine.ready = None

    def _run(self, program: _Program[T]) -> None:
        self._threads[threading.get_ident()] = program.number
        try:
            with ExitStack() as stack:
                self._take(program)
                stack.enter_context(program.machine.thread_of_program())
                program.result.append(program.run())
        except _Ended:
            pass
        except BaseException as error:
            self._error = self._error or error
        finally:
            program.over = True
            self._pass_on(program)

    def _take(self, program: _Program[T]) -> None:
        program.turn.acquire()
        turn_to(program.machine)
        self._begin(program.number)
        if self._error is not None:
            raise _Ended
        if program.ready is not None and not program.ready():
            raise SimulationError(self._nobody())

    def _pass_on(self, after: _Program[T]) -> None:
        """The next that can run has its turn; where none can, the next that is not over, which says so."""
        count = len(self._programs)
        others = [self._programs[(after.number + step) % count] for step in range(1, count + 1)]
        left = [program for program in others if not program.over]
        # Of a run that failed each is woken to end.
        able = left if self._error is not None else [program for program in left if program.can_run]
        if left:
            (able or left)[0].turn.release()

    def _nobody(self) -> str:
        waits = "; ".join(f"{self._name(each.number)} waits for {each.what}" for each in self._programs if not each.over)
        ended = ", ".join(self._name(each.number) for each in self._programs if each.over)
        return (
            f"simulate expected each pipeline stage to get what it waits for, found that none can continue: {waits}"
            + (f"; {ended} ended" if ended else "")
            + ". Give every stage the same schedule, micro-batches and steps."
        )
