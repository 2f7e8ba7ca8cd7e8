"""Texts without what tells where they were made: absolute paths, names of this host and this user, addresses of databases.

Of a path its last part is left; text that is none of these is left as it is.

>>> scrub("[Errno 2] No such file: '/home/ann/my models/net.py', see https://example.org/a/b and int8/64@bf16")
"[Errno 2] No such file: 'net.py', see https://example.org/a/b and int8/64@bf16"
>>> scrub("images:/data/ann/faces.npz#steps=3")
'images:faces.npz#steps=3'
>>> scrub("store postgresql://ann:secret@db.example.org/trials, file C:\\\\Users\\\\ann\\\\plan.json")
'store postgresql://..., file plan.json'
"""

from __future__ import annotations

import getpass
import re
import socket
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

QUOTED = re.compile(r"(?P<quote>['\"])(?:file://)?(?:/|~|[A-Za-z]:[\\/]|\\\\)[^'\"\n]*[\\/](?P<last>[^'\"\n\\/]*)(?P=quote)")
POSIX = re.compile(r"(?:file://|(?<![\w/.<>@*\]-]))(?:~\w*)?/(?:[^\s/'\"<>:,;()]+/)+(?P<last>[^\s/'\"<>:,;()]*)")
ROOTED = re.compile(
    r"(?<![\w/.<>@*\]-])(?:~/|/(?=(?:home|root|Users|tmp|var|etc|opt|usr|mnt|srv|data)\b))(?P<last>[^\s/'\"<>:,;()]+)"
)
WINDOWS = re.compile(r"(?:\b[A-Za-z]:|\\)[\\/](?:[^\s\\/'\"<>:,;()]+[\\/])*(?P<last>[^\s\\/'\"<>:,;()]*)")
DATABASE = re.compile(r"\b(?P<kind>postgres\w*|mysql|sqlite)(?:\+\w+)?://[^\s'\",;)]*")
LOGIN = re.compile(r"\b(?P<kind>\w+)://[^\s/@'\"]+@[^\s'\",;)]*")
SURROGATE = re.compile("[\ud800-\udfff]")
ANYBODY = frozenset({"root", "user", "admin", "ubuntu", "debian", "runner", "nobody", "localhost", "main", "test"})  # tell nothing
SHORTEST = 4  # of a name that is looked for: shorter ones are parts of ordinary words


@lru_cache(maxsize=1 << 14)
def scrub(text: str) -> str:
    """`text` without them."""
    text = SURROGATE.sub("\ufffd", text)
    if "/" in text or "\\" in text:
        text = text.replace(_home(), "~")  # which may have blanks in it
        for pattern in (DATABASE, LOGIN):
            text = pattern.sub(lambda found: f"{found['kind']}://...", text)
        text = QUOTED.sub(lambda found: f"{found['quote']}{found['last'] or '...'}{found['quote']}", text)
        for pattern in (WINDOWS, POSIX, ROOTED):
            text = pattern.sub(lambda found: found["last"] or "...", text)
    return _names().sub("...", text)


def scrub_all(value: Any, names: Mapping[str, str] | None = None) -> Any:
    """A JSON value with every text of it scrubbed, keys too; `names` has texts that become something else."""
    names = names or {}
    if isinstance(value, str):
        return names.get(value) or scrub(value)
    if isinstance(value, dict):
        return {scrub(str(key)): scrub_all(part, names) for key, part in value.items()}
    return [scrub_all(part, names) for part in value] if isinstance(value, list) else value


def scrub_names(names: Iterable[str]) -> dict[str, str]:
    """Names that tell things apart, scrubbed so that they still do.

    >>> scrub_names(["/home/ann/plan.json", "/home/bob/plan.json", "lpmm"])
    {'/home/ann/plan.json': 'plan.json', '/home/bob/plan.json': 'plan.json (2)', 'lpmm': 'lpmm'}
    """
    found, taken = dict[str, str](), set[str]()
    for name in dict.fromkeys(names):
        new = scrub(name)
        found[name] = next(text for i in count(1) if (text := new if i == 1 else f"{new} ({i})") not in taken)
        taken.add(found[name])
    return found


@lru_cache(maxsize=1)
def _home() -> str:
    """Of this user; something that no text has where there is none to speak of."""
    home = str(Path.home())
    return home if len(home) > SHORTEST else "\ud800"


@lru_cache(maxsize=1)
def _names() -> re.Pattern[str]:
    """This host and this user, where they are told apart from words."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # an id without a name
        user = ""
    host = socket.gethostname()
    names = {name for name in (user, host, host.partition(".")[0]) if len(name) >= SHORTEST and name.lower() not in ANYBODY}
    return (
        re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})\b") if names else re.compile(r"(?!)")
    )
