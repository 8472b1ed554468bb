"""The shipped databases, a library and a railway: generated, with the same rows on every machine."""

import contextlib
import datetime
import random
import sqlite3
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

LIBRARY_TABLES = """
CREATE TABLE branch (branch_id INTEGER PRIMARY KEY, name TEXT NOT NULL, city TEXT NOT NULL, opened INTEGER);
CREATE TABLE author (author_id INTEGER PRIMARY KEY, name TEXT NOT NULL, country TEXT, born INTEGER);
CREATE TABLE book (
    book_id INTEGER PRIMARY KEY, title TEXT NOT NULL, author_id INTEGER NOT NULL REFERENCES author(author_id),
    genre TEXT NOT NULL, year INTEGER NOT NULL, pages INTEGER, price REAL NOT NULL);
CREATE TABLE member (
    member_id INTEGER PRIMARY KEY, name TEXT NOT NULL, branch_id INTEGER NOT NULL REFERENCES branch(branch_id),
    joined DATE NOT NULL, email TEXT);
CREATE TABLE loan (
    loan_id INTEGER PRIMARY KEY, book_id INTEGER NOT NULL REFERENCES book(book_id),
    member_id INTEGER NOT NULL REFERENCES member(member_id), loaned DATE NOT NULL, due DATE NOT NULL, returned DATE);
"""
RAILWAY_TABLES = """
CREATE TABLE station (
    station_id INTEGER PRIMARY KEY, name TEXT NOT NULL, region TEXT NOT NULL, platforms INTEGER NOT NULL,
    opened INTEGER);
CREATE TABLE line (line_id INTEGER PRIMARY KEY, name TEXT NOT NULL, colour TEXT NOT NULL);
CREATE TABLE stop (
    line_id INTEGER NOT NULL REFERENCES line(line_id), station_id INTEGER NOT NULL REFERENCES station(station_id),
    position INTEGER NOT NULL, km REAL NOT NULL, PRIMARY KEY (line_id, position));
CREATE TABLE train (
    train_id INTEGER PRIMARY KEY, name TEXT NOT NULL, line_id INTEGER REFERENCES line(line_id), seats INTEGER NOT NULL,
    built INTEGER NOT NULL);
CREATE TABLE trip (
    trip_id INTEGER PRIMARY KEY, train_id INTEGER NOT NULL REFERENCES train(train_id), day DATE NOT NULL,
    passengers INTEGER NOT NULL, delay INTEGER, cancelled BOOLEAN NOT NULL);
"""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_FIRST = _words(
    "Ada Bruno Carla Dario Elsa Farid Greta Hugo Ines Jonas Kira Leo Mara Nils Olga Pavel Rosa Sami Tilda Uma"
)
_LAST = _words("Amsel Birk Corvo Dahl Ebert Fontana Grove Hoven Ilić Jansen Keller Lund Moreno Nowak Okafor Pires")
_COUNTRIES = ("Norway", "Italy", "Ghana", "Chile", "Poland", "Japan")
_GENRES = ("novel", "history", "science", "poetry", "crime", "travel")
_ADJECTIVES = _words("Quiet Northern Hidden Last Burning Paper Distant Second Glass Winter")
_NOUNS = _words("Harbour Orchard Letter Mountain Clock River Garden Station Promise Island")
_BRANCHES = (
    ("Central", "Arden", 1911),
    ("Riverside", "Arden", 1978),
    ("Old Mill", "Brook", 1965),
    ("Harbour", "Calder", 1990),
    ("Hillcrest", "Brook", None),
    ("Parkside", "Dunmore", 2004),
)
_REGIONS = ("North", "South", "East", "West")
_PLACES = _words("Alder Birch Cedar Dune Elm Fern Gorse Heath Ivy Juniper Kelp Larch Moss Nettle Oak Pine Quince Reed")
_LINES = {"Coast Line": "blue", "Valley Line": "green", "Ridge Line": "red", "Loop": "yellow", "Branch": "red"}
_TRAINS = _words("Comet Heron Lynx Meteor Otter Falcon Badger Swift Marten Kestrel Raven Ibex")


