"""The trainer protocol by hand: what a program in any language must do, shown with the standard library alone.

It trains the same toy as command_trainer.py, which leaves all this to `tunesmith.programs.host`.
"""

import argparse
import fnmatch
import hashlib
import json
import os
import shutil
import signal
import struct
import sys
import threading
import time
from pathlib import Path

LAYER, RANK, LR = "base_model.model.model.layers.0.self_attn.q_proj", 2, 0.1
BASE_FILES = ("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", "tokenizer*")
BASE_FILES += ("chat_template*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges*")
EXIT_CODES = {"succeeded": 0, "stopped": 0, "interrupted": 75, "failed": 1}
KEEPALIVE_LOST = 76


class Failure(Exception):
    """Ends the program as failed, with an error class that the retry table knows."""

    def __init__(self, error_class: str, message: str) -> None:
        super().__init__(message)
        self.error_class = error_class


# --- files: a folder counts only with a manifest that lists the sha256 of everything in it ---


def canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def publish(staged: Path, final: Path) -> str:
    """Write the manifest last, make everything durable, then rename; the folder's digest."""
    paths = sorted(path for path in staged.rglob("*") if path.is_file())
    files = {
        path.relative_to(staged).as_posix(): {"sha256": sha256(path.read_bytes()), "bytes": path.stat().st_size}
        for path in paths
    }
    (staged / "manifest.json").write_bytes(canonical({"v": 1, "files": files, "meta": {}}))
    for path in (*paths, staged / "manifest.json", staged):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    final.parent.mkdir(exist_ok=True)
    if not final.exists():  # the same step saved twice has the same content
        staged.rename(final)
    return sha256(canonical(files))


def verify(folder: Path) -> dict:
    """The manifest of a published folder, if every file still has its hash."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        damaged = [n for n, entry in manifest["files"].items() if sha256((folder / n).read_bytes()) != entry["sha256"]]
    except (OSError, ValueError, KeyError) as error:
        raise Failure("data", f"{folder.name} is not a published folder ({type(error).__name__})") from None
    if damaged:
        raise Failure("data", f"{folder.name}: {damaged[0]} is not what the manifest says")
    return manifest


def read_inputs(run: dict) -> dict:
    """What the program was really given, from the bytes; anything that is not the spec's ends it here."""
    base = Path(run["base"]["path"])
    names = [path for path in base.iterdir() if any(fnmatch.fnmatchcase(path.name, part) for part in BASE_FILES)]
    digest = sha256(canonical({path.name: sha256(path.read_bytes()) for path in names}))
    if digest != run["base"]["digest"]:
        raise Failure("mismatch", "the base model changed since the run was submitted")
    fingerprint = verify(Path(run["dataset"]["path"]))["meta"]["fingerprint"]
    if fingerprint != run["dataset"]["fingerprint"]:
        raise Failure("data", "the dataset is not what its fingerprint says")
    start = sha256(canonical(verify(Path(run["start"]["path"]))["files"])) if run["start"] else None
    return {"base_digest": digest, "start_digest": start, "dataset_fingerprint": fingerprint}


# --- the conversation with the worker ---


class Voice:
    """DIR/events.jsonl is written, DIR/control.jsonl and DIR/keepalive are read, TERM is heard."""

    def __init__(self, folder: Path, lease_s: float) -> None:
        self.folder, self.lease_s = folder, lease_s
        self.num_said = self.num_heard = 0
        self.is_terminating = False
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "is_terminating", True))
        threading.Thread(target=self._end_without_worker, daemon=True).start()

    def say(self, kind: str, **fields: object) -> None:
        self.num_said += 1
        event = {"v": 1, "seq": self.num_said, "at": time.time(), "type": kind, **fields}
        with (self.folder / "events.jsonl").open("a") as sink:
            sink.write(json.dumps(event) + "\n")

    def hear(self) -> list[dict]:
        lines = (self.folder / "control.jsonl").read_text().split("\n")[:-1]  # the last one may be half written
        fresh, self.num_heard = lines[self.num_heard :], len(lines)
        return [json.loads(line) for line in fresh]

    def _end_without_worker(self) -> None:
        """Whoever holds the lease renews the keepalive; without it another attempt may have begun."""
        seen, seen_at = b"", time.monotonic()
        while time.monotonic() - seen_at < 0.8 * self.lease_s:
            time.sleep(min(0.5, self.lease_s / 20))
            now = (self.folder / "keepalive").read_bytes()
            if now != seen:
                seen, seen_at = now, time.monotonic()
        os._exit(KEEPALIVE_LOST)


# --- the training ---


