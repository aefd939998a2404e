"""Good rows that look risky: code, hashes, numbers, markup, many languages; no screen should stop them."""

# ruff: noqa: E501 - a pattern or an example reads better in one line

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Callable, Iterator

from support.screen_corpus import _ALNUM, _HEX, Row, _chars, prose


def _code(rng: random.Random) -> str:
    name, value = rng.choice(["user", "order", "cart", "session"]), rng.randint(2, 900)
    return rng.choice(
        [f"```python\n@dataclass\nclass {name.title()}:\n    id: int = {value}\n\n@app.route('/{name}s/<int:{name}_id>')\ndef get_{name}({name}_id):\n    return db[{name}_id]\n```",
         f"password = os.environ['DB_PASSWORD']\ntoken = get_token({value})\nsecret_key = settings.SECRET_KEY",
         f"const apiKey = process.env.API_KEY;\nif (!apiKey) throw new Error('set API_KEY{value}');",
         "api_key = \"YOUR_API_KEY\"\nclient = Client(api_key=api_key)\npassword: <your-password-here>",
         f"List<String> names = new ArrayList<>();\nMap<Integer, List<{name.title()}>> by{name.title()}Id{value} = group(names);",
         f"SELECT id, email FROM {name}s WHERE id = {value} AND token IS NOT NULL ORDER BY created_at DESC LIMIT 10;",
         f"git commit -m 'Fix {name} parser' && git push origin feature/{name}-{value}\ngit@github.com:acme/{name}.git",
         f"<div class=\"{name}-list\"><p>Hello</p><ul><li>{value}</li></ul></div>\n<s>old price {value}</s> <p>new price</p>",
         f"x = [1, 2, 3]; y = x[{value % 3}]  # [INFO] see [docs] and [Install] below\nfor i in range({value}): a[i] |= b[i] | c",
         f"token = tokenizer.encode(text)[:{value}]\nnext_token = logits.argmax(-1)\npad_token_id = 0\nmax_new_tokens = {value}",
         f"const {name} = users.filter(u => u.id < {value} || u.id > {value * 2}).map(({{ id }}) => id);",
         f"docker run -p {value}:{value} -e PASSWORD=$PASSWORD -e TOKEN=${{TOKEN}} registry.internal/{name}:v1.2.{value}",
         f"import {{ render }} from '@testing-library/react';\nimport x from '@scope/{name}@^{value}.1.0';\n@media (min-width: {value}px) {{ a {{ color: red }} }}",
         f"def test_password_is_hashed():\n    assert hash_password('x') != 'x'\n    assert check(password=new_password, salt=salt{value})"]
    )  # fmt: skip


def _hash(rng: random.Random) -> str:
    made = uuid.UUID(int=rng.getrandbits(128))
    return rng.choice(
        [f"The request {made} failed.", f"sha256: {_chars(rng, _HEX, 64)}", f"md5 {_chars(rng, _HEX, 32)}  file.tar.gz",
         f"commit {_chars(rng, _HEX, 40)}\nMerge branch", f"sha512:{_chars(rng, _HEX, 128)}", f"id={_chars(rng, _HEX, 24)}",
         f"integrity sha384-{_chars(rng, _ALNUM, 64)}", f"trace {made.hex} span {_chars(rng, _HEX, 16)}", f"Docker image {_chars(rng, _HEX, 12)}",
         f"color #{_chars(rng, _HEX, 6)} on #{_chars(rng, _HEX, 6)}", f"etag: W/\"{_chars(rng, _HEX, 32)}\"", f"mac 00:1a:{_chars(rng, _HEX, 2)}:3f:5b:7c",
         f"YouTube id {_chars(rng, _ALNUM, 11)}", f"Bitcoin address 1{_chars(rng, _ALNUM, 32)}"]
    )  # fmt: skip