class _Draws:
    """Random choices based on `Random.random` only, which is stable across Python versions."""

    def __init__(self, seed: int):
        self._next = random.Random(seed).random

    def number(self, low: int, high: int) -> int:
        return low + int(self._next() * (high - low + 1))

    def one(self, items: Sequence[T]) -> T:
        return items[int(self._next() * len(items))]

    def chance(self, share: float) -> bool:
        return self._next() < share

    def day(self, first: str, days: int) -> datetime.date:
        return datetime.date.fromisoformat(first) + datetime.timedelta(days=self.number(0, days - 1))


def _library(db: sqlite3.Connection) -> None:
    draws = _Draws(41)
    db.executescript(LIBRARY_TABLES)
    for branch, (name, city, opened) in enumerate(_BRANCHES, 1):
        _insert(db, "branch", branch, name, city, opened)
    for author in range(1, 25):
        name = f"{_FIRST[(author * 7) % 20]} {_LAST[(author * 5) % 16]}"
        born = None if draws.chance(0.15) else draws.number(1890, 1985)
        _insert(db, "author", author, name, draws.one(_COUNTRIES), born)
    for book in range(1, 71):
        title = f"The {draws.one(_ADJECTIVES)} {draws.one(_NOUNS)}"
        pages = None if draws.chance(0.1) else draws.number(80, 720)
        by, genre = draws.number(1, 22), draws.one(_GENRES)
        year, price = draws.number(1950, 2023), draws.number(400, 4800)
        _insert(db, "book", book, title, by, genre, year, pages, price / 100)
    for member in range(1, 46):
        name = f"{_FIRST[(member * 3) % 20]} {_LAST[(member * 11 + member // 16) % 16]}"
        email = None if draws.chance(0.3) else f"{name.split()[0].lower()}{member}@mail.example"
        joined = draws.day("2019-01-01", 1800)
        _insert(db, "member", member, name, draws.number(1, 5), joined.isoformat(), email)
    for loan in range(1, 241):
        loaned = draws.day("2024-01-01", 330)
        kept = None if draws.chance(0.12) else (loaned + datetime.timedelta(days=draws.number(2, 40))).isoformat()
        due = loaned + datetime.timedelta(days=28)
        _insert(db, "loan", loan, draws.number(1, 64), draws.number(1, 41), loaned.isoformat(), due.isoformat(), kept)


def _railway(db: sqlite3.Connection) -> None:
    draws = _Draws(97)
    db.executescript(RAILWAY_TABLES)
    for station, place in enumerate(_PLACES, 1):
        opened = None if draws.chance(0.12) else draws.number(1860, 1990)
        name, region = f"{place} {draws.one(('Road', 'Park', 'Bridge'))}", draws.one(_REGIONS)
        _insert(db, "station", station, name, region, draws.number(1, 8), opened)
    for line, (name, colour) in enumerate(_LINES.items(), 1):
        _insert(db, "line", line, name, colour)
        served = [station for station in range(1, 17) if draws.chance(0.45)]
        km = 0.0
        for position, station in enumerate(served, 1):
            _insert(db, "stop", line, station, position, km)
            km = round(km + draws.number(15, 120) / 10, 1)
    for train, name in enumerate(_TRAINS, 1):
        on = None if train in (5, 11) else draws.number(1, 4)
        _insert(db, "train", train, name, on, draws.number(6, 20) * 20, draws.number(1985, 2022))
    for trip in range(1, 261):
        cancelled = draws.chance(0.08)
        delay = None if cancelled else max(0, draws.number(-12, 35))
        day = draws.day("2024-03-01", 92)
        passengers = 0 if cancelled else draws.number(5, 240)
        train = draws.one((1, 2, 3, 4, 6, 7, 8, 9, 10))
        _insert(db, "trip", trip, train, day.isoformat(), passengers, delay, int(cancelled))


def _insert(db: sqlite3.Connection, table: str, *values: str | float | None) -> None:
    db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(values))})", values)


_MAKERS: dict[str, Callable[[sqlite3.Connection], None]] = {"library": _library, "railway": _railway}
OWN_NAMES = tuple(_MAKERS)


def own_database(name: str) -> bytes:
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        _MAKERS[name](db)
        db.commit()
        return db.serialize()
