"""Texts for people: without the secrets of URLs, and without characters that command a terminal."""

from __future__ import annotations

import re

__all__ = ["hidden", "printable", "shown"]

_URL = r"[A-Za-z][A-Za-z0-9+.-]*://"
_URL_IN_TEXT = re.compile(rf"{_URL}[^\s'\"<>]*")
_USER = re.compile(rf"({_URL})([^/?#]*)@")
_NAMED = re.compile(rf"({_URL})[^/@:\[]*:")
_PORT = re.compile(r"\d{1,5}/")
_WITHOUT_PORTS = re.compile(r"(?:gs|gcs|s3|s3a)://", re.IGNORECASE)
_QUERY = re.compile(rf"({_URL}[^?#]*)([?#].+)", re.DOTALL)
_KEYS = re.compile(r"(?:gs|gcs|s3|s3a|hdfs|file|local|memory)://", re.IGNORECASE)
"""URLs of stores whose keys may have a ``?`` or ``#`` of their own, and whose URLs have no queries."""

_SIGNED = re.compile(r"[?&](?:x-amz-|x-goog-|awsaccesskeyid=|googleaccessid=|signature=|sig=|token=)", re.IGNORECASE)
_HTTP = re.compile(r"https?://", re.IGNORECASE)


def shown(url: str) -> str:
    """Return a URL as messages and reports show it: without its password and without its query.

    A signed URL is a secret as a whole, and its signature is in the query. Other texts stay as they are.

    Example:
        >>> shown("https://user:password@host/run?sig=abc"), shown("s3://bucket/what?")
        ('https://user:***@host/run?***', 's3://bucket/what?')

    """
    if "://" not in url:
        return url
    url = _without_password(url)
    if _HTTP.match(url):  # a user's name alone may be a token
        url = _USER.sub(lambda match: match[0] if ":" in match[2] else f"{match[1]}***@", url)
    query = _QUERY.fullmatch(url)
    if query is None or (_KEYS.match(url) and not _SIGNED.search(query[2])):
        return url
    return f"{query[1]}{query[2][0]}***"


def _without_password(url: str) -> str:
    """Hide a password up to the last ``@`` that may end it: secrets of AWS have slashes, and are pasted unquoted."""
    user = _NAMED.search(url)
    if user is None or (_PORT.match(url, user.end()) and not _WITHOUT_PORTS.fullmatch(user[1])):
        return url
    rest = url[user.end() :]
    ends = (part.rfind("@") for part in (rest.partition("/")[0], re.split(r"[?#]", rest, maxsplit=1)[0]))
    end = max(ends)
    if end < 0:
        end = rest.rfind("@")
    return url if end < 0 else f"{url[: user.end()]}***{rest[end:]}"


def hidden(text: str) -> str:
    """Return a text with every URL in it as :func:`shown` returns it: an error of another library may quote one."""
    return _URL_IN_TEXT.sub(lambda match: shown(match[0]), text) if "://" in text else text


def printable(text: str, kept: str = "") -> str:
    r"""Return a text with escapes, as in ``\x1b``, for all characters that are not printable, except those in ``kept``.

    The name of a folder may hold sequences that move a terminal's cursor, or that change its title.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in kept else character.encode("unicode_escape").decode()
        for character in text
    )
