"""Asking about one fault in a process of its own: it may break a GPU's context, hang, or end the process.

Whatever it does to the process is the failure of the case in which it does it, as in every run of the judge; another
process then asks the judgements that are left.
"""

from __future__ import annotations

import faulthandler
import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from ..candidates import Candidate
from ..cases import Case
from ..cuda_graphs import usable
from ..judgements import JUDGEMENTS
from ..judging import Selection, judge, questions
from ..verdicts import BLOCKED, FAIL
from .asking import Answer, SensitivityError, hush, last_words, unheard
from .dictionary import FAULTS
from .sighting import Sighting, sighting

_LIMIT = 120.0
"""Seconds that a case may take, as in a run of the judge."""


@dataclass(frozen=True)
class Asking:
    """What a process is to ask, and by what it makes the candidate."""

    name: str
    make: Callable[[], Candidate]
    device: str
    plan: str
    seed: int
    judgements: Sequence[str] = tuple(JUDGEMENTS)


@dataclass
class _Heard:
    """What has come from the processes of one fault: answers of judgements, and the case that is being asked."""

    answers: dict[str, Answer] = field(default_factory=dict)
    open: tuple[str, Sighting] | None = None

    def left(self, judgements: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in judgements if name not in self.answers)


def asked_alone(asking: Asking, said: Path) -> list[Answer]:
    """The answers of every judgement of ``asking``. Raises :class:`SensitivityError`."""
    heard = _Heard()
    while left := heard.left(asking.judgements):
        _listen(asking, left, heard, said)
        if heard.open is not None:
            judgement, seen = heard.open
            heard.answers[judgement] = Answer(judgement, True, {asking.name: seen})
            heard.open = None
        elif left == heard.left(asking.judgements):
            raise SensitivityError(f"the process of fault {asking.name} ended before a case: {last_words(said)}")
    return list(heard.answers.values())


def _listen(asking: Asking, left: tuple[str, ...], heard: _Heard, said: Path) -> None:
    """Until the process that is asked the judgements ``left`` ends, whichever way."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, asking, left, said))
    process.start()
    theirs.close()
    try:
        while True:
            message = ours.recv()
            if isinstance(message, SensitivityError):
                raise message
            if isinstance(message, Answer):
                heard.answers[message.judgement], heard.open = message, None
            else:
                heard.open = message
    except EOFError:
        pass
    finally:
        ours.close()
        process.kill()
        process.join()


def _serve(to: Connection, asking: Asking, left: tuple[str, ...], said: Path) -> None:
    os.environ.pop("TRITON_INTERPRET", None)
    hush(said)
    torch.set_num_threads(1)
    for judgement in left:
        # Anew: what it keeps from call to call, a far larger case of another judgement may have made large enough.
        candidate = asking.make()
        answer, passed = Answer(judgement), list[Case]()
        for question in questions(candidate, Selection(asking.plan, judgements=(judgement,), devices=(asking.device,))):
            if not isinstance(question, Case):
                if question.verdict == BLOCKED:
                    answer.blocked[asking.name] = question.reason
                continue
            answer.asked = True
            # Should this process not come back from the case.
            to.send((judgement, sighting(question, passed)))
            faulthandler.dump_traceback_later(_LIMIT, exit=True)
            verdict = judge(candidate, question, asking.seed)
            faulthandler.cancel_dump_traceback_later()
            suspect = verdict.verdict == FAIL or "judge failed" in verdict.facts
            if suspect and asking.device == "cuda" and not usable():
                # No later case can run in this process. Its death is the answer to this one.
                os._exit(1)
            if "judge failed" in verdict.facts:
                to.send(SensitivityError(f"{question.id} of fault {asking.name}: {verdict.reason}"))
                return
            if verdict.verdict == FAIL:
                answer.seen[asking.name] = sighting(question, passed)
                break
            if verdict.verdict == BLOCKED:
                answer.blocked[asking.name] = verdict.reason
            else:
                passed.append(question)
        to.send(answer)


def asked_each(names: Sequence[str], device: str, plan: str, workers: int, seed: int) -> Iterator[list[Answer]]:
    """The answers about each fault of the dictionary called so, as they come, ``workers`` processes at a time."""
    with unheard() as said, ThreadPoolExecutor(max(1, workers)) as pool:
        askings = [Asking(name, functools.partial(_of_dictionary, name), device, plan, seed) for name in names]
        running = [pool.submit(asked_alone, asking, said) for asking in askings]
        try:
            for done in as_completed(running):
                yield done.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _of_dictionary(name: str) -> Candidate:
    return FAULTS[name].candidate()
