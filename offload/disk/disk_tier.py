"""The disk tier: extents of one preallocated scratch file, written and read by several threads at once, checksums verified.

``store/store.py`` allocates an extent a block and starts transfers; the errors of the threads surface where their ``Request``
is waited for.  Nothing of the file outlives its process.

Note: [One after the other]
    A request that overlaps one under way on the same extent, unless both read, starts after it: the call waits.  So does
    ``free``, or the next owner of the range would be overwritten.

Note: [Kept for a reader]
    Who saves keeps extents as they are (``keep``) and reads them while training goes on.  Nothing is written there any more:
    ``renew`` gives the block another extent for its next values, and the kept one is free once its reader has closed it.
    Where the file has no space for both, the writer waits for readers, who wait for nobody.
"""

from __future__ import annotations

import errno
import os
import resource
import threading
import weakref
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from offload.budget import cannot_admit
from offload.disk.extent import CHECK, Extent, ExtentFile, Kept, Request, Verb, taken_by
from offload.disk.scratch import ScratchFile, SystemIo, open_scratch, remove_stale, trouble
from offload.errors import BudgetError, TierError
from offload.events import Bus
from offload.pages import ALIGN
from offload.text import as_size
from offload.threads import Workers
from offload.tier import Tier

__all__ = ["ALIGN", "CHECK", "DiskFile", "Extent", "Request"]

#: The file grows by at least so much, where limit and disk allow it.
STEP = 64 << 20

