"""A server with the routes of vLLM that targets use, in the shapes that vLLM 0.32 answers with; it writes no text."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from support.json_server import Answered, JsonServer

_CALL = {"index": 0, "id": "c1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}


class VllmServer(JsonServer):
    """Says `<model>: <last message>`; forgets its adapters when it restarts."""

    def __init__(self, *, key: str | None = None, can_load: bool = True) -> None:
        super().__init__()
        self.adapters: dict[str, str] = {}
        self.running: list[str] = []
        self.key, self.can_load = key, can_load
        self.tells_stop_reason = True
        self.says_beside_calls: str | None = None
        self.breaks_off = False
        """Whether streams end in the middle, without [DONE]."""
        self.num_written = 0

    def restart(self) -> None:
        self.stop()
        self.adapters.clear()
        self.start()

    def answer(self, method: str, path: str, body: Any, call: BaseHTTPRequestHandler) -> Any:
        if self.key is not None and call.headers.get("Authorization") != f"Bearer {self.key}":
            raise Answered(401, {"error": "Unauthorized"})
        match (method, path):
            case ("GET", "/v1/models"):
                return self._models()
            case ("POST", "/v1/load_lora_adapter") if self.can_load:
                return self._load(body["lora_name"], Path(body["lora_path"]))
            case ("POST", "/v1/unload_lora_adapter") if self.can_load:
                if self.adapters.pop(body["lora_name"], None) is None:
                    raise _error(404, f"The lora adapter '{body['lora_name']}' cannot be found.", "NotFoundError")
                return b"Success"
            case ("POST", "/v1/chat/completions" | "/v1/completions"):
                return self._write(body, call, is_chat="chat" in path)
            case ("POST", "/detokenize"):
                return {"prompt": "".join(map(chr, body["tokens"]))}
            case ("GET", "/metrics"):
                return self._metrics().encode()
        raise Answered(404, {"detail": "Not Found"})

    def _models(self) -> dict[str, Any]:
        base = {"id": "tiny", "object": "model", "root": "/models/tiny", "parent": None}
        adapters = [
            {"id": name, "object": "model", "root": root, "parent": "tiny"} for name, root in self.adapters.items()
        ]
        return {"object": "list", "data": [base, *adapters]}

    def _load(self, name: str, path: Path) -> bytes:
        if name in self.adapters:
            raise _error(400, f"The lora adapter '{name}' has already been loaded.", "InvalidUserInput")
        if not (path / "adapter_config.json").is_file():
            raise _error(404, f"Loading lora {name} failed: No adapter found for <path>", "NotFoundError")
        if json.loads((path / "adapter_config.json").read_bytes())["r"] > 16:
            raise _error(500, "LoRA rank is greater than max_lora_rank 16", "InternalServerError")
        self.adapters[name] = str(path)
        return f"Success: LoRA adapter '{name}' added successfully.".encode()

    def _write(self, body: dict[str, Any], call: BaseHTTPRequestHandler, *, is_chat: bool) -> Any:
        model = body["model"]
        if model != "tiny" and model not in self.adapters:
            raise _error(404, f"The model `{model}` does not exist.", "NotFoundError")
        asked = body["messages"][-1]["content"] if is_chat else body["prompt"]
        text = f"{model}: {asked}"
        stops = [body["stop"]] if isinstance(body.get("stop"), str) else body.get("stop") or []
        matched = next((stop for stop in stops if stop in text), None)
        text = text if matched is None else text.partition(matched)[0]
        ending = {"finish_reason": "stop", **({"stop_reason": matched} if self.tells_stop_reason else {})}
        self.num_written += 1
        names = {"id": f"chatcmpl-{self.num_written}", "model": model}
        calls = {"tool_calls": [_CALL], "content": self.says_beside_calls} if body.get("tools") else {}
        if calls:
            ending["finish_reason"] = "tool_calls"
        if body.get("stream"):
            deltas = [{"role": "assistant", **calls}] if calls else [{"content": char} for char in text]
            _stream(call, names, deltas, None if self.breaks_off else ending)
            return ...
        tokens = [{"token": char, "logprob": -0.5, "bytes": None, "top_logprobs": []} for char in text]
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, **calls},
            "logprobs": {"content": tokens},
            **ending,
            "token_ids": [ord(char) for char in text],
        }
        usage = {"prompt_tokens": len(asked), "completion_tokens": len(text), "total_tokens": len(asked + text)}
        ids = [ord(char) for char in asked]
        return {
            "object": "chat.completion",
            **names,
            "choices": [choice],
            "usage": usage,
            "prompt_token_ids": ids,
        }

    def _metrics(self) -> str:
        now = f'max_lora="2",running_lora_adapters="{",".join(self.running)}",waiting_lora_adapters=""'
        return (
            f'vllm:num_requests_running{{engine="0",model_name="tiny"}} {len(self.running)}.0\n'
            'vllm:lora_requests_info{max_lora="2",running_lora_adapters="old@v1",waiting_lora_adapters=""} 1.0e+09\n'
            f"vllm:lora_requests_info{{{now}}} 2.0e+09\n"
        )


def _error(status: int, message: str, kind: str) -> Answered:
    return Answered(status, {"error": {"message": message, "type": kind, "param": None, "code": status}})


def _stream(
    call: BaseHTTPRequestHandler, names: dict[str, str], deltas: list[dict[str, Any]], ending: dict[str, Any] | None
) -> None:
    call.send_response(200)
    call.send_header("Content-Type", "text/event-stream")
    call.send_header("Connection", "close")
    call.end_headers()
    said: list[dict[str, Any]] = [{"delta": delta} for delta in deltas]
    for part in said if ending is None else [*said, {"delta": {"content": ""}, **ending}]:
        chunk = {"object": "chat.completion.chunk", **names, "choices": [{"index": 0, **part}]}
        call.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        call.wfile.flush()
    if ending is not None:
        call.wfile.write(b"data: [DONE]\n\n")
