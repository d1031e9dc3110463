"""Engines: other processes, here or on the machines of a cluster, that make the parts of a run.

A worker is handed a task, as plain values, and the numbers of parts one after the other; what it
needs, such as model and data, it builds by itself, once. That each row comes once is the doing of
the parts, not of an engine: one that is tried again goes on at its last commit, in its own file.
"""

import abc
import collections
import contextlib
import dataclasses
import importlib
import json
import logging
import math
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

from embedx.errors import (
    ConfigError,
    DependencyError,
    EmbedxError,
    Interrupted,
    LayerError,
    ShapeError,
    first_line,
    missing_extra,
    number_of,
    short,
)
from embedx.parts import Engine, Feed, Task
from embedx.threads import n_threads

log = logging.getLogger("embedx")

_POLL_S = 0.02
_STOP_S = 20.0  # a batch takes that long at most, or its worker is killed in it
_CONNECT_S = 10.0
_ANSWER_S = 30.0
_FAILED_MOST = 3  # parts without one that is made, after which no other is tried
_WORKERS_MOST = 16
# What another try would not change.
_FINAL = {kind.__name__: kind for kind in (ConfigError, ShapeError, LayerError, DependencyError)}


# --------------------------------------------------------------------------- config files


def local() -> None:
    """This process makes all rows, or the parts that are missing one after the other."""


def processes(
    *,
    workers: int | Literal["auto"] = "auto",
    threads: int | Literal["auto"] = "auto",
    tries: int = 3,
    silent_after_s: int | float = 600,
) -> "Pool":
    """Worker processes on this machine, one a GPU where there are several.

    Args:
        workers: How many; ``auto`` is one a GPU, else one a processor, at most 16.
        threads: Of each on the processors; ``auto`` shares them out.
        tries: How often a part is begun before it is given up.
        silent_after_s: Seconds without a new row after which a part is named in a log line, and
            again after twice as many; it is waited for all the same.

    Raises:
        ConfigError: A number is out of its range.
    """
    _require_positive(workers=workers, threads=threads, tries=tries)
    pool = _Processes(workers=workers, threads=threads, tries=tries)
    return pool.saying_silence(silent_after_s)


def ray(
    *,
    address: str | None = None,
    workers: int | Literal["auto"] = "auto",
    threads: int | Literal["auto"] = "auto",
    gpus: int | float | Literal["auto"] = "auto",
    tries: int = 3,
    silent_after_s: int | float = 600,
) -> "Pool":
    """Workers of a Ray cluster; data and outputs lie where all its machines see them by one path.

    Args:
        address: ``auto`` for the cluster that this machine is of, ``HOST:PORT`` for another; a
            cluster of this machine alone is started where not given.
        workers: How many; ``auto`` is as many as the cluster has room for.
        threads: Processors of each; ``auto`` is 1, or what there is for each GPU.
        gpus: GPUs of each, also a part of one; ``auto`` is 1 where the cluster has any.
        tries: How often a part is begun before it is given up.
        silent_after_s: Seconds without a new row after which a part is named in a log line, and
            again after twice as many; it is waited for all the same.

    Raises:
        ConfigError: A number is out of its range, or the address is none.
        DependencyError: Ray is not installed.
    """
    _require_positive(workers=workers, threads=threads, tries=tries)
    if gpus != "auto" and gpus < 0:
        raise ConfigError(f"engine.gpus must be at least 0, not {gpus}")
    if address not in (None, "auto"):
        _host_and_port(address)
    try:
        import ray as _  # noqa: F401
    except ImportError:
        raise missing_extra("ray", extra="ray", needed_for="engine=ray") from None
    pool = _Ray(address=address, workers=workers, threads=threads, gpus=gpus, tries=tries)
    return pool.saying_silence(silent_after_s)


def _require_positive(**given: int | str) -> None:
    for key, value in given.items():
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"engine.{key} must be at least 1, not {value}")


def _host_and_port(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 2**16) or "/" in host:
        raise ConfigError(
            f"engine.address must be auto or HOST:PORT, such as 10.0.0.1:6379, not {address!r}; "
            "start the command on a machine of the cluster"
        )
    return host, int(port)


# --------------------------------------------------------------------------- the driver