#: What says that there is no space: the disk, a quota, the system's limit on the size of files.
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class DiskFile(ExtentFile):
    """The scratch file of one process; any thread may call, until ``close``.

    Args:
        folder: where the file lies; created where it is missing.  Stale files of dead processes there are removed.
        label: in the file's name, say the rank.
        limit: bytes the file may hold, the gaps between extents included; its first page, and what extents lose by starting on
            pages of their own, come on top.  None is all that the disk has.  It may be changed.
        threads: requests that the system gets at once.  Sixteen of 4 MiB were as fast as any split that was measured
            (`benchmarks/disk.py --settings`), and kept the disk busiest where the cores were busy with other work.
        block: bytes of such a request at most, rounded up to whole CHECKs.
        io: the seam to the system's calls.
        bus: hears spans "disk read" and "disk write", and instants "disk buffered" and "disk stale" (a file removed).

    Attributes:
        path: the file; its owner alone may read it.
        direct: transfers pass the page cache by; False where the file system cannot do that.
    Raises:
        PolicyError: the folder cannot be used.  TierError: its file system fails.  CapabilityError: the system does not allow
            so many threads; no file is left.
    """

    def __init__(
        self,
        folder: Path,
        *,
        label: str = "r0",
        limit: int | None = None,
        threads: int = 16,
        block: int = 4 << 20,
        io: SystemIo | None = None,
        bus: Bus | None = None,
    ) -> None:
        assert threads > 0 and block > 0 and "/" not in label, f"{threads} threads, blocks of {block}, label {label}"
        self._bus = Bus() if bus is None else bus
        stale = remove_stale(folder)
        self._file = open_scratch(folder, label, SystemIo() if io is None else io)
        super().__init__(self._file.path, limit, self._file.size)
        self.direct = self._file.direct
        self._threads, self._block = threads, -(-block // CHECK) * CHECK
        self._mover = self._file.mover(self._block)
        self._extents: set[Extent] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._workers = Workers("zhooks-disk", threads)
        # Neither of the two knows this object: a file that nobody refers to goes too, at the latest at exit.
        self._discard = weakref.finalize(self, _discard, self._file, self._workers)
        try:
            self._workers.start()
        except BaseException:
            self._closed = True
            self._discard()
            raise
        for path, nbytes in stale:
            self._bus.instant("disk stale", str(path), nbytes)
        if not self.direct:
            self._bus.instant("disk buffered", str(self.path))

    @property
    def holes(self) -> list[tuple[int, int]]:
        """The free ranges of the file as (offset, nbytes), by offset; none touches another."""
        with self._lock:
            return self._space.holes()

    # Ranges.

    def allocate(self, nbytes: int, key: str) -> Extent:
        """A range for a block; it holds nothing yet.

        Raises:
            BudgetError: the limit or the disk does not hold it.  TierError: the file system fails, or the file is closed.
        """
        assert nbytes >= 0, f"{key}: {nbytes} bytes"
        self._check_process(key)
        while True:
            try:
                return self._allocate(nbytes, key)
            except BudgetError:
                with self._lock:
                    reader = next((extent.kept[0] for extent in self._extents if extent.outgrown and extent.kept), None)
                if reader is None:
                    raise
            reader.join()

    def _allocate(self, nbytes: int, key: str) -> Extent:
        with self._lock:
            self._check_open(key)
            extent = self._take(nbytes, key)
            if extent is None:
                self._grow(self._space.lacking(taken_by(nbytes)), nbytes, key)
                extent = self._take(nbytes, key)
            assert extent is not None
            self._extents.add(extent)
            return extent

    def free(self, extent: Extent) -> None:
        """Give the range back once what is under way there has ended; nothing once the file is closed."""
        self._check_process("a freed block")
        while True:
            with self._lock:
                if self._closed:
                    return
                self._check_own(extent)
                if extent.kept:
                    extent.outgrown = True
                    return
                if not extent.flying:
                    self._extents.remove(extent)
                    self._give(extent)
                    return
                before = extent.flying[0]
            before.join()

    def keep(self, extent: Extent, key: str) -> Kept:
        """What the extent holds, for a reader on any thread until it is closed; see Note [Kept for a reader]."""
        self._check_process(key)
        kept = Kept(extent, lambda into, offset: self.read(extent, into, offset, key), self._let_go)
        with self._lock:
            self._check_open(key)
            self._check_own(extent)
            extent.kept.append(kept)
        return kept

    def renew(self, extent: Extent, key: str) -> Extent:
        """Where the next values of the block that ``extent`` is of are to be written: there, or elsewhere while it is kept.

        Raises:
            TierError: as ``allocate``; the extent stays the block's.
        """
        with self._lock:
            self._check_own(extent)
            readers = list(extent.kept)
        if not readers:
            return extent
        try:
            new = self._allocate(extent.nbytes, key)
        except BudgetError:
            for reader in readers:
                reader.join()
            return extent
        self.free(extent)
        return new

    def _let_go(self, kept: Kept) -> None:
        with self._lock:
            if self._closed:
                return
            extent = kept.extent
            self._check_own(extent)
            extent.kept.remove(kept)
            over = not extent.kept and extent.outgrown
        if over:
            self.free(extent)

    def _grow(self, lacking: int, nbytes: int, key: str) -> None:
        """Make the file longer by ``lacking`` bytes, and by more where that costs nobody anything."""
        within = None
        if self.limit is not None:
            within = self.limit + self.rounded + taken_by(nbytes) - nbytes - self.reserved
            if lacking > within:
                used = self.used - self.rounded
                raise cannot_admit(Tier.DISK, key, nbytes, used=used, limit=self.limit, note=f"on {self.path}")
        refused: OSError | None = None
        try:
            free, kept = self._file.free_nbytes()
            # Ahead of need it takes of what is free at most half, or a step here would be a full disk there.
            most = min(STEP, free // 2 if within is None else min(free // 2, within)) // ALIGN * ALIGN
            for step in sorted({max(lacking, most), lacking}, reverse=True):
                if lacking > free:
                    break
                try:
                    self._file.grow(step)
                except OSError as error:
                    if error.errno not in _FULL:
                        raise
                    refused = error
                else:
                    self._space.extend(step)
                    return
        except OSError as error:
            raise TierError(f"disk tier cannot hold {key} ({as_size(nbytes)}): {self.path}: {trouble(error)}") from error
        subject = f"disk tier cannot admit {key} ({as_size(nbytes)}): {as_size(self.used)} in use on {self.path}"
        if refused is not None and refused.errno == errno.EFBIG:
            size = self._space.end
            raise BudgetError(
                f"{subject}. Expected a file of {as_size(size + lacking)} to be allowed, found {_largest_file(size)}; raise "
                "that, choose another [disk] path, or run on more ranks"
            ) from refused
        left = f"has {as_size(free)} left, not counting {as_size(kept)} kept free for checkpoints and other files"
        raise BudgetError(f"{subject}, whose file system {left}; free space there or choose another [disk] path")

    # Transfers.

    def write(self, extent: Extent, source: Tensor, offset: int = 0, key: str = "") -> Request:
        """Start writing ``source`` at ``offset`` of the extent.

        Args:
            source: uint8 [n] on the CPU, contiguous; kept alive, and not to be changed, until the transfer is over.  From
                where it lies if that is page aligned, else through a bounce buffer.
            offset: a multiple of CHECK; n is one too, unless it reaches the extent's end.
            key: what events and errors call it; where empty, the key it was allocated for.
        Raises:
            TierError: the file is closed, or belongs to the process that this one was forked from.
        """
        return self._start(Verb.WRITE, extent, source, offset, key)

    def read(self, extent: Extent, into: Tensor, offset: int = 0, key: str = "") -> Request:
        """Start filling ``into`` from ``offset`` of the extent, verified before ``wait`` returns; arguments as in ``write``.

        The version of ``into`` counts up before this returns; its bytes are undefined until the end, and after an error.
        """
        request = self._start(Verb.READ, extent, into, offset, key)
        if not into.is_inference():
            # Autograd must see a write although the system makes it behind its back.
            torch.autograd.graph.increment_version(into)
        return request

    def _start(self, verb: Verb, extent: Extent, tensor: Tensor, offset: int, key: str) -> Request:
        stop = offset + tensor.numel()
        here = tensor.device.type == "cpu"
        plain = here and tensor.dtype is torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous()
        assert plain, f"Cannot store {key}. Expected contiguous bytes on the CPU, found {tensor.dtype} {tuple(tensor.shape)}"
        whole = offset % CHECK == 0 and (stop % CHECK == 0 or stop == extent.nbytes) and 0 <= offset <= stop <= extent.nbytes
        assert whole, f"{key}: bytes {offset} to {stop} are not whole CHECKs of {extent}"
        request = Request(verb, key, offset, tensor.numpy())
        self._enter(request, extent)
        if not request.nbytes:
            request.end()
            return request
        step = min(self._block, _whole_checks(-(-request.nbytes // self._threads)))
        try:
            self._bus.begin(f"disk {verb.value}", request.key, request.nbytes)
        finally:
            # What was entered is submitted, whatever an observer does: the next in line waits for it.
            for start in range(0, request.nbytes, step):
                self._workers.submit(partial(self._run, extent, request, start, min(start + step, request.nbytes)))
        return request

    def _enter(self, request: Request, extent: Extent) -> None:
        """Put the request in its extent's list, once nothing there is in its way."""
        self._check_process(request.key)
        while True:
            with self._lock:
                self._check_open(request.key)
                self._check_own(extent)
                before = next((other for other in extent.flying if other.excludes(request)), None)
                if before is None:
                    request.key = request.key or extent.key
                    if request.nbytes:
                        extent.flying.append(request)
                    if request.verb is Verb.WRITE:
                        extent.forget(request)
                    return
            before.join()

    def _run(self, extent: Extent, request: Request, start: int, stop: int) -> None:
        """Move one block, in a worker."""
        try:
            if request.error is None:
                extent.move(request, self._mover, start, stop)
        except BaseException as error:
            request.fail(error)
        with self._lock:
            request.left -= stop - start
            if request.left:
                return
            if request.error is not None and request.verb is Verb.WRITE:
                extent.forget(request)
            extent.flying.remove(request)
        try:
            self._bus.end(f"disk {request.verb.value}", request.key, request.nbytes)
        except BaseException as error:
            request.fail(error)
        finally:
            request.end()

    # The end.

    def close(self) -> None:
        """Wait for everything under way, close the file and remove it; nothing in a forked child, or if closed before."""
        if os.getpid() != self._file.pid:
            return
        with self._lock:
            self._closed = True
            flying = [request for extent in self._extents for request in extent.flying]
        for request in flying:
            request.join()
        self._discard()

    def _check_process(self, key: str) -> None:
        # Before the lock, which another thread may have held when this process was forked.
        if os.getpid() != self._file.pid:
            raise TierError(
                f"disk tier cannot serve {key}. Expected process {self._file.pid}, which opened {self.path}, found "
                f"{os.getpid()}; open another file there"
            )

    def _check_own(self, extent: Extent) -> None:
        assert extent in self._extents, f"{extent} was freed before, or is not of {self.path}"

    def _check_open(self, key: str) -> None:
        if self._closed:
            raise TierError(f"disk tier cannot serve {key}: {self.path} was closed; attach again")


def _discard(file: ScratchFile, workers: Workers) -> None:
    """End the threads and remove the file; a forked child has neither."""
    if os.getpid() == file.pid:
        workers.stop()
        file.remove()


def _largest_file(nbytes: int) -> str:
    """What does not let a file of ``nbytes`` grow, though the disk has space."""
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if soft == resource.RLIM_INFINITY:
        return f"the file system's limit on the size of one file (EFBIG at {as_size(nbytes)})"
    return f"this process's limit on the size of files, ulimit -f (RLIMIT_FSIZE): {as_size(soft)}"


def _whole_checks(nbytes: int) -> int:
    """``nbytes`` in whole CHECKs, at least one."""
    return max(CHECK, -(-nbytes // CHECK) * CHECK)
