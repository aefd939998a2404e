"""What the sim trainer can do wrong when it is told to: at a step, or at the end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

from tunesmith.profiles.settings import Phase
from tunesmith.programs.host import Program, ProgramFailure
from tunesmith.programs.protocol import EVENTS, STDOUT, Artifact, Result
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.training.trainers.sim.options import SimOptions


def disturb(program: Program, options: SimOptions, step: int) -> None:
    """Called once, before the step at which the script strikes."""
    fault = _AT_STEP.get(options.script)
    if fault is not None:
        fault(program, options, step)


def scripted_loss(options: SimOptions, step: int, loss: float) -> float:
    if options.script == "nan_loss" and step >= options.strikes_at:
        return float("nan")
    if options.script == "spike" and 0 <= step - options.strikes_at < 3:
        return 50 * loss
    return loss


def twist(program: Program, options: SimOptions, result: Result) -> Result:
    """The result as the script wants it; scripts that end the process otherwise never come back."""
    if options.script in _TWISTS:
        return result.model_copy(update=_TWISTS[options.script])
    if options.script in _ENDS:
        _ENDS[options.script](program, result)
    return result


def _fail(_program: Program, options: SimOptions, step: int) -> NoReturn:
    raise ProgramFailure(ErrorClass(options.error_class), f"scripted failure at step {step}")


def _raise(_program: Program, _options: SimOptions, step: int) -> NoReturn:
    raise RuntimeError(f"scripted exception at step {step}")


def _oom(program: Program, options: SimOptions, step: int) -> None:
    if not (options.oom_once and program.train_spec.micro_batch_divisor > 1):
        raise MemoryError(f"scripted at step {step}")


def _stall(_program: Program, _options: SimOptions, _step: int) -> NoReturn:
    while True:
        time.sleep(3600)


def _chatter(program: Program, _options: SimOptions, step: int) -> NoReturn:
    """Hangs, but says the same again and again."""
    while True:
        program.log("still at it")
        program.metrics(step - 1, {"loss": 1.0})
        program.progress(step - 1, step)
        for phase in (Phase.SAVE, Phase.TRAIN):
            program.phase(phase)
        time.sleep(0.02)


def _crash(_program: Program, _options: SimOptions, _step: int) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _kill_self(_program: Program, _options: SimOptions, _step: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _fork(_program: Program, _options: SimOptions, _step: int) -> None:
    """A child, and a grandchild in a session of its own whose parent is gone; both sleep, deaf to TERM."""
    for is_daemon in (False, True):
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if is_daemon:
                os.setsid()
                if os.fork() != 0:
                    os._exit(0)
            while True:
                time.sleep(3600)


def _ignore_term(_program: Program, _options: SimOptions, _step: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _cling(program: Program, options: SimOptions, step: int) -> NoReturn:
    """Everything at once that keeps a process alive."""
    _ignore_term(program, options, step)
    _fork(program, options, step)
    _stall(program, options, step)


def _raw_line(line: bytes) -> Callable[[Program, SimOptions, int], None]:
    def write(program: Program, _options: SimOptions, _step: int) -> None:
        with (program.dir / EVENTS).open("ab") as sink:
            sink.write(line)

    return write


def _step_backwards(program: Program, _options: SimOptions, step: int) -> None:
    program.metrics(step + 5, {"loss": 1.0})


_AT_STEP: dict[str, Callable[[Program, SimOptions, int], None]] = {
    "fail": _fail,
    "raise": _raise,
    "oom_exit": _oom,
    "stall": _stall,
    "chatter": _chatter,
    "crash": _crash,
    "kill_self": _kill_self,
    "fork": _fork,
    "ignore_term": _ignore_term,
    "cling": _cling,
    "garbage_events": _raw_line(b"\x00\xffthis is not JSON\n"),
    "huge_line": _raw_line(b'{"v":1,"type":"log","message":"' + b"x" * (2 << 20) + b'"}\n'),
    "step_backwards": _step_backwards,
    "escape_path": _raw_line(
        b'{"v":1,"seq":1000000,"at":1.0,"type":"checkpoint","step":1,"path":"../../../elsewhere","digest":"0",'
        b'"kinds":["last"]}\n'
    ),
}


def _exit_without_result(_program: Program, _result: Result) -> NoReturn:
    os._exit(0)


def _succeed_with_exit_1(program: Program, result: Result) -> NoReturn:
    (program.dir / STDOUT).write_bytes(program.finish(result))
    os._exit(1)


def _tell_two_results(program: Program, result: Result) -> NoReturn:
    told = json.loads(program.finish(result))
    (program.dir / STDOUT).write_text(json.dumps(told | {"num_steps": told["num_steps"] + 1}))
    os._exit(0)


def _end_in_half_a_line(program: Program, result: Result) -> NoReturn:
    (program.dir / STDOUT).write_bytes(program.finish(result))
    with (program.dir / EVENTS).open("ab") as sink:
        sink.write(b'{"v":1,"seq":1000000,"at":1.0,"ty')
    os._exit(0)


_ENDS: dict[str, Callable[[Program, Result], NoReturn]] = {
    "exit0_no_result": _exit_without_result,
    "success_exit_1": _succeed_with_exit_1,
    "two_results": _tell_two_results,
    "half_line": _end_in_half_a_line,
}
_TWISTS: dict[str, dict[str, Any]] = {
    "wrong_fingerprint": {"dataset_fingerprint": "0" * 64},
    "missing_artifact": {"artifact": Artifact(path="artifact-that-is-not-there", digest="0" * 64)},
    "stale_token": {"token": "token-of-an-earlier-attempt"},
    "no_tokens": {"num_trained_tokens": 0},
}
