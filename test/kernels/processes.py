"""What scripts of this folder answer, in processes of their own: a process chooses once whether Triton interprets."""

import json
import os
import subprocess
import sys
from pathlib import Path

__all__ = ["answers_of"]


def answers_of(script, *names, **environment):
    """What ``script`` prints of the cases with these names, as JSON. Two processes share the cases: each is one thread."""
    command = [sys.executable, "-W", "ignore", str(Path(__file__).parent / script)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": {**os.environ, **environment}}
    parts = [part for part in (names[::2], names[1::2]) if part] or [()]
    started, answers = [subprocess.Popen([*command, *part], **pipes) for part in parts], {}
    for process in started:
        printed, errors = process.communicate(timeout=570)
        assert process.returncode == 0, errors[-3000:]
        answers.update(json.loads(printed))
    return answers
