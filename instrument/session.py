"""The life of one `enable()`: what begins, what is open and what ends, in which order.

`enable()` installs the hooks at once. The files start when this rank is known: at `enable()` if the process group
already exists, otherwise at its first communication. An error here is logged once and costs that part of the recording;
it never reaches the training loop.
"""

from __future__ import annotations

import hashlib
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from crossrank.instrument.config import Config
from crossrank.instrument.facts import Facts
from crossrank.instrument.hang import torch_recorder
from crossrank.instrument.hang.response import Hangs
from crossrank.instrument.hooks import dispatcher, exits, registry
from crossrank.instrument.identity.gpu import Gpu, RankGpu
from crossrank.instrument.identity.header import describe_rank
from crossrank.instrument.identity.process_groups import GroupTable
from crossrank.instrument.identity.topology import Topology, node_of_this_machine
from crossrank.instrument.log import log, once_per_job
from crossrank.instrument.record.descriptor import GroupState
from crossrank.instrument.record.iterations import Iterations
from crossrank.instrument.record.recorder import CallCounts, Recorder
from crossrank.instrument.script_errors import Failures
from crossrank.instrument.torch_private import has, require
from crossrank.instrument.unpatched import threading
from crossrank.instrument.write import nvtx_markers
from crossrank.instrument.write.comms_writer import CommsWriter
from crossrank.instrument.write.device_times import DeviceTimes
from crossrank.instrument.write.flight_dump import FlightDumps
from crossrank.instrument.write.rank_files import RankFiles
from crossrank.instrument.write.window import Windows
from crossrank.recording import ASKED, COMMS, SEEN, file_name

_PATIENCE = 1.0
"""Seconds that training waits for the folder of the recording, and so does the end of a process that dies."""
_PATIENCE_AT_END = 30.0


