"""The list of authors is read again when it changes; a broken one changes nothing, and is one sentence at start."""

import os
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from structlog.testing import capture_logs

from gracestream.pipeline.auth.authors import AuthorsError, AuthorsFile, parse_authors
from gracestream.pipeline.auth.signing import encode_public_key

KEYS = [Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32).public_key() for number in range(3)]
ANN = f'ann = {{ keys = ["{encode_public_key(KEYS[0])}"] }}\n'
BOT = (
    f'["review-bot@example.org"]\nkeys = ["{encode_public_key(KEYS[1])}",'
    f' "{encode_public_key(KEYS[2])}"]\nper_minute = 120\n'
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "authors.toml").write_text(ANN)
    return tmp_path / "authors.toml"


def test_an_author_has_a_name_keys_and_perhaps_a_limit(path: Path) -> None:
    ann, bot = parse_authors((ANN + BOT).encode(), path).values()
    assert (ann.name, ann.keys, ann.per_minute) == ("ann", (KEYS[0],), None)
    assert (bot.name, bot.keys, bot.per_minute) == ("review-bot@example.org", (KEYS[1], KEYS[2]), 120)


@pytest.mark.parametrize(
    ("given", "roles"),
    [
        ("", ("propose", "undo_own")),
        (", roles = []", ()),
        (', roles = ["undo_any", "propose", "propose"]', ("propose", "undo_any")),
    ],
)
def test_an_author_has_roles_or_the_usual_ones(path: Path, given: str, roles: tuple[str, ...]) -> None:
    (ann,) = parse_authors(ANN.replace(" }", given + " }").encode(), path).values()
    assert ann.roles == roles


def test_a_list_may_be_empty(path: Path) -> None:
    assert parse_authors(b"# nobody yet\n", path) == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (ANN + "bob = nothing\n", r"authors\.toml is not a valid list of authors: .*line 2"),
        (ANN + ANN, r"is not a valid list of authors: Cannot overwrite a value"),
        ("\udcff", r"is not a valid list of authors: .*utf-8"),
        ('keys = ["x"]', r"author 'keys': Expected `object`, got `array`"),
        ("ann = {}", r"author 'ann': .*missing required field `keys`"),
        ("ann = { keys = [] }", r"author 'ann': .*length >= 1 - at `\$.keys`"),
        ('ann = { keys = "x" }', r"author 'ann': .*got `str` - at `\$.keys`"),
        ('ann = { keys = ["x"] }', r"author 'ann': "),
        ('ann = { keys = ["AAAA"] }', r"author 'ann': it has 3 bytes, and an Ed25519 key has 32"),
        (ANN.replace("}", ", per_minute = -1 }"), r"author 'ann': .*at `\$.per_minute`"),
        (
            ANN.replace("}", ', roles = ["undo_all"] }'),
            r"author 'ann': 'undo_all' is not a role; the roles are propose, undo_",
        ),
        (ANN.replace("}", ', roles = "propose" }'), r"author 'ann': .*got `str` - at `\$.roles`"),
        (ANN.replace("ann", '""'), r"author '': .*length >= 1"),
        (ANN.replace("ann", "a" * 257), r"author 'a+': .*length <= 256"),
        (
            ANN.replace("}", ", per_minut = 5 }"),
            r"author 'ann': .*unknown field `per_minut`; did you mean `per_minute`\?",
        ),
    ],
)
def test_what_is_wrong_is_one_sentence_that_names_the_line_or_the_author(path: Path, text: str, reason: str) -> None:
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(AuthorsError, match=reason) as caught:
        AuthorsFile(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_list_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AuthorsError, match=r"the list of authors .*/none\.toml cannot be read: No such file"):
        AuthorsFile(tmp_path / "none.toml")


def test_who_is_taken_off_the_list_is_off_it_at_once(path: Path) -> None:
    path.write_text(ANN + BOT)
    authors = AuthorsFile(path)
    assert set(authors.load()) == {"ann", "review-bot@example.org"}
    path.write_text(ANN)
    assert set(authors.load()) == {"ann"}
    path.write_text("")
    assert authors.load() == {}


def test_a_list_put_in_place_by_renaming_counts(path: Path) -> None:
    authors = AuthorsFile(path)
    other = path.with_name("new.toml")
    other.write_text(BOT)
    other.rename(path)
    assert set(authors.load()) == {"review-bot@example.org"}


def test_a_change_that_keeps_size_and_time_counts(path: Path) -> None:
    """As a fast editor on a file system with coarse times makes it."""
    authors, before = AuthorsFile(path), path.stat()
    path.write_text(ANN.replace("ann", "bob"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert set(authors.load()) == {"bob"}


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: path.write_text("ann = ")], ids=["removed", "broken"])
def test_a_list_that_breaks_leaves_the_last_good_one_in_force_and_says_so_once(path: Path, spoil: Any) -> None:
    authors = AuthorsFile(path)
    spoil(path)
    with capture_logs() as events:
        assert [set(authors.load()) for _ in range(3)] == [{"ann"}] * 3
    (event,) = events
    assert (event["event"], event["log_level"], event["kept"]) == ("authors_reload_failed", "error", 1)
    assert str(path) in event["reason"]
    path.write_text(BOT)
    assert set(authors.load()) == {"review-bot@example.org"}