@dataclasses.dataclass(frozen=True)
class Answer:
    """How a part ended in a worker.

    Attributes:
        reason: Why it is not made; empty where it is.
        kind: The type of the error that says so; empty where there was none.
    """

    reason: str = ""
    kind: str = ""

    @property
    def error(self) -> EmbedxError | None:
        """What another try would not change; None of anything else."""
        return _FINAL[self.kind](self.reason) if self.kind in _FINAL else None

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}" if self.kind else self.reason


class Worker(abc.ABC):
    """A worker as its driver sees it: it makes one part at a time, and ends with the first that
    fails.

    Attributes:
        part: The one under way.
        name: Who it is, to find it: a process and its machine.
        heard: A descriptor that can be read when there is something to poll for; -1 for none.
    """

    part: int | None = None
    name: str = ""
    heard: int = -1

    def is_there(self) -> bool:
        """Whether it has a place to work in, so that a part does not wait with it."""
        return True

    @abc.abstractmethod
    def send(self, part: int) -> None:
        """Have a part made."""

    @abc.abstractmethod
    def poll(self) -> Answer | None:
        """How the part under way ended; None as long as it has not."""

    @abc.abstractmethod
    def ask_to_stop(self) -> None:
        """Let it end after the batch at hand."""

    @abc.abstractmethod
    def end(self, *, by: float) -> None:
        """Make sure that it is gone, at a time of the monotonic clock at the latest."""


class Pool(Engine):
    """Parts for workers, one at a time each; who falls is replaced, and its part tried again."""

    def __init__(self, *, tries: int) -> None:
        self._tries = tries
        self._about: dict[str, Any] = {}
        self._said: set[str] = set()

    def saying_silence(self, after_s: float) -> "Pool":
        """The same, with a limit of its own.

        Raises:
            ConfigError: It is no time.
        """
        if not after_s > 0:
            raise ConfigError(f"engine.silent_after_s must be more than 0 seconds, not {after_s}")
        self.silent_after_s = float(after_s)
        return self

    @abc.abstractmethod
    def _started(self) -> contextlib.AbstractContextManager[Callable[[int], Worker]]:
        """What starts a worker in a place, 0 to ``n_workers`` - 1, while the block lasts."""

    def run(
        self,
        parts: Sequence[int],
        *,
        about: dict[str, Any],
        ended: Callable[[int], None],
        tick: Callable[[Mapping[int, str]], None],
    ) -> dict[int, str]:
        made: list[int] = []

        def count(part: int) -> None:
            made.append(part)
            ended(part)

        failed = self._failed(parts, about=about, ended=count, tick=tick)
        answers = {str(answer): answer for answer, _ in failed.values()}
        if not made and len(answers) == 1:
            (answer,) = answers.values()
            if answer.error:
                raise answer.error
        return {
            part: f"{answer} (tried {number_of(n, 'time', 'times')})"
            for part, (answer, n) in failed.items()
        }

    def _failed(
        self,
        parts: Sequence[int],
        *,
        about: dict[str, Any],
        ended: Callable[[int], None],
        tick: Callable[[Mapping[int, str]], None],
    ) -> dict[int, tuple[Answer, int]]:
        """How parts failed in the end, and how often each was begun."""
        waiting = collections.deque(parts)
        n_begun: collections.Counter[int] = collections.Counter()
        failed: dict[int, tuple[Answer, int]] = {}
        n_made = 0
        self._about = about
        with self._started() as start:
            n_workers = min(self.n_workers, len(parts))
            log.info(
                "%s for %s",
                number_of(n_workers, "worker", "workers"),
                number_of(len(parts), "part", "parts"),
            )
            places: list[Worker | None] = [None] * n_workers
            try:
                while waiting or any(worker and worker.part is not None for worker in places):
                    for place, worker in enumerate(places):
                        if worker is None or worker.part is None:
                            if waiting:
                                worker = worker or start(place)  # noqa: PLW2901
                                places[place] = worker
                                if worker.is_there():
                                    worker.part = waiting.popleft()
                                    n_begun[worker.part] += 1
                                    worker.send(worker.part)
                            continue
                        answer = worker.poll()
                        if answer is None:
                            continue
                        part, worker.part = worker.part, None
                        if not answer.reason:
                            n_made += 1
                            ended(part)
                            continue
                        places[place] = None
                        worker.end(by=time.monotonic() + 1)
                        if answer.error or n_begun[part] >= self._tries:
                            failed[part] = answer, n_begun[part]
                            if not n_made and len(failed) >= _FAILED_MOST:
                                return failed
                        else:
                            log.warning("part %s is tried again: %s", part, answer)
                            waiting.append(part)  # after the others: it may be what is wrong
                    busy = [worker for worker in places if worker and worker.part is not None]
                    tick({w.part: w.name for w in busy if w.part is not None})
                    _wait(busy)
            finally:
                _end([worker for worker in places if worker is not None])
        return failed

    def _say(self, line: str) -> None:
        """Pass on what a worker says: of what all of them say, once."""
        if line not in self._said:
            self._said.add(line)
            log.warning("%s", line)