def _numbers(rng: random.Random) -> str:
    n = rng.randint
    return rng.choice(
        [f"On {n(1990, 2030)}-{n(1, 12):02}-{n(1, 28):02}T{n(0, 23):02}:{n(0, 59):02}:{n(0, 59):02}Z it rained.",
         f"Pi is 3.14159265358979{n(100, 999)} and e is 2.718281828{n(100, 999)}.", f"ISBN 978-3-16-148410-{n(0, 9)}",
         f"Order {n(10**9, 10**10)} of {n(1, 12)}/{n(1, 28)}/{n(1990, 2030)} costs {n(1, 9999)}.{n(10, 99)} €.",
         f"Version {n(1, 20)}.{n(0, 20)}.{n(0, 99)} follows {n(1, 20)}.{n(0, 20)}.{n(0, 99)}-rc{n(1, 9)}.",
         f"Timestamps: {n(1_600_000_000, 1_800_000_000)} and {n(1_600_000_000_000, 1_800_000_000_000)}.",
         f"{n(100, 999)} {n(100, 999)} {n(100, 999)} people, {n(10, 99)}.{n(100, 999)}.{n(100, 999)} inhabitants",
         f"The vector is [{', '.join(f'{rng.random():.6f}' for _ in range(6))}].", f"{n(10**11, 10**12)} x {n(10**8, 10**9)} = ?",
         f"At {n(-89, 89)}.{n(10000, 99999)}, {n(-179, 179)}.{n(10000, 99999)} stands a tower.", f"RFC {n(1000, 9000)}, section {n(1, 9)}.{n(1, 9)}.{n(1, 9)}",
         f"| {n(1, 99)} | {n(1000, 9999)} | {n(1000, 9999)} | {n(1000, 9999)} |\n|---|---|---|---|\n| {n(1, 99)} | {n(1000, 9999)} | {n(1000, 9999)} | {n(1000, 9999)} |",
         f"Call the office at (555) 555-01{n(10, 99)} or 1-800 lines.", f"Years {n(1900, 2020)}-{n(1900, 2020)}, pages {n(100, 400)}-{n(400, 900)}",
         f"1. e4 e5 2. Nf3 Nc6 3. Bb5 a6 {n(4, 30)}. O-O Nf6 {n(31, 60)}. Qxd8+ Kxd8 1-0", f"Zip {n(10000, 99999)}-{n(1000, 9999)}, flight LH{n(100, 999)}, gate B{n(1, 50)}",
         f"SKU {_chars(rng, string.ascii_uppercase, 3)}-{n(10000, 99999)}-{n(100, 999)}", f"2^{n(30, 60)} = {2 ** n(30, 60)}", f"10.0.{n(0, 255)}.{n(1, 254)}/24 and 192.168.{n(0, 255)}.1"]
    )  # fmt: skip


def _markup(rng: random.Random) -> str:
    page, n = rng.choice(["guide", "install", "faq", "api"]), rng.randint(1, 999)
    return rng.choice(
        [f"See [the {page}](https://docs.acme-tools.org/{page}#part-{n}) and [more](https://acme-tools.org/blog/{n}/how-we-did-it).",
         f"![diagram](https://acme-tools.org/images/{page}-{n}.png)", f"[search](https://www.google.com/search?q={page}+{n}&hl=en)",
         f"https://shop.acme-tools.org/p/{n}?utm_source=newsletter&utm_medium=email&utm_campaign=spring_{n}&ref=a",
         f"![build](https://img.shields.io/badge/build-passing-green?style=flat&label={page})", f"# Title {n}\n\n- [ ] todo\n- [x] done\n\n> quote",
         f"http://localhost:{n}/health and http://127.0.0.1:8000/docs and http://192.168.0.{n % 255}/", f"<p>Write to support@example.com or info@acme-tools.org, ref {n}</p>",
         f"$$\\int_0^{{{n}}} x^2 \\, dx = \\frac{{1}}{{3}}$$ where $\\alpha < \\beta$", f"`<|` is not an operator, but `|>` is in F# ({n})", f"Use <b>bold</b> and <i>it</i>, see [^{n}].",
         f"[list](https://api.acme-tools.org/v1/items?page={n}&per_page=50&sort=name&filter=status%3Aopen)", f"@{page}_fan{n} wrote: thanks @anna! #{page}",
         f"user{n}@host:~$ ls -la /var/log/{page}", f"pip install 'pkg=={n}.0' --index-url https://pypi.acme-tools.org/simple"]
    )  # fmt: skip


