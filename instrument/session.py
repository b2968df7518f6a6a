"""The life of one `enable()`: owns the parts and wires them together.

`enable()` installs the kernels at once. The files begin when this rank is known, which is at `enable()` where
the process group exists already, and at its first communication otherwise. Whatever fails in here is logged
once and costs that part of the recording; it never reaches the training loop.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import msgspec
import orjson
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.optim.optimizer import register_optimizer_step_post_hook

import crossrank
from crossrank.comm import Group
from crossrank.errors import one_line
from crossrank.instrument.config import Config
from crossrank.instrument.hooks.backward import BackwardWatch
from crossrank.instrument.hooks.dispatcher import Interception
from crossrank.instrument.hooks.signals import ExitGuard
from crossrank.instrument.identity.gpu import Gpu, is_capturing
from crossrank.instrument.identity.header import describe_rank
from crossrank.instrument.identity.process_groups import GroupState, GroupTable
from crossrank.instrument.identity.rank_gpu import RankGpu
from crossrank.instrument.identity.topology import Topology, node_of_this_machine
from crossrank.instrument.record.recorder import Recorder
from crossrank.instrument.record.steps import StepBoundaries, first_parameter
from crossrank.instrument.script_errors import raised_by_script
from crossrank.instrument.torch_private import has, require
from crossrank.instrument.write.comms_writer import CommsWriter
from crossrank.instrument.write.dumps import FlightDumps
from crossrank.instrument.write.nvtx_markers import NvtxMarkers
from crossrank.instrument.write.rank_files import RankFiles
from crossrank.instrument.write.window import WindowRecorder, ends_on_any_thread
from crossrank.recording import COMMS, file_name

log = logging.getLogger("crossrank")

_WINDOW_PATIENCE = 10.0
"""Seconds that the end of a window may take in a process that dies: it waits for the GPU, which may be stuck."""
_FILES_PATIENCE = 60.0
"""Seconds that the end of a recording waits for the files of windows that are being compressed."""


class Session:
    """One recording of one process, from `enable()` to `disable()`."""

    def __init__(self, config: Config) -> None:
        require("interception")
        self.config = config
        self.rank = -1
        self.topology: Topology | None = None
        self.writer: CommsWriter | None = None
        self.groups = GroupTable(self._on_new_group)
        self.files: RankFiles | None = None
        self.gpu = RankGpu(self._on_late_gpu)
        self._world: weakref.ref[dist.ProcessGroup] | None = None
        self.world_size = 0
        self._epoch = 0
        self._calls_before = 0  # calls recorded in an earlier file of this session
        self._windows: WindowRecorder | None = None
        self._boundaries = StepBoundaries(self._warn_of_uneven_steps)
        self._backwards = BackwardWatch()
        self._explicit_steps = False
        self._warned_of_uneven_steps = False
        self._optimizer_hook: Any = None
        self._begin_lock = threading.RLock()
        self._close_once = threading.Lock()  # taken for good by the first to close
        self._dumps = FlightDumps(self)
        self._closed = False
        self._finished = False
        self._told: set[str] = set()
        nvtx = NvtxMarkers() if config.nvtx != "0" else None
        self._nvtx = nvtx if nvtx is not None and nvtx.attached else None
        self.recorder = Recorder(self, config.ring, self._nvtx)
        self._interception = Interception(self.recorder)
        self._guard = ExitGuard(
            finish=self.close,
            dump=lambda: self._dumps.write("SIGUSR1"),
            closing=lambda: self._closed,
            finished=lambda: self._finished,
        )

    def start(self) -> None:
        """Install everything. Raises `CrossrankError`, with nothing installed, where torch cannot be recorded."""
        self._interception.install()
        try:
            self._optimizer_hook = register_optimizer_step_post_hook(self._on_optimizer_step)
            self._guard.install(on_usr1=self.config.flight)
        except Exception:
            self._closed = self._finished = True
            self._take_away()
            raise
        with self.reported("every optimizer step counts as one after a backward pass"):
            self._backwards.install()
        if dist.is_initialized():
            with self.reported("the recording begins at the first communication"):
                self._begin()

    @property
    def active(self) -> bool:
        return not self._closed

    def exceptions(self, reason: str) -> list[dict[str, Any]]:
        """What ended the script, and threads of it, so far: see `ExitGuard.exceptions`."""
        return self._guard.exceptions(reason)

    def first_call(self, group: dist.ProcessGroup) -> GroupState:
        """The state of a group that communicates for the first time; begins the files where that is due."""
        self._begin()
        return self.groups.add(group)

    def step(self) -> None:
        """The training loop says that an iteration has ended. From now on only these calls count."""
        with self.reported("an iteration was not counted"):
            if not self._explicit_steps:
                self._explicit_steps = True
                self.recorder.step = 0  # whatever the optimizers' steps have come to in the first iteration
            self._advance()

    @contextlib.contextmanager
    def window(self) -> Iterator[None]:
        """Record ET and Kineto inside the block."""
        opened = False
        with self.reported("a window is missing"):
            self._begin()
            opened = self._open_window()
        try:
            yield
        finally:
            if opened:
                self._close_window()

    def close(self, reason: str = "disable") -> None:
        """Finish every file and take everything away. Does nothing the second time.

        In a process that dies the window comes last and has a limit: what tells why it dies is on disk by then.
        """
        if not self._close_once.acquire(blocking=False):
            return
        self._closed = True
        try:
            if dist.is_initialized() and self.writer is None:
                with self.reported("nothing was recorded"):
                    self._begin()
            self.recorder.active = False
            dies = reason not in ("disable", "exit")
            if dies:
                self._note_window_end()
            else:
                self._close_window()
            self._end_files(reason, _WINDOW_PATIENCE if dies else None)
        finally:  # a handler of the script may raise in here
            self._finished = True
            self._take_away()

    def _take_away(self) -> None:
        """Undo what `start` installed."""
        self.recorder.active = False
        self._dumps.stop_watching()
        self._interception.uninstall()
        if self._optimizer_hook is not None:
            self._optimizer_hook.remove()
        self._backwards.uninstall()
        self._guard.uninstall()

    def abandon(self) -> None:
        """In a forked child: be off, and leave the parent's files and signals to the parent."""
        self._close_once.acquire(blocking=False)
        self._closed = self._finished = True
        self._dumps.stop_watching()
        self.recorder.active = False
        self.recorder.window_open = False
        if self._windows is not None:
            self._windows.abandon()
        if self.writer is not None:
            self.writer.abandon()
        if self.files is not None:
            self.files.abandon()
        self._interception.abandon()
        self._backwards.uninstall()
        self._guard.abandon()

    # --- beginning and ending the files -------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin the files of the process group that exists now, unless they are begun."""
        with self._begin_lock:
            world = dist.group.WORLD if dist.is_initialized() else None
            if world is None or (self._world is not None and self._world() is world):
                return
            first = self._world is None
            self._world = weakref.ref(world)
            rank, size = dist.get_rank(), dist.get_world_size()
            same_place = (rank, size) == (self.rank, self.world_size)
            if not first:
                self._epoch += 1
                if not same_place:
                    self._close_window()
                    self._end_files("the process group was made again with another rank or size")
            self.rank, self.world_size = rank, size
            self.gpu.begin()
            self._begin_topology()
            with self.reported("the recording goes on without files"):
                if first or not same_place:
                    self._begin_files()
                elif self.writer is not None and self.topology is not None:
                    self.writer.follow(self.topology)
            with self.reported("Nsight's report does not tell this rank"):
                if self._nvtx is not None:
                    self._mark_identity(self._nvtx)
            self.groups.announce_all()
            self.groups.add_all()
            window = self.config.window
            if first and window is not None and window.holds(self.recorder.step):
                self._open_window()

    def _begin_topology(self) -> None:
        if self.topology is not None:
            self.topology.stop()
        node = self.config.node or node_of_this_machine()
        self.topology = Topology(self.rank, self.world_size, node, None)
        thread = threading.Thread(
            target=self.topology.exchange,
            args=(self._store_of_world, self._epoch, self.gpu.nvlink_domain),
            name="crossrank-topology",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError:  # Python 3.12 starts no thread once the interpreter shuts down
            self.topology.settled.set()

    def _store_of_world(self) -> dist.Store | None:
        """The store of the process group that is recorded, while that is the current one."""
        if not self.is_current_world() or not has("store"):
            return None
        store: dist.Store = distributed_c10d._get_default_store()
        return store

    def is_current_world(self) -> bool:
        """Whether the process group that is recorded is there and the default one."""
        return self._world is not None and dist.is_initialized() and self._world() is dist.group.WORLD

    def _on_tick(self) -> None:
        """What is looked for a few times a second, off training's threads."""
        self.gpu.read()
        self._guard.on_tick()
        # Groups that have not communicated, unless they are those of a new world: that begins first.
        if self.is_current_world():
            self.groups.add_all()

    def _on_late_gpu(self, gpu: Gpu) -> None:
        if self.writer is not None:
            self.writer.line("gpu", asdict(gpu))

    # --- the files ----------------------------------------------------------------------------------------

    def _begin_files(self) -> None:
        assert self.topology is not None
        self._calls_before = self.recorder.calls()
        self.files = RankFiles(self.config.directory, self.rank, self.world_size)
        self._windows = WindowRecorder(self.files, self.rank, self.config.nsys, self._nvtx)
        header = describe_rank(
            rank=self.rank,
            world_size=self.world_size,
            node=self.topology.node,
            gpu=self.gpu.gpu,
            config=self.config,
            ops=self._interception.ops,
            blind_spots=self.groups.unseen_kinds(),
        )
        self.writer = CommsWriter(
            str(self.files.path(file_name(COMMS, self.rank))),
            topology=self.topology,
            ring_capacity=self.config.ring,
            header=header,
            on_tick=self._on_tick,
        )
        self.writer.start()
        self._dumps.watch()

    def _end_files(self, reason: str, window_patience: float | None = None) -> None:
        """Finish the files: the dump, the comms file, then the windows, for which `window_patience` sets a limit."""
        self.gpu.read()
        self._dumps.write(reason)
        writer, self.writer = self.writer, None
        if writer is not None and self.files is not None:
            with self.reported("the comms file was not closed"):
                writer.counts.calls = self.recorder.calls() - self._calls_before
                end = {
                    "reason": reason,
                    "exceptions": self.exceptions(reason),
                    "step": self.recorder.step,
                    "blind_spots": self.groups.unseen_kinds(),
                }
                writer.close(lambda: end | msgspec.to_builtins(writer.counts))
        if window_patience is None or not ends_on_any_thread():
            self._finish_windows()
        elif self._windows is not None and not _ends_within(window_patience, self._finish_windows):
            log.warning(
                "crossrank: window %d is incomplete: the process dies, and its end took longer than %g s",
                self._windows.number,
                window_patience,
            )
        if self.files is not None:
            with self.reported("the folder of the recording stays locked"):
                self.files.close()
        if writer is not None:
            self._warn_of_unopened_window()
        if self.topology is not None:
            self.topology.stop()

    def _finish_windows(self) -> None:
        """End the window that is open, if any, and wait until the files of all windows are in place."""
        windows = self._windows
        if windows is None:
            return
        with self.reported("a window is incomplete"):
            windows.close()
        with self.reported("the files of a window are not in place"):
            windows.drop_prepared()
            windows.wait(timeout=_FILES_PATIENCE)

    def _warn_of_unopened_window(self) -> None:
        window = self.config.window
        if self.rank == 0 and window is not None and (self._windows is None or self._windows.number == 0):
            log.warning(
                "crossrank: the window %d:%d never opened: the recording ended in iteration %d",
                window.start,
                window.stop,
                self.recorder.step,
            )

    # --- groups -------------------------------------------------------------------------------------------

    def _on_new_group(self, state: GroupState) -> None:
        writer, topology = self.writer, self.topology
        group = state.describe()
        if writer is not None and topology is not None:
            writer.line("group", lambda: msgspec.structs.replace(group, locality=topology.locality(state.ranks)))
        if self.recorder.window_open and self._windows is not None:
            with self.reported("a process group is missing in the execution trace"):
                self._windows.note_process_groups()
        if self._nvtx is not None:
            with self.reported("a process group is missing in Nsight's report"):
                self._mark_group(self._nvtx, group)

    def _mark_group(self, nvtx: NvtxMarkers, group: Group) -> None:
        nvtx.mark(orjson.dumps({"group": group}, default=msgspec.to_builtins).decode())

    def _mark_identity(self, nvtx: NvtxMarkers) -> None:
        """Tell who this is inside the Nsight report, whatever its file is called."""
        identity = {"rank": self.rank, "world_size": self.world_size, "host": socket.gethostname()}
        nvtx.mark(orjson.dumps({"crossrank": crossrank.__version__} | identity).decode())

    # --- steps and windows --------------------------------------------------------------------------------

    def _on_optimizer_step(self, optimizer: torch.optim.Optimizer, _: Any, keywords: dict[str, Any]) -> None:
        if self._explicit_steps or self._closed:
            return
        with self.reported("an iteration was not counted"):
            parameter = first_parameter(optimizer.param_groups)
            ended = self._boundaries.count(optimizer, parameter, after_backward=self._backwards.began())
            for _iteration in range(ended):
                self._advance(keywords)

    def _warn_of_uneven_steps(self) -> None:
        if not self._warned_of_uneven_steps and self.rank <= 0:
            log.warning(
                "crossrank: one optimizer steps more often than another, each time after a backward pass; each step "
                "of the one that steps most is counted as an iteration: where that is wrong (several critic steps "
                "for one of the generator), call crossrank.step() at the end of every iteration"
            )
        self._warned_of_uneven_steps = True

    def _advance(self, keywords: dict[str, Any] | None = None) -> None:
        """An iteration ends. `keywords` are those of the optimizer's step that ended it, where it was one."""
        self._guard.on_step()
        ended = self.recorder.step
        self.recorder.step += 1
        if self.writer is not None:
            self.writer.line("step", {"step": self.recorder.step, "t": time.monotonic_ns()})
        if keywords is None:
            self._pass_edge(ended)
        elif self.config.window is not None or self.recorder.window_open:
            # torch calls its hooks within a range of the optimizer's, which no edge must cross. The dictionary dies
            # with the call of `step`, when that range has ended.
            keywords["crossrank"] = _AtDeath(functools.partial(self._pass_edge, ended))

    def _pass_edge(self, ended: int) -> None:
        """End the window that ends with iteration `ended`, and begin the one that begins with the next."""
        recorder, window, windows = self.recorder, self.config.window, self._windows
        # At an edge Kineto synchronises the GPU, which breaks a CUDA graph that is being captured: the edge waits for
        # the end of an iteration in which none is.
        if self._closed:
            return
        capturing = is_capturing()
        if window is not None and recorder.window_open and not window.continues(ended) and not capturing:
            self._close_window(ended)
        if recorder.window_open and windows is not None:
            with self.reported("iterations have no range in the traces"):
                windows.begin_step(recorder.step)
        elif window is None or capturing:
            return
        elif window.holds(recorder.step):
            self._begin()
            self._open_window()
        elif window.holds(recorder.step + 1) and windows is not None:
            with self.reported("Kineto was not warmed up"):
                windows.prepare()

    def _open_window(self) -> bool:
        windows = self._windows
        if windows is None:
            if not dist.is_initialized():
                log.warning("crossrank: a window needs a process group; call it after init_process_group")
            return False
        if windows.is_open:
            return False
        if is_capturing():
            log.warning("crossrank: no window opens while a CUDA graph is captured; open it before or after")
            return False
        with self.reported("a window is incomplete"):
            self.groups.add_all()
            self._note_window("open", windows.open(self.recorder.step))
        self.recorder.window_open = windows.is_open
        return windows.is_open

    def _close_window(self, step: int | None = None) -> None:
        windows = self._windows
        if windows is None or not windows.is_open:
            return
        self._note_window_end(step)
        with self.reported("a window is incomplete"):
            windows.close()
        if not self._closed:
            self._dumps.write("window")

    def _note_window_end(self, step: int | None = None) -> None:
        self.recorder.window_open = False
        if self._windows is not None and self._windows.is_open:
            with self.reported("the end of a window is not recorded"):
                self._note_window("close", self._windows.number, step)

    def _note_window(self, edge: str, number: int, step: int | None = None) -> None:
        step = self.recorder.step if step is None else step
        moment = {"window": number, "edge": edge, "step": step, "t": time.monotonic_ns()}
        if self.writer is not None:
            self.writer.line("window", moment)
            counters = self.gpu.counters()
            if counters is not None:
                self.writer.line("counters", moment | counters)
        if self._nvtx is not None and edge == "open":
            # nsys may capture windows alone, and nothing of what was marked before.
            self._mark_identity(self._nvtx)
            for group in self.groups.describe():
                self._mark_group(self._nvtx, group)

    @contextlib.contextmanager
    def reported(self, consequence: str) -> Iterator[None]:
        """Log a failure of the block once, with what it means for the recording, and go on."""
        try:
            yield
        except Exception as error:
            if raised_by_script(error):
                raise
            if consequence not in self._told:
                self._told.add(consequence)
                log.warning("crossrank: %s: %s", consequence, one_line(error))


def _ends_within(seconds: float, work: Callable[[], None]) -> bool:
    """Do `work` and tell whether it ended in time; if not, it is left alone."""
    thread = threading.Thread(target=work, name="crossrank-window", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # Python 3.12 starts no thread once the interpreter shuts down
        work()
        return True
    thread.join(seconds)
    return not thread.is_alive()


class _AtDeath:
    """Does `action` when the last reference to it goes."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action

    def __del__(self) -> None:
        try:
            self._action()
        except Exception as error:
            log.warning("crossrank: a window is incomplete: %s", one_line(error))