def _wait(workers: Sequence[Worker]) -> None:
    """Wait until one of them has said something, or for a moment."""
    poll = select.poll()
    for worker in workers:
        if worker.heard >= 0:
            poll.register(worker.heard, select.POLLIN)
    poll.poll(_POLL_S * 1e3)


def _end(workers: Sequence[Worker]) -> None:
    """End workers, after the batch at hand; a second signal insists."""
    by = 0.0
    try:
        for worker in workers:
            worker.ask_to_stop()
        by = time.monotonic() + _STOP_S
        for worker in workers:
            worker.end(by=by)
    except BaseException:
        for worker in workers:
            worker.end(by=0.0)
        raise


# --------------------------------------------------------------------------- processes


class _Processes(Pool):
    def __init__(self, *, workers: int | str, threads: int | str, tries: int) -> None:
        super().__init__(tries=tries)
        self._workers = workers
        self._threads = threads

    @property
    def n_workers(self) -> int:
        if isinstance(self._workers, int):
            return self._workers
        return len(self._gpus()) or min(n_threads(), _WORKERS_MOST)

    def _gpus(self) -> list[str]:
        """The names of the GPUs, as ``CUDA_VISIBLE_DEVICES`` takes them."""
        if self.required_task().device not in ("auto", "cuda"):
            return []
        import torch

        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        there = torch.cuda.device_count()
        return named.split(",")[:there] if named else [str(i) for i in range(there)]

    @contextlib.contextmanager
    def _started(self) -> Iterator[Callable[[int], Worker]]:
        task, gpus = self.required_task(), self._gpus()
        shared = max(1, n_threads() // self.n_workers)
        threads = self._threads if isinstance(self._threads, int) else shared

        def start(place: int) -> Worker:
            gpu = {"CUDA_VISIBLE_DEVICES": gpus[place % len(gpus)]} if gpus else {}
            return Process(task, self._about, threads=threads, env=gpu, say=self._say)

        yield start


class Process(Worker):
    """A process of this machine.

    Numbers go to it by its standard input, whose end is the end of whoever started it, and what it
    says comes back by another pipe: its standard output is the user's.

    Args:
        task: What it does.
        about: What it has to know beside.
        threads: How many it computes with.
        env: More of its environment.
        say: Called with the lines that it says.
    """

    def __init__(
        self,
        task: Task,
        about: dict[str, Any],
        *,
        threads: int,
        env: dict[str, str],
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        heard, mouth = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from embedx.engines import work; work({mouth})"],
                stdin=subprocess.PIPE,
                pass_fds=[mouth],
                start_new_session=True,  # Ctrl-C is for the driver
                env={**os.environ, **env, "OMP_NUM_THREADS": str(threads)},
            )
        except BaseException:
            os.close(heard)
            raise
        finally:
            os.close(mouth)
        os.set_blocking(heard, False)
        self.heard = heard
        self.name = f"process {self._process.pid} on {socket.gethostname()}"
        self._text = b""
        self._tell({"function": task.function, "settings": task.settings, "about": about})

    def _tell(self, message: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone, as poll will say
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def send(self, part: int) -> None:
        self._tell(part)

    def poll(self) -> Answer | None:
        status = self._process.poll()  # first: what it said before its end is then all there
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.heard, 2**16):
                self._text += data
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            said = json.loads(line)
            if "line" in said:
                self._say(said["line"])
            else:
                return Answer(**said)
        if status is None:
            return None
        if status >= 0:
            return Answer(f"its worker ended with exit status {status}")
        name = signal.Signals(-status).name
        memory = ", perhaps for want of memory" if -status == signal.SIGKILL else ""
        return Answer(f"its worker was killed by {name}{memory}")

    def ask_to_stop(self) -> None:
        self._process.terminate()

    def end(self, *, by: float) -> None:
        try:
            if self.heard >= 0:
                self._process.wait(max(0.0, by - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            if self.heard >= 0:
                self._process.kill()
                self._process.wait()
                assert self._process.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.close()
                os.close(self.heard)
                self.heard = -1


# --------------------------------------------------------------------------- in a worker


class _Line(Feed):
    """The parts that a driver sends."""

    def __init__(self, about: dict[str, Any], answer: Callable[[dict[str, Any]], None]) -> None:
        self.about = about
        self.part: int | None = None
        self.answer = answer
        self.asked: queue.Queue[int] = queue.Queue()

    def next(self) -> int | None:
        if self.part is not None:
            self.answer({})
        self.part = None
        self.part = self.asked.get()
        return self.part


class _Said(logging.Handler):
    """Warnings go to the driver; what is said before the first part it has said itself."""

    def __init__(self, feed: _Line) -> None:
        super().__init__(logging.WARNING)
        self._feed = feed

    def emit(self, record: logging.LogRecord) -> None:
        if self._feed.part is not None:
            self._feed.answer({"line": self.format(record)})


def work(mouth: int) -> None:
    """Make parts, in a process of its own, until the driver ends it or is gone itself.

    Args:
        mouth: The descriptor to answer by.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    turn = threading.Lock()

    def answer(message: dict[str, Any]) -> None:
        with turn:
            data = json.dumps(message).encode() + b"\n"
            while data:
                data = data[os.write(mouth, data) :]

    # Unbuffered: a thread that waits at a buffer holds its lock at the end of the interpreter.
    heard = os.fdopen(os.dup(0), "rb", buffering=0)
    first = heard.readline()
    if not first:
        return
    told = json.loads(first)
    feed = _Line(told["about"], answer)

    def listen() -> None:
        for line in heard:
            feed.asked.put(json.loads(line))
        os._exit(1)  # the driver is gone: nobody would hear how it ends

    threading.Thread(target=listen, daemon=True).start()
    log.handlers[:] = [_Said(feed)]
    log.setLevel(logging.WARNING)
    log.propagate = False
    try:
        module, _, name = told["function"].partition(":")
        getattr(importlib.import_module(module), name)(told["settings"], feed)
    except Interrupted:
        sys.exit(1)
    except BaseException as error:
        if not isinstance(error, EmbedxError):  # a bug of ours, or of the user's own code
            traceback.print_exc()
        answer({"reason": short(str(error), most=1000), "kind": type(error).__name__})
        sys.exit(1)


# --------------------------------------------------------------------------- Ray


class _Ray(Pool):
    def __init__(
        self,
        *,
        address: str | None,
        workers: int | str,
        threads: int | str,
        gpus: float | str,
        tries: int,
    ) -> None:
        super().__init__(tries=tries)
        self._address = address
        self._workers = workers
        self._threads = threads
        self._gpus = gpus
        self._joined = False
        self._is_said = False

    @property
    def n_workers(self) -> int:
        there = self._resources()
        _, cpus, gpus = self._shares(there)
        room = int(min(there.get("CPU", 0.0) // cpus, there["GPU"] // gpus if gpus else math.inf))
        if isinstance(self._workers, int):
            if self._workers > room and not self._is_said:
                self._is_said = True
                log.warning(
                    "the cluster has room for %s of %s workers: the others wait for more machines",
                    room,
                    self._workers,
                )
            return self._workers
        return max(1, room)

    def _resources(self) -> dict[str, float]:
        """What the cluster has in all; it is joined, or started, when it is first asked for."""
        import ray

        if not self._joined:
            _join_ray(self._address)
            self._joined = True
        return dict(ray.cluster_resources())

    def _shares(self, there: dict[str, float]) -> tuple[int, int, float]:
        """Threads, processors and GPUs of a worker."""
        gpus = 0.0
        if self._gpus != "auto":
            gpus = float(self._gpus)
        elif self.required_task().device in ("auto", "cuda") and there.get("GPU"):
            gpus = 1.0
        if gpus and there.get("GPU", 0.0) < gpus:
            raise ConfigError(
                f"engine.gpus={gpus:g} for each worker, and the cluster has {there.get('GPU', 0):g}"
            )
        threads = 1
        if isinstance(self._threads, int):
            threads = self._threads
        elif gpus:
            threads = max(1, int(there.get("CPU", 1.0) * gpus // there["GPU"]))
        return threads, threads, gpus

    @contextlib.contextmanager
    def _started(self) -> Iterator[Callable[[int], Worker]]:
        import ray

        task = self.required_task()
        threads, cpus, gpus = self._shares(self._resources())
        # A part is tried again by us, in a new actor: Ray would do so without a word.
        place = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0)(_Place)
        path = {key: os.environ[key] for key in ("PYTHONPATH",) if key in os.environ}

        def start(_: int) -> Worker:
            actor = place.remote(task, self._about, os.getcwd(), threads, path)
            return _RayWorker(actor, self._say)

        try:
            yield start
        finally:
            ray.shutdown()
            self._joined = False


def _join_ray(address: str | None) -> None:
    """Join a Ray cluster, or start one on this machine.

    Raises:
        ConfigError: There is none, or none that answers in time.
    """
    import ray

    if address not in (None, "auto"):
        host, port = _host_and_port(address)
        try:
            socket.create_connection((host, port), _CONNECT_S).close()
        except OSError as error:
            raise ConfigError(
                f"engine.address={address} does not answer ({error.strerror or error}); name the "
                "head of a running cluster, as ray start prints it"
            ) from None
    logging.getLogger("ray").setLevel(logging.ERROR)
    given: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    failed: list[BaseException] = []

    def join() -> None:
        try:
            ray.init(address=address, **given)
        except BaseException as error:
            failed.append(error)

    if address is None:  # its processes end with the thread that starts them
        ray.init(address="local", num_cpus=n_threads(), include_dashboard=False, **given)
        return
    thread = threading.Thread(target=join, daemon=True)  # after a minute Ray ends the process
    thread.start()
    thread.join(_ANSWER_S)
    if thread.is_alive():
        raise ConfigError(
            f"no Ray cluster answers at engine.address={address} within {_ANSWER_S:.0f} s; name "
            "the head of a running cluster, as ray start prints it"
        )
    if failed:
        if isinstance(failed[0], ConnectionError) and address == "auto":
            raise ConfigError(
                "engine.address=auto, and no Ray cluster runs on this machine; start one with: ray "
                "start --head, or leave engine.address out"
            ) from None
        raise ConfigError(
            f"cannot join the Ray cluster engine.address={address}: {first_line(failed[0])}"
        ) from failed[0]


class _Place:
    """An actor: a process of embedx's own on a machine of the cluster, and its answers."""

    def __init__(
        self, task: Task, about: dict[str, Any], folder: str, threads: int, env: dict[str, str]
    ) -> None:
        os.chdir(folder)
        self._lines: list[str] = []
        self._process = Process(task, about, threads=threads, env=env, say=self._lines.append)

    def name(self) -> str:
        return self._process.name

    def make(self, part: int) -> tuple[list[str], Answer]:
        self._process.send(part)
        while (answer := self._process.poll()) is None:
            time.sleep(_POLL_S)
        lines, self._lines[:] = list(self._lines), []
        return lines, answer


class _RayWorker(Worker):
    def __init__(self, actor: Any, say: Callable[[str], None]) -> None:
        self._actor = actor
        self._say = say
        self._answer: Any = None
        self._named = actor.name.remote()

    def is_there(self) -> bool:
        import ray

        if not ray.wait([self._named], timeout=0)[0]:
            return False
        with contextlib.suppress(ray.exceptions.RayError):  # it is gone, as poll will say
            self.name = ray.get(self._named)
        return True

    def send(self, part: int) -> None:
        self._answer = self._actor.make.remote(part)

    def poll(self) -> Answer | None:
        import ray

        if not ray.wait([self._answer], timeout=0)[0]:
            return None
        try:
            lines, answer = ray.get(self._answer)
        except ray.exceptions.ActorDiedError as error:
            if "before finishing" in str(error):
                return Answer("its Ray actor died, killed, or with its machine")
            return Answer(f"its Ray actor failed: {short(str(error), most=300)}")
        except ray.exceptions.RayError as error:
            return Answer(f"its Ray actor failed: {short(str(error), most=300)}")
        for line in lines:
            self._say(line)
        return answer  # type: ignore[no-any-return]

    def ask_to_stop(self) -> None:
        """Nothing: what it has committed stands, and the process ends with its actor."""

    def end(self, *, by: float) -> None:
        import ray

        ray.kill(self._actor)