def train(spec: dict, voice: Voice) -> dict:
    """The fields of the result."""
    run, resume = spec["run"], spec["resume"]
    voice.say("phase", phase="hash")
    inputs = read_inputs(run)
    state = {"step": 0, "learnt": [0.0] * (RANK * run["base"]["lock"]["hidden_size"])}
    if resume:
        if sha256(canonical(verify(Path(resume["path"]))["files"])) != resume["digest"]:
            raise Failure("data", "the checkpoint is not the one that was chosen")
        state = json.loads((Path(resume["path"]) / "state.json").read_bytes())
    size, num_steps = len(state["learnt"]), run["recipe"]["max_steps"] or 20
    wanted = [byte / 2550 for byte in hashlib.shake_256(run["dataset"]["fingerprint"].encode()).digest(size)]
    voice.say("phase", phase="train")
    status = "succeeded"
    while status == "succeeded" and state["step"] < num_steps:
        time.sleep(0.05)  # a real step takes its time too
        gaps = [want - have for want, have in zip(wanted, state["learnt"], strict=True)]
        state = {"step": state["step"] + 1, "learnt": [w - (1 - LR) * gap for w, gap in zip(wanted, gaps, strict=True)]}
        status = after_step(spec, voice, state, sum(gap * gap for gap in gaps) / size, num_steps)
    done = {**inputs, "status": status, "num_steps": state["step"], "num_trained_tokens": state["step"] * size}
    if status == "interrupted":
        return done
    digest = publish(write_adapter(voice.folder / ".staged", state), voice.folder / "artifact")
    return {**done, "best_step": state["step"], "artifact": {"path": "artifact", "digest": digest}}


def after_step(spec: dict, voice: Voice, state: dict, loss: float, num_steps: int) -> str:
    """Tell, save, listen; the status that the training has now."""
    validation, step = spec["run"]["validation"], state["step"]
    voice.say("metrics", step=step, values={"loss": loss, "grad_norm": 2 * loss**0.5, "lr": LR})
    voice.say("progress", done=step, total=num_steps)
    if step % validation["every_steps"] == 0 or step == num_steps:
        voice.say("validation", step=step, values={validation["best_metric"]: loss}, is_best=True)
    wishes = voice.hear()
    if step % 50 == 0 or step == num_steps or wishes or voice.is_terminating:
        staged = write_adapter(voice.folder / ".staged", state, "adapter")
        (staged / "state.json").write_text(json.dumps(state))
        digest = publish(staged, voice.folder / "checkpoints" / f"step-{step}")
        voice.say("checkpoint", step=step, path=f"step-{step}", digest=digest, kinds=["best", "last"])
    status = "interrupted" if voice.is_terminating else "succeeded"
    for wish in wishes:
        status = {"stop": "stopped", "pause": "interrupted", "cancel": "interrupted"}.get(wish["kind"], status)
        voice.say("ack", request_id=wish["id"], detail=f"at step {step}")
    return status


def write_adapter(folder: Path, state: dict, below: str = "") -> Path:
    """PEFT's format: a config, and safetensors, which are a JSON header and plain numbers behind it."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / below).mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj"],
    }
    (folder / below / "adapter_config.json").write_text(json.dumps(config))
    width, header, body = len(state["learnt"]) // RANK, {}, b""
    tensors = {"lora_A": ([RANK, width], [1.0 / width] * (RANK * width)), "lora_B": ([width, RANK], state["learnt"])}
    for name, (shape, values) in tensors.items():
        place = [len(body), len(body) + 4 * len(values)]
        header[f"{LAYER}.{name}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": place}
        body += struct.pack(f"<{len(values)}f", *values)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / below / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--output-dir", type=Path, required=True)
    arguments = parser.parse_args()
    spec, folder = json.loads(arguments.spec.read_bytes()), arguments.output_dir
    voice = Voice(folder, spec["attempt"]["lease_s"])
    voice.say("started", pid=os.getpid())
    try:
        fields = train(spec, voice)
    except Failure as failure:
        fields = {"status": "failed", "error_class": failure.error_class, "error": str(failure)}
    prints = spec["run"]["fingerprints"]
    ours = {"attempt_id": spec["attempt"]["attempt_id"], "token": spec["attempt"]["token"]}
    ours |= {"config_fingerprint": prints["config"], "code_fingerprint": prints["code"]}
    result = json.dumps({"v": 1, "kind": "train", **ours, **fields}) + "\n"
    voice.say("finished", status=fields["status"])
    (folder / ".result.tmp").write_text(result)
    (folder / ".result.tmp").rename(folder / "result.json")
    print(result, end="")  # stdout carries the same JSON, and nothing else
    return EXIT_CODES[fields["status"]]


if __name__ == "__main__":
    sys.exit(main())
