"""A program for the `command` target: keeps what it serves in a JSON file, or misbehaves as it is told."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main(place: Path, manner: str, asked: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(place.read_text()) if place.exists() else {"held": {}, "live": None}
    adapter, verb = asked["adapter"], asked["verb"]
    assert asked["v"] == 1
    said: dict[str, Any] = {}
    match verb:
        case "refusal":
            said = {"refusal": "too clever" if (Path(adapter["path"]) / "clever").exists() else None}
        case "load" if manner != "lies":
            state["held"][adapter["name"]] = adapter["digest"]
        case "flip":
            if adapter is not None and adapter["name"] not in state["held"]:
                sys.exit(f"{adapter['name']} was never loaded")
            state["live"] = None if adapter is None else adapter["name"]
        case "unload":
            if state["live"] == asked["name"]:
                sys.exit("it is served")
            state["held"].pop(asked["name"], None)
        case "loaded":
            said = {"loaded": [*state["held"], "other@v1"]}
        case "observe":
            if state["live"] is not None and state["live"] not in state["held"]:
                sys.exit("it is gone")
            said = {"digest": None if state["live"] is None else state["held"][state["live"]]}
        case "probe":
            said = {"readings": None}
    place.write_text(json.dumps(state))
    return said


if __name__ == "__main__":
    told = json.load(sys.stdin)
    match sys.argv[2:]:
        case ["hangs"]:
            time.sleep(60)
        case ["garbage"]:
            print("all went well")
        case ["floods"]:
            sys.stdout.write("x" * (2 << 20))
        case ["nested"]:
            print("[" * 100_000)
        case ["fails"]:
            sys.exit("the cable is out")
        case manner:
            print(json.dumps(main(Path(sys.argv[1]), manner[0] if manner else "good", told)))
