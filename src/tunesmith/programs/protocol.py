"""Names, limits and exit codes that both sides of the program protocol (version 1) agree on."""

from __future__ import annotations

from tunesmith.programs.shim import KEEPALIVE_EXIT, NO_SPACE_EXIT

SPEC = "spec.json"
EVENTS = "events.jsonl"
STATUS = "status.json"
CONTROL = "control.jsonl"
KEEPALIVE = "keepalive"
RESULT = "result.json"
STDOUT = "stdout.json"
STDERR = "stderr.log"
CHECKPOINTS = "checkpoints"
ARTIFACT = "artifact"
ANSWERS = "answers.jsonl"
REFERENCES = "references.json"

EXIT_OK = 0  # succeeded or stopped
EXIT_FAILED = 1
EXIT_BAD_CALL = 2  # no spec to work from, so no result either
EXIT_NO_SPACE = NO_SPACE_EXIT  # the disk had no room for the result
EXIT_NO_RESULT = 74  # the result could not be written
EXIT_INTERRUPTED = 75
EXIT_KEEPALIVE_LOST = KEEPALIVE_EXIT

MAX_LINE = 1 << 20
MAX_RESULT = 1 << 20
MAX_STDOUT = 1 << 20
MAX_STDERR = 256 << 20
MAX_EVENTS = 1 << 30
MAX_SPEC = 8 << 20
CAPS = {STDOUT: MAX_STDOUT, STDERR: MAX_STDERR, EVENTS: MAX_EVENTS}
"""By file: a program that writes more is killed at once, and the file is cut. Output and error come first."""
MAX_COUNT = 2**53 - 1  # larger counts would lose digits in JSON readers and columns

KEEPALIVE_SHARE = 0.8
"""A program ends itself when its keepalive is this share of the lease old; the shim ends it a little later."""
