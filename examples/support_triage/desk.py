"""A support desk: a message comes in, the model names its queue and priority, and people say whether that is right.

`python desk.py` opens the desk as a web page. What people click there is all that the next round of training needs.
"""

import html
from dataclasses import astuple, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl

from openai import OpenAI

from tunesmith.openai import learn_from

PROFILE = "triage"
_TASK = {"role": "system", "content": "Route this support message: queue/priority."}


@dataclass(frozen=True)
class Ticket:
    id: str
    message: str
    label: str  # what the model said, such as billing/urgent
    version: str  # which version said it, such as triage@v3


class Desk:
    """Asks the live model through the stock OpenAI client, and passes on what people say about its answers."""

    def __init__(self, server: str = "http://127.0.0.1:8321") -> None:
        self._client = learn_from(OpenAI(base_url=f"{server}/v1", api_key="any", max_retries=4, timeout=60))

    def route(self, message: str, *, learn: bool = True, model: str = PROFILE) -> Ticket:
        """Ask for queue and priority; with `learn=False` the server does not keep the answer."""
        asked = [_TASK, {"role": "user", "content": message}]
        answer = self._client.chat.completions.create(model=model, messages=asked, temperature=0, store=learn)
        return Ticket(answer.id, message, (answer.choices[0].message.content or "").strip(), answer.model)

    def confirm(self, ticket: Ticket) -> None:
        self._client.feedback(ticket.id, "helpful")

    def correct(self, ticket: Ticket, label: str) -> None:
        self._client.feedback(ticket.id, "irrelevant", correction=label)


_PAGE = """<!doctype html><title>Support desk</title><h1>Support desk</h1>
<form method=post><input name=message size=80 placeholder="a support message" autofocus><button>send</button></form>"""
_TICKET = """<form method=post><p>{1}<br><b>{2}</b> <small>by {3}</small> <input type=hidden name=id value="{0}">
<button>right</button> <input name=label placeholder="or the right one: queue/priority"></form>"""


class Page(BaseHTTPRequestHandler):
    """One page: ask, see the answer, say whether it is right."""

    desk: Desk
    tickets: dict[str, Ticket]

    def do_GET(self) -> None:
        tickets = [_TICKET.format(*map(html.escape, astuple(each))) for each in self.tickets.values()]
        self.reply(200, "Content-Type", "text/html; charset=utf-8", _PAGE + "".join(tickets))

    def do_POST(self) -> None:
        said = dict(parse_qsl(self.rfile.read(int(self.headers["Content-Length"])).decode()))
        if "message" in said:
            ticket = self.desk.route(said["message"])
            self.tickets[ticket.id] = ticket
        elif known := self.tickets.pop(said.get("id", ""), None):
            self.desk.correct(known, said["label"]) if "label" in said else self.desk.confirm(known)
        self.reply(303, "Location", "/")

    def reply(self, status: int, header: str, value: str, body: str = "") -> None:
        self.send_response(status)
        self.send_header(header, value)
        self.end_headers()
        self.wfile.write(body.encode())


if __name__ == "__main__":
    Page.desk, Page.tickets = Desk(), {}
    print("the support desk is at http://127.0.0.1:8400")
    ThreadingHTTPServer(("127.0.0.1", 8400), Page).serve_forever()