class Session:
    """One recording of one process, from `enable()` to `disable()`."""

    def __init__(self, config: Config) -> None:
        require("interception")
        self.facts = Facts(config=config)
        self.files: RankFiles | None = None
        self.writer: CommsWriter | None = None
        self._opening: CommsWriter | None = None
        """The writer whose folder is wanted."""
        self.finished = False
        self.failures = Failures()
        self.groups = GroupTable(self._on_new_group, timing=config.timing)
        self.gpu = RankGpu(self._on_late_gpu)
        self.nvtx = nvtx_markers.attach() if config.nvtx != "0" else None
        self.recorder: Recorder = dispatcher.make_recorder(self)
        self.hangs = Hangs(self)
        self.dumps = FlightDumps(self)
        self.windows = Windows(self)
        self.iterations = Iterations(self, self.windows.pass_edge)
        self.on_optimizer_step = self.iterations.on_optimizer_step
        self._recorder_check = torch_recorder.RecorderCheck(self.recorder)
        self._world: weakref.ref[dist.ProcessGroup] | None = None
        self._epoch = 0
        self._before = CallCounts()  # what was recorded in an earlier file of this session
        self._begin_lock = threading.RLock()
        self._window_may_open = False
        """Whether the first window opens if it is due."""
        self._close_once = threading.Lock()  # taken for good by the first to close

    @property
    def closing(self) -> bool:
        """Whether a thread has begun to close, or has done so. A signal handler may interrupt it at any moment."""
        return self._close_once.locked()

    def start(self) -> None:
        """Install everything. Raises `CrossrankError`, with nothing installed, where torch cannot be recorded."""
        exits.keep_texts(self.facts.config.exception_texts)
        if self.facts.config.flight or self.facts.config.timing:
            torch_recorder.switch_on()
        try:
            registry.install(self)
        except BaseException:
            self._end_recording()
            raise
        if dist.is_initialized():
            with self.failures.reported("the recording begins at the first communication"):
                self.begin()

    def first_call(self, group: dist.ProcessGroup) -> GroupState:
        """The state of a group that communicates for the first time; begins the files where that is due."""
        self.begin()
        state = self.groups.add(group)
        self._recorder_check.note_first_call(state.group.backend)
        return state

    def begin(self) -> None:
        """Begin the recording of the process group that exists now, unless it is begun."""
        with self._begin_lock:
            self.begin_files()
            if self._window_may_open:
                self._window_may_open = False
                self.windows.open_if_due()

    def begin_files(self) -> None:
        """Begin the files of the process group that exists now, unless they are begun. It may still be in the making:
        a window opens later."""
        with self._begin_lock:
            world = dist.group.WORLD if dist.is_initialized() else None
            if world is None or (self._world is not None and self._world() is world):
                return
            first = self._world is None
            rank, size = dist.get_rank(), dist.get_world_size()
            has_moved = (rank, size) != (self.facts.rank, self.facts.world_size)  # at first from nowhere
            if not first:
                self._epoch += 1
                if has_moved:
                    self.windows.close()
                    self._end_files("the process group was created again with another rank or size")
            # From here on the writer's thread takes in groups of this world, for the files that they belong to.
            self._world = weakref.ref(world)
            once_per_job.join(self._is_first_to_say if size > 1 and has("store") else None)
            self.gpu.begin()
            topology = self._begin_topology(rank, size)
            with self.failures.reported("the recording continues without files"):
                if has_moved:
                    self._begin_files(topology)
                elif self.writer is not None:
                    self.writer.follow(topology)
            with self.failures.reported("Nsight's report does not name this rank"):
                if self.nvtx is not None:
                    self.nvtx.mark_identity(rank, size)
            if has_moved:
                self.groups.announce_all()
            self.groups.add_all(world)
            if (writer := self.writer) is not None:  # None once its thread has found that the folder cannot be written
                writer.start()
                if writer.wait_until_open(_PATIENCE):
                    if self.files is not None:
                        self.files.announce()
                else:
                    log.warning(
                        "crossrank: %s takes more than %g s to open, because its file system is slow or another "
                        "process still writes files of this rank: calls are kept, but windows and dumps are not",
                        *(self.facts.config.directory, _PATIENCE),
                    )
            self._window_may_open |= first

    def close(self, reason: str = "disable", *, at_once: bool = False) -> None:
        """Finish every file and uninstall every hook. Does nothing the second time.

        In a process that dies, `at_once` or of a signal, the window comes last and has a limit: the reason is on disk
        by then.
        """
        if not self._close_once.acquire(blocking=False):
            return
        dies = at_once or reason not in ("disable", "exit")
        try:
            self._attempt("a verdict of a hang is kept", lambda: self._withdraw_verdict(reason))
            if dist.is_initialized() and self.writer is None:
                self._attempt("nothing was recorded", self.begin)
            self.recorder.active = False
            self._attempt("the end of a window is not recorded", self.windows.note_end if dies else self.windows.close)
            self._attempt("its files are unfinished", lambda: self._end_files(reason, dies=dies))
        finally:  # a handler of the script may raise in here
            self.finished = True
            self.recorder.active = False
            self._attempt("hang detection continues", self.hangs.stop)
            self._attempt("changes to torch and Python stay", lambda: registry.uninstall(self.failures))
            self._attempt("warnings may be missing", once_per_job.leave)

    def _withdraw_verdict(self, reason: str) -> None:
        """If the script ends well, what it waited for has come."""
        if reason in ("disable", "exit") and not exits.exceptions(reason):
            self.hangs.end_well()

    def _attempt(self, consequence: str, work: Callable[[], object]) -> None:
        """Do a part of the work on which no other part depends."""
        with self.failures.reported(consequence):
            work()

    def abandon(self) -> None:
        """In a forked child: stop recording, and leave the parent's files and signals to the parent."""
        self._end_recording()
        self.recorder.active = False
        self.hangs.abandon()
        once_per_job.forget()
        self.windows.abandon()
        if self.writer is not None:
            self.writer.abandon()
        registry.leave_to_parent()

    def _end_recording(self) -> None:
        """Leave nothing to close."""
        self._close_once.acquire(blocking=False)
        self.finished = True

    def current_world(self) -> dist.ProcessGroup | None:
        """The process group that is recorded, where it is there and the default one."""
        world = self._world() if self._world is not None and dist.is_initialized() else None
        return world if world is dist.group.WORLD else None

    def _begin_topology(self, rank: int, world_size: int) -> Topology:
        """From here on the facts are those of this rank."""
        config, earlier = self.facts.config, self.facts.topology
        if earlier is not None:
            earlier.stop()
        topology = Topology(rank, world_size, config.node or node_of_this_machine())
        self.facts = Facts(config=config, rank=rank, world_size=world_size, topology=topology)
        topology.start(self.store_of_world, self._epoch, self.gpu.nvlink_domain)
        return topology

    def store_of_world(self) -> dist.Store | None:
        """The store of the process group that is recorded, while that is the current one."""
        if self.current_world() is None or not has("store"):
            return None
        store: dist.Store = distributed_c10d._get_default_store()
        return store

    def _is_first_to_say(self, text: str) -> bool:
        """Whether no other rank of this recording has said a text."""
        store = self.store_of_world()
        folder = os.path.realpath(self.facts.config.directory)
        said = hashlib.sha256(f"{folder} {text}".encode(errors="replace")).hexdigest()
        return store is None or store.add(f"crossrank/said/{said}", 1) == 1

    def _begin_files(self, topology: Topology) -> None:
        self.recorder.take_spans(sys.maxsize)
        self.recorder.take(sys.maxsize)  # what was called while there was no file is of no file
        self._before = self.recorder.counts()
        self.groups.forget_destroyed()
        self.files = None
        self.windows.begin()
        facts = self.facts
        config, rank = facts.config, facts.rank

        def open_folder() -> Path | None:
            """The path of the comms file, in the folder of this rank; None where that cannot be written."""
            with self.failures.reported("the recording continues without files"):
                files = RankFiles(config.directory, rank, facts.world_size, is_wanted=lambda: self._opening is writer)
                if self._opening is writer:
                    self.files = files
                    self.recorder.answer_for_python(
                        files.recording / ASKED, files.path(file_name(SEEN, rank).removesuffix(".zst")), rank
                    )
                    return files.path(file_name(COMMS, rank))
                files.abandon()  # the recording has ended meanwhile
                return None
            if self._opening is writer:
                self.writer = None
            return None

        writer = self.writer = self._opening = CommsWriter(
            open_folder,
            topology=topology,
            recorder=self.recorder,
            ring_capacity=config.ring,
            header=describe_rank(
                facts,
                node=topology.node,
                gpu=self.gpu.gpu,
                recorder=self.recorder.kernel,
                blind_spots=self.groups.unseen_kinds(),
            ),
            on_look=self._on_look,
            times=DeviceTimes(self.recorder.nccl_recorder) if config.timing else None,
        )
        self.hangs.watch()

    def _end_files(self, reason: str, *, dies: bool = False) -> None:
        """Finish the files: the dump, the comms file, then the windows."""
        self.gpu.read()
        is_open = True
        if (opening := self.writer) is not None:  # a call of training does not wait for long
            is_open = opening.wait_until_open(_PATIENCE_AT_END if self.closing and not dies else _PATIENCE)
        self._attempt("the flight recorder was not dumped", lambda: self.dumps.write(reason))
        writer, self.writer = self.writer, None
        if writer is not None:
            with self.failures.reported("the comms file was not closed"):
                end = {
                    "reason": reason,
                    "exceptions": exits.exceptions(reason),
                    "step": self.recorder.step,
                    "blind_spots": self.groups.unseen_kinds(),
                }
                writer.close(lambda: end | self._counts(writer), timeout=10.0 if is_open else _PATIENCE)
        self._opening = None
        self._attempt("questions are answered", lambda: self.recorder.answer_for_python(None, Path(), self.facts.rank))
        self._attempt("the files of a window are unfinished", lambda: self.windows.finish(dies=dies))
        if self.files is not None:
            self._attempt("its folder stays locked", self.files.close)
        if writer is not None:
            self._attempt("it is not known whether a window opened", self.windows.warn_if_none_opened)
        if (topology := self.facts.topology) is not None:
            # It is waited for, but not in a call of training, which has a new process group.
            self._attempt("the nodes of ranks are unknown", lambda: topology.stop(wait=self.closing))

    def _counts(self, writer: CommsWriter) -> dict[str, int]:
        """What became of the calls of the file that ends."""
        counts, now, before = writer.counts, self.recorder.counts(), self._before
        counts.calls = now.calls - before.calls
        counts.dropped = now.dropped - before.dropped
        counts.spans_dropped += now.spans_dropped - before.spans_dropped
        counts.errors += now.errors - before.errors
        found: dict[str, int] = msgspec.to_builtins(counts)
        return found

    def _on_look(self) -> None:
        """What is checked a few times a second, outside training's threads."""
        self.recorder.beat()
        self.gpu.read()
        if self.facts.config.flight:
            self._recorder_check.look()
        exits.restore_terminate_under_cuda()
        self.find_groups()

    def find_groups(self) -> None:
        """Take in every process group that torch knows."""
        if (world := self.current_world()) is not None:
            self.groups.add_all(world)

    def note_window(self, edge: dict[str, Any]) -> None:
        """A window begins or ends: for the comms file, and for Nsight Systems."""
        if (writer := self.writer) is not None:
            # A replay of the window computes with as many threads.
            writer.line("window", edge | {"threads": torch.get_num_threads()})
            counters = self.gpu.counters()
            if counters is not None:
                writer.line("counters", edge | counters)
        if self.nvtx is not None and edge["edge"] == "open":
            # nsys may capture windows alone, and nothing of what was marked before.
            self.nvtx.mark_identity(self.facts.rank, self.facts.world_size)
            for group in self.groups.describe():
                self.nvtx.mark_group(group)

    def _on_late_gpu(self, gpu: Gpu) -> None:
        if (writer := self.writer) is not None:
            writer.line("gpu", asdict(gpu))

    def _on_new_group(self, state: GroupState) -> None:
        writer, topology = self.writer, self.facts.topology
        group = state.group
        if writer is not None and topology is not None:
            writer.line("group", lambda: msgspec.structs.replace(group, locality=topology.locality(group.ranks)))
        self.windows.note_process_groups()
        if self.nvtx is not None:
            with self.failures.reported("a process group is missing in Nsight's report"):
                self.nvtx.mark_group(group)
