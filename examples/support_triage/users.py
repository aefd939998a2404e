"""Simulated people who use the desk: they know the right label, and each day a new kind of request comes up.

`python users.py [DAYS] [SERVER]`: a day is 60 requests; the night ends when a new version answers, or after 10 minutes.
"""

import random
import sys
import time

from desk import Desk
from openai import OpenAIError

NEEDS = {
    "billing": ("I was charged twice for the {}", "the invoice for the {} is wrong", "please refund the {}"),
    "shipping": ("my parcel with the {} is late", "the courier lost the {}", "where is the {} that I ordered"),
    "returns": ("I want to send the {} back", "the {} is too small, I return it", "how do I return the {}"),
    "repair": ("the {} is broken", "the {} stopped working", "the {} makes a strange noise"),
    "account": ("I forgot the password of the {}", "I cannot log in to the {}", "my login to the {} is locked"),
    "sales": ("do you sell the {} in blue", "is there a discount on the {}", "what does the {} cost"),
    "privacy": ("delete my data about the {}", "who sees my data on the {}", "what data do you have on the {}"),
    "press": ("I write an article about the {}", "may our magazine show the {}", "a quote about the {} please"),
    "jobs": ("I apply to build the {}", "are you hiring for the {} team", "my CV for the {} job"),
    "legal": ("the licence of the {} is unclear", "our lawyer asks about the {}", "the contract for the {} ended"),
    "safety": ("the {} caught fire", "I got an electric shock from the {}", "the {} smells of smoke"),
    "partners": ("we would like to resell the {}", "our shop wants to stock the {}", "a partnership for the {}"),
}
"""What people write, by the queue that it belongs to; each day the next queue comes up."""
THINGS = ("lamp", "kettle", "router", "camera", "printer", "toaster", "speaker", "heater", "drill", "clock", "phone")
GREETINGS = ("", "Hello, ", "Hi! ", "Dear team, ")
ENDS = {"urgent": (". I need it today!", ". This is urgent!", "!! Now, please!"), "normal": (".", ". Thanks.", "...")}
SILENT = 0.1  # of the people say nothing about the answer


def a_request(rng: random.Random, queue: str) -> tuple[str, str]:
    """A message, and the label that is right for it."""
    priority = rng.choice(list(ENDS))
    need = rng.choice(NEEDS[queue]).format(rng.choice(THINGS))
    return rng.choice(GREETINGS) + need + rng.choice(ENDS[priority]), f"{queue}/{priority}"


def requests_of(day: int, num: int = 60) -> list[tuple[str, str]]:
    """What comes in on a day: half about the newest queue, half about any that came up by then."""
    rng, queues = random.Random(day), list(NEEDS)[: day + 1]
    return [a_request(rng, queues[-1] if rng.random() < 0.5 else rng.choice(queues)) for _ in range(num)]


def use(desk: Desk, requests: list[tuple[str, str]], rng: random.Random) -> tuple[int, int]:
    """Ask, then confirm or correct; how many answers were right, and how many requests failed."""
    num_right = num_failed = 0
    for message, label in requests:
        try:
            ticket = desk.route(message)
            num_right += ticket.label == label
            if rng.random() >= SILENT:
                desk.confirm(ticket) if ticket.label == label else desk.correct(ticket, label)
        except OpenAIError:  # the server is down: people come again tomorrow
            num_failed += 1
    return num_right, num_failed


if __name__ == "__main__":
    num_days, desk = int([*sys.argv, "12"][1]), Desk(*sys.argv[2:3])
    for day in range(num_days):
        version, until = desk.route("hello", learn=False).version, time.monotonic() + 600
        num_right, num_failed = use(desk, requests_of(day), random.Random(day))
        print(f"day {day + 1}, {version}: {num_right} of 60 right, {num_failed} failed", flush=True)
        while desk.route("hello", learn=False).version == version and time.monotonic() < until:
            time.sleep(2)
