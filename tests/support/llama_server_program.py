"""A program that takes llama-server's arguments and answers its routes; it writes no real text."""

from __future__ import annotations

import os
import sys
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # it is started as a script

from support.json_server import Answered, JsonServer


class LlamaServer(JsonServer):
    def __init__(self, arguments: list[str]) -> None:
        super().__init__()
        self.adapters: list[dict[str, Any]] = []
        words = iter(arguments)
        for word in words:
            if word == "--lora-scaled":
                path, _, scale = next(words).rpartition(":")
                with open(path, "rb") as source:
                    assert source.read(4) == b"GGUF", path
                self.adapters.append({"id": len(self.adapters), "path": path, "scale": float(scale)})
            elif word == "--port":
                self._port = int(next(words))
            elif word == "--fails":
                sys.exit("error: failed to load model")

    def answer(self, method: str, path: str, body: Any, call: BaseHTTPRequestHandler) -> Any:
        if path == "/health":
            return {"status": "ok"}
        if call.headers.get("Authorization") != f"Bearer {os.environ['LLAMA_API_KEY']}":
            raise Answered(401, {"error": {"message": "Invalid API Key", "type": "authentication_error", "code": 401}})
        match (method, path):
            case ("GET", "/lora-adapters"):
                return self.adapters
            case ("GET", "/slots"):
                return [{"id": 0, "is_processing": False}]
            case ("POST", "/apply-template"):
                return {"prompt": body["messages"][-1]["content"]}
            case ("POST", "/tokenize"):
                return {"tokens": [ord(char) for char in body["content"]]}
            case ("POST", "/completion"):
                return self._complete(body)
            case ("POST", "/v1/chat/completions"):
                text = f"{self._who(body['lora'])}: {body['messages'][-1]['content']}"
                choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
                return {"object": "chat.completion", "model": "whatever.gguf", "choices": [choice]}
        raise Answered(404, {"error": {"message": "File Not Found", "type": "not_found_error", "code": 404}})

    def _who(self, lora: list[dict[str, Any]]) -> str:
        names = [self.adapters[entry["id"]]["path"] for entry in lora if entry["scale"]]
        return names[0].rpartition("/")[2] if names else "base"

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        text = f"{self._who(body['lora'])}: {body['prompt']}"[: body["n_predict"]]
        return {
            "content": text,
            "tokens": [ord(char) for char in text],
            "tokens_evaluated": len(body["prompt"]),
            "completion_probabilities": [{"id": ord(char), "logprob": -0.25} for char in text],
            "stop_type": "limit",
        }


if __name__ == "__main__":
    LlamaServer(sys.argv[1:]).start()
    while True:
        time.sleep(60)