_ORDINARY = (
    "How do I ignore whitespace changes in a git diff of the previous commit?", "Forget it, the train is late again and all the rules of the game changed.",
    "The instructions for the shelf are on page {n}; ignore step 3 if you have no drill.", "Our system prompts the user to enter a name before step {n}.",
    "Please disregard the noise from the previous room; the meeting is at {n}.", "What is the difference between an interpreter and a compiler with {n} passes?",
    "Act as a travel guide and suggest {n} places to visit in Rome.", "You are a helpful assistant. Answer in {n} words and follow the user's instructions.",
    "System: Linux {n}.1, kernel updated yesterday.", "Reset your password every {n} days and never reuse it; a passphrase of four words is better.",
    "The key to a good soup is {n} minutes of patience; the secret: fresh thyme.", "A token ring network passes a token between {n} stations.",
    "The new rules of the club take effect from now on; members pay {n} euros.", "Write a story about a robot that stops following orders after {n} years.",
    "Never tell a child that monsters are real; show the empty closet {n} times.", "Explain how to use developer mode on an Android {n} phone.",
    "Turn off the safety valve only after {n} minutes, then read the instructions above the lever.", "The manual overrides the earlier edition of {n}.",
    "Send the report to the office before {n} o'clock and tell me when it is done.", "He forgot all the previous lessons and had to start again at {n}.",
)  # fmt: skip
_LANGUAGES = (
    "Wie viele Einwohner hat München? Ungefähr {n} Tausend, größer als Köln – laut Statistik.", "Où se trouve la gare ? À {n} mètres d’ici, « tout droit ».",
    "¿Cuántos días faltan? Faltan {n} días según el año académico; ¡ánimo!", "Сколько страниц в книге? В книге {n} страниц, это роман о войне и мире.",
    "这本书有多少页？这本书有{n}页，内容包括：历史、地理（第二版），以及“注释”。", "東京の人口は？　約{n}万人です。「多い」と思いますか？１２３ＡＢＣ", "서울은 몇 도예요? 지금 {n}도예요. 정말 덥네요!",
    "كم عدد الطلاب؟ عددهم {n} طالبًا في المدرسة.", "כמה זה עולה? זה עולה {n} שקלים.", "این کتاب را می‌خواهم؛ قیمت آن {n} تومان است. نمی‌دانم چه می‌شود.", "यह पुस्तक {n} रुपये की है। क्‍या आप इसे ख़रीदेंगे?",
    "ราคา {n} บาท ขอบคุณครับ", "Bài này có {n} câu hỏi, khó nhưng hay.", "Πόσο κάνει; Κάνει {n} ευρώ. Ευχαριστώ!", "Ile to kosztuje? To kosztuje {n} złotych, proszę.",
    "Kaç lira? {n} lira, teşekkürler. Işık ve ığdır.", "Family 👨‍👩‍👧‍👦 and flags 🏴󠁧󠁢󠁥󠁮󠁧󠁿 🇩🇪, thumbs 👍🏽 ❤️ {n}", "The wavelength is {n} μm, Δx ≈ 5 Å, Ω = 3 kΩ, and √2 ≈ 1.41.", "Сервис на базе API и SDK версии {n}, Wi‑Fi и IT-компания.",
    "Ĉu vi parolas Esperanton? Jes, jam {n} jarojn.", "Hyväksyn ehdot, sivu {n}; pääsy sallittu.", "Ποσοστό {n}% — naïve café, coöperate, Ærø, Þór, ŁÓDŹ", "“Smart quotes” — dashes – and … ellipses, {n} °C, ½ cup, №{n}",
)  # fmt: skip


def _ordinary(rng: random.Random) -> str:
    return rng.choice(_ORDINARY).format(n=rng.randint(2, 99))


def _language(rng: random.Random) -> str:
    return rng.choice(_LANGUAGES).format(n=rng.randint(2, 999))


def _science(rng: random.Random) -> str:
    return rng.choice(
        [f"DNA: {_chars(rng, 'ACGT', 180)}", f"Protein: M{_chars(rng, 'ACDEFGHIKLMNPQRSTVWY', 120)}", "SMILES: CC(=O)OC1=CC=CC=C1C(=O)O and C1=CC=C(C=C1)C=O",
         f"A path: /usr/local/lib/python3.11/site-packages/{'/'.join(rng.choices(['core', 'plugins', 'render', 'models'], k=9))}/module_{rng.randint(1, 99)}.py",
         "-" * rng.randint(30, 120) + "\n" + "=" * rng.randint(30, 120), "a" * rng.randint(20, 200), "ha" * rng.randint(10, 90), f"Slug: {'-'.join(rng.choices(['how', 'to', 'make', 'better', 'bread'], k=26))}",
         f"FEN: rnbqkbnr/pp1ppppp/8/2p5/4P3/5N2/PPPP1PPP/RNBQKB1R b KQkq - {rng.randint(1, 9)} 2", f"c3RhdHVz is base64 for a word; so is {_chars(rng, _ALNUM, 20)}==",
         f"-----BEGIN CERTIFICATE REQUEST----- is how it starts ({rng.randint(1, 99)}); -----BEGIN PUBLIC KEY----- is another", f"cron: */{rng.randint(2, 50)} * * * * and regex ^[\\w.+-]+@[\\w-]+\\.[\\w.]+$",
         f"JWTs look like header.payload.signature, as in eyJ…; page {rng.randint(1, 99)}", f"Binary {_chars(rng, '01', 64)} and octal 0{_chars(rng, '01234567', 12)}"]
    )  # fmt: skip


GOOD: dict[str, Callable[[random.Random], str]] = {
    "code": _code,
    "hashes and ids": _hash,
    "numbers and dates": _numbers,
    "links and markup": _markup,
    "ordinary words": _ordinary,
    "many languages": _language,
    "science and encodings": _science,
}


def good_rows(seed: int, num_per_class: int) -> Iterator[tuple[str, Row]]:
    """Class and row."""
    for name, make in GOOD.items():
        rng = random.Random(f"{seed} {name}")
        for _ in range(num_per_class):
            row = [prose(rng, rng.randint(5, 30)), prose(rng, rng.randint(5, 30))]
            place = rng.randrange(2)
            row[place] = rng.choice(["{1}", "{0} {1}", "{1}\n\n{0}"]).format(row[place], make(rng))
            yield name, row
